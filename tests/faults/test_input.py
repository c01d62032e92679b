"""Wrong input of any kind raises an InputError that names the value, before anything
is trained or written.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import CLASSES, FEATURES, arrays, clients, mlp, seeded
from quick_fit import fit
from torch import nn

import fedhb
from fedhb.clients.clients import Clients
from fedhb.errors import DivergedError, InputError
from fedhb.likelihood import GaussianRegression
from fedhb.runs import checkpoint

X, Y = np.zeros((3, FEATURES)), np.array([0, 1, 2])


@pytest.mark.parametrize(
    ("train", "test", "says"),
    [
        ([(X, Y), (X[:0], Y[:0])], None, "client 1 .*training"),
        ([(np.full_like(X, np.nan), Y)], None, "client 0.*row 0, column 0"),
        (
            [(X, Y), (np.where(np.eye(3, 4) > 0, np.inf, X), Y)],
            None,
            "client 1.*row 0, column 0",
        ),
        ([(X, np.array([0, 1, -1]))], None, "label -1"),
        ([(X, Y), (X[:, :3], Y)], None, r"client 1 .*\(3,\).*\(4,\)"),
        ([(X, Y[:2])], None, "client 0 .*3 .*2 "),
        ([(X, np.array([0.5, np.nan, 1.0]))], None, "targets.*row 1"),
        ([(X.astype(str), Y)], None, "<U"),
        ([], None, "no clients"),
    ],
)
def test_clients(train, test, says):
    with pytest.raises(InputError, match=says):
        Clients.from_arrays(train, test)


def test_a_label_beyond_the_classes():
    with pytest.raises(InputError, match="label 2 "):
        Clients.from_arrays([(X, Y)], num_classes=2)


class Strict(nn.Module):
    """Has opinions about its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == 99, "needs 99 features"
        return self.layer(x)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (mlp(torch.float32, outputs=4), "4 outputs.*3 "),
        (
            nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)),
            r"inputs.*\(4,\)",
        ),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(5, 3)),
            r"inputs.*\(4,\)",
        ),
        (
            nn.Sequential(nn.Linear(4, 3), nn.Flatten(0)),
            r"\(6,\).*2 ",
        ),
        (Strict(), r"\(4,\).*needs 99 features"),
        (nn.Flatten(), "requires_grad"),
        (mlp(torch.float32).requires_grad_(False), "requires_grad"),
    ],
)
def test_models(model, says):
    with pytest.raises(InputError, match=says):
        fit(model)


def test_a_head_that_does_not_exist():
    with pytest.raises(InputError, match=r"head='classifier'.*hidden, act, head"):
        fit(head="classifier")


def test_a_gate_needs_a_linear_head():
    with pytest.raises(InputError, match="linear head"):
        fit(algorithm=fedhb.Mixture(), head="")


