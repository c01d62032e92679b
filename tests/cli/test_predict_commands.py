"""`fedhb predict` and `fedhb personalise`: where results go, and what is said of the data."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest
from command_line import SMALL

import fedhb
from fedhb.runs.from_settings import train
from fedhb.runs.settings import Settings


def test_a_failed_prediction_leaves_the_last_one(run, tmp_path, monkeypatch):
    assert run("train", *SMALL, "--out", "x")[0] == 0
    np.save(tmp_path / "in.npy", fedhb.data.load("digits").test.x[:5])
    assert run("predict", "x", "in.npy", "--out", "p.npz")[0] == 0
    before = (tmp_path / "p.npz").read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedhb.files.os.fsync", full)
    code, printed = run("predict", "x", "in.npy", "--out", "p.npz")
    assert code == 1 and "No space left" in printed
    assert (tmp_path / "p.npz").read_bytes() == before and sorted(
        p.name for p in tmp_path.glob("*p.npz*")
    ) == ["p.npz"]


def test_brackets_in_a_path_are_told(run, tmp_path):
    code, printed = run("train", *SMALL, "--out", "runs/[try 2]")
    assert code == 0 and "runs/[try 2]" in printed
    code, printed = run("report", "runs/[try 2]")
    assert code == 0 and "[try 2]" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compare", "--algorithms", "fedavg", "--out", "file"], "file"),
        (["personalise", "x", "--data", "mine.npz", "--out", "file"], "file"),
        (["personalise", "x", "--data", "bad.npz"], "42"),
        (["predict", "x", "x.npy", "--out", "no/p.npz"], "folder no"),
        (["predict", "x", "x.npy", "--out", "x"], "folder"),
        (["predict", "x", "none.npy"], "none.npy"),
        (["predict", "x", "one.npy"], "one.npy"),
        (["predict", "x", "."], "Is a directory"),
        (["predict", "x", ""], "Is a directory"),
        (["predict", "x", "x.npy"], ""),
        (["predict", "x", "x.npy", "--out", "preds"], "predictions in preds.npz"),
    ],
)
def test_where_results_go(trained, run, tmp_path, arguments, says):
    """Places that cannot be written to, and senseless examples, are told before the work, with
    code 2.
    """
    shutil.copytree(trained, tmp_path / "x")
    (tmp_path / "file").write_text("mine")
    x = np.zeros((3, 1, 8, 8))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "none.npy", x[:0])
    np.save(tmp_path / "one.npy", np.float32(1))
    np.savez(tmp_path / "mine.npz", x=x, y=np.array([0, 1, 2]))
    np.savez(tmp_path / "bad.npz", x=x, y=np.array([0, 1, 42]), split=np.array([0, 0, 1]))
    code, printed = run(*arguments)
    assert says in printed and "Traceback" not in printed
    assert code == (0 if "predictions in" in printed else 2)
    assert (tmp_path / "file").read_text() == "mine" and not (
        tmp_path / "x/personalised/bad"
    ).exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run to read."""
    out = tmp_path_factory.mktemp("trained") / "x"
    train(Settings.of(num_clients=10, rounds=1, algorithm="fedavg"), out, progress=False)
    return out


def test_a_users_own_model_and_regression(run, tmp_path):
    (tmp_path / "mymodel.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, n, out, width):\n"
        "        super().__init__()\n"
        "        self.a, self.b = nn.Linear(n, width), nn.Linear(width, out)\n"
        "    def forward(self, x):\n"
        "        return self.b(self.a(x).tanh())\n"
        "def factory(shape, outputs, width=8):\n"
        "    return Net(shape[0], outputs, width)\n"
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    np.savez(tmp_path / "t.npz", x=x, y=x.sum(1) + 100.0, client=np.arange(120) % 6)
    flags = [
        "--data",
        "t.npz",
        "--model",
        "mymodel:factory",
        "--rounds",
        "3",
        "--fraction",
        "0.5",
        "--lr",
        "0.01",
    ]
    assert run("train", *flags, "--set", "model.width=4", "--out", "x")[0] == 0
    result = json.loads((tmp_path / "x/result.json").read_text())
    assert set(result["global"]) == {"rmse", "nll", "coverage"}
    np.save(tmp_path / "in.npy", x[:5])
    code, printed = run(
        "predict", "x", "in.npy"
    )  # the folder may come from elsewhere, and a factory is code
    assert code == 2 and "--model mymodel:factory" in printed
    assert run("predict", "x", "in.npy", "--model", "othermodel:factory")[0] == 2
    own = ["--model", "mymodel:factory"]
    assert run("predict", "x", "in.npy", *own)[0] == 0
    saved = np.load(tmp_path / "in.predictions.npz")
    assert saved["mean"].shape == (5, 1) and (saved["deviation"] > 0).all()
    np.save(tmp_path / "wrong.npy", x[:5, :2])
    code, printed = run("predict", "x", "wrong.npy", *own)
    assert code == 2 and "(5, 2)" in printed and "[n, 3]" in printed


def test_what_the_data_were_taken_for_is_told(run, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3)).astype(np.float32)
    few = ["--rounds", 1, "--personal-epochs", 1]
    np.savez(
        tmp_path / "all.npz",
        x=x,
        y=np.arange(120) % 2,
        client=np.arange(120) % 6,
        split=np.arange(120) % 5 == 0,
    )
    printed = run("train", "--data", "all.npz", *few, "--out", "a")[1]
    assert "all: 6 clients" in printed
    assert "`client`" not in printed and "`split`" not in printed
    np.savez(tmp_path / "bare.npz", x=x, y=np.arange(120) % 2)
    printed = run(
        "train",
        "--data",
        "bare.npz",
        *few,
        "--num-clients",
        4,
        "--shards-per-client",
        2,
        "--out",
        "b",
    )[1]
    assert "bare: 4 clients" in printed and "`client`" in printed
    assert "`split`" in printed and "20%" in printed
    np.savez(tmp_path / "floats.npz", x=x, y=np.arange(120) % 2 + 0.0, client=np.arange(120) % 6)
    with pytest.warns(UserWarning, match="targets.* 2 "):
        printed = run("train", "--data", "floats.npz", *few, "--out", "c")[1]
    assert "90%" in printed


def test_an_unfinished_run_is_used_with_a_word(run, tmp_path, monkeypatch):
    def stop(*given: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedhb.runs.run.Evaluation.results", stop)
    assert run("train", *SMALL, "--out", "x")[0] == 130
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "new.npy", np.zeros((2, 1, 8, 8), np.uint8))
    np.savez(tmp_path / "mine.npz", x=np.zeros((4, 1, 8, 8), np.uint8), y=np.arange(4))
    for command in (
        ("predict", "x", "new.npy"),
        ("personalise", "x", "--data", "mine.npz", "--epochs", 1),
    ):
        code, printed = run(*command)
        assert code == 0 and "round 4" in printed


def test_rows_of_several_clients_are_not_personalised_on_together(run, tmp_path):
    assert run("train", *SMALL, "--out", "x")[0] == 0
    np.savez(
        tmp_path / "two.npz",
        x=np.zeros((4, 1, 8, 8), np.uint8),
        y=np.arange(4),
        client=np.array(["b", "a", "a", "b"]),
    )
    code, printed = run("personalise", "x", "--data", "two.npz")
    assert code == 2 and all(word in printed for word in ("two.npz", "2 clients", "a, b"))