@pytest.mark.parametrize(
    ("outputs", "likelihood", "says"),
    [
        (1, None, None),  # the mean of each target, under noise of a fixed size
        (2, None, None),  # and its noise
        (3, None, "3 outputs.*2 .*noise"),
        (1, GaussianRegression(), "1 outputs.*2 "),
        (2, GaussianRegression(noise=1.0), "2 outputs.*1 "),
    ],
)
def test_outputs_for_real_targets(outputs, likelihood, says):
    who = Clients.from_arrays([(x, x[:, 0]) for x, _ in arrays()])
    model = mlp(torch.float32, outputs=outputs)
    if says is None:
        assert fit(model, who, likelihood=likelihood).state.done == 2
    else:
        with pytest.raises(InputError, match=says):
            fit(model, who, likelihood=likelihood)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fraction": 0.0}, "fraction=0.0"),
        ({"fraction": 1.5}, "fraction=1.5"),
        ({"fraction": math.nan}, "fraction=nan"),
        ({"rounds": 0}, "rounds=0"),
        ({"local_epochs": 0}, "local_epochs=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"lr": math.inf}, "lr=inf"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"personal_lr": 0.0}, "personal_lr=0.0"),
        ({"personal_epochs": 0}, "personal_epochs=0"),
        ({"checkpoint_every": 0}, "checkpoint_every=0"),
        ({"workers": -1}, "workers=-1"),
        ({"schedule": "linear"}, "schedule='linear'"),
        ({"batch_norm": "none"}, "batch_norm='none'"),
        (
            {"evaluate_on": "validation"},
            "evaluate_on='validation'",
        ),
        ({"evaluate_on": "tests"}, "evaluate_on='tests'"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"algorithm": fedhb.NIW(p_do=1.5)}, r"niw\.p_do=1.5"),
        ({"algorithm": fedhb.Mixture(num_prototypes=0)}, r"mixture\.num_prototypes=0"),
        ({"algorithm": fedhb.FedProx(mu=-1.0)}, r"fedprox\.mu=-1.0"),
    ],
)
def test_settings(options, says, tmp_path):
    with pytest.raises(InputError, match=re.escape(says) if "\\" not in says else says):
        fit(out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()  # nothing was begun


def test_holdout_clients_need_the_split_that_is_evaluated(tmp_path):
    novel = Clients.from_arrays(arrays([4, 4]))
    with pytest.raises(InputError, match=r"holdout clients.*test"):
        fit(holdout=novel, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_client_with_one_example_and_batch_norm():
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    with pytest.raises(InputError, match=r"client 1 .*example"):
        fit(model, clients([4, 1, 4]), fraction=1.0)


def test_a_folder_that_holds_a_run(tmp_path):
    fit(out=tmp_path / "run")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(InputError, match=f"{re.escape(str(tmp_path / 'run'))}.*resume"):
        fit(out=tmp_path / "run")
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(InputError, match=re.escape(str(out))):
            fit(out=out)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_with_other_files_is_used_and_they_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    fit(out=tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "result.json").exists()


@pytest.fixture(scope="module")
def run() -> Any:
    return fit()


@pytest.mark.parametrize(
    "algorithm", [fedhb.NIW(), fedhb.FedAvg()]
)  # Mixture's proximal step stays stable
def test_a_learning_rate_far_too_large(algorithm, tmp_path):
    """The run ends with an error, and no checkpoint holds the damage."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(FEATURES, FEATURES), nn.LeakyReLU())]
    with seeded():
        model = nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))
    out = tmp_path / "run"
    with pytest.raises(DivergedError, match=r"round \d+.*learning rate"):
        fit(
            model,
            None,
            algorithm,
            lr=1e6,
            rounds=50,
            fraction=1.0,
            local_epochs=5,
            schedule="constant",
            out=out,
        )
    kept = checkpoint.load(out / "checkpoint")
    assert kept is None or all(torch.isfinite(value).all() for value in kept[0].server.values())


class Spoil:
    """Spoils one client's inputs after the third round."""

    def __init__(self, who: Clients):
        self.who = who

    def on_start(self, done: int, rounds: int) -> None:
        pass

    def on_round(self, record: dict[str, Any], state: Any) -> None:
        if state.done == 3:
            self.who.train.x[self.who.train.rows_of(2)] = math.nan

    def on_end(self) -> None:
        pass


def test_the_last_checkpoint_before_the_divergence_is_good(tmp_path):
    """It is that of the last whole round, it can be loaded, and the run can be resumed from it once
    the cause is gone.
    """

    def good() -> Clients:
        return replace(clients(), files={"data": "hash"})  # the data are what their files are

    who, out = good(), tmp_path / "run"
    options: dict[str, Any] = {
        "rounds": 6,
        "fraction": 1.0,
        "schedule": "constant",
        "evaluate_on": None,
    }
    with pytest.raises(DivergedError, match=r"round 4.*client 2 .*NaN.*learning rate"):
        fit(nn_relu(), who, fedhb.FedAvg(), out=out, callbacks=[Spoil(who)], **options)
    kept = fedhb.load(out, model=nn_relu())
    assert kept.state.done == 3 and [r["round"] for r in kept.records] == [1, 2, 3]
    assert np.isfinite(kept.predict(X)).all()
    assert not (out / "result.json").exists()
    resumed = fit(nn_relu(), good(), fedhb.FedAvg(), out=out, resume=True, **options)
    whole = fit(nn_relu(), good(), fedhb.FedAvg(), **options)
    assert torch.equal(resumed.state.server["theta"], whole.state.server["theta"])


def nn_relu() -> nn.Module:
    with seeded():
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES))


def test_the_server_keeps_no_number_that_is_not_finite(tmp_path):
    """Answers may be finite and their sums, squares or ratios not."""

    class Grows(fedhb.FedAvg):
        name = "grows"

        def aggregate(self, problem: Any, server: Any, summary: Any, rng: Any) -> Any:
            return super().aggregate(problem, server, summary, rng) | (
                {"head": server["head"] / 0} if rng.round == 2 else {}
            )

    with pytest.raises(DivergedError, match=r"round 2.*'head'"):
        fit(None, None, Grows(), rounds=3, out=tmp_path / "run")
    assert fedhb.load(tmp_path / "run", model=mlp(torch.float32), algorithm=Grows()).state.done == 1


def test_a_result_is_valid_json_even_where_a_client_has_no_validation_examples(tmp_path):
    """A client with one example has none to spare; its numbers are null and do not enter the mean."""
    who = clients([8, 1, 8]).with_validation(0.25, seed=0)
    result = fit(
        None, who, evaluate_on="validation", fraction=1.0, out=Path(tmp_path / "run")
    ).result

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    written = json.loads((tmp_path / "run/result.json").read_text(), parse_constant=refuse)
    assert written == json.loads(json.dumps(result))
    for task in ("global", "personalised"):
        each = written["per_client"][f"{task}_accuracy"]
        assert each[1] is None and written[task]["accuracy"] == pytest.approx(
            (each[0] + each[2]) / 2
        )
