"""Checkpoints under damage: whatever happens to a file or to the process, the run ends with the
numbers of an undisturbed one.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Wrapped, clients, mlp, same_bits
from stopped_runs import assert_same, fit, stopped

import fedhb
from fedhb.errors import InputError
from fedhb.likelihood import GaussianRegression
from fedhb.runs import checkpoint

ROUNDS = 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Any:
    return fit(tmp_path_factory.mktemp("whole") / "run")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, position: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def newest(out: Path, kind: str) -> Path:
    """The file of this kind that the newest checkpoint has for itself."""
    manifest = json.loads((out / "checkpoint/round-000005.json").read_text())
    names = {
        "manifest": "round-000005.json",
        "server": manifest["server"],
        "memory": next(
            file for file in manifest["memory"].values() if file.endswith("-000005.safetensors")
        ),
    }
    return out / "checkpoint" / names[kind]


DAMAGES = {
    "truncated": truncate,
    "emptied": lambda path: path.write_bytes(b""),
    "a flipped bit": flip,
    "a flipped bit at the front": lambda path: flip(path, 9),
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["server", "memory", "manifest"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(kind, damage, whole, tmp_path):
    out = stopped(tmp_path / "run")
    DAMAGES[damage](newest(out, kind))
    if kind == "manifest" and damage == "deleted":  # then it was never finished: no reason to warn
        run = fit(out)
    else:
        with pytest.warns(UserWarning, match=r"round-000005\.json"):
            run = fit(out)
    assert_same(run, whole, out)


MANIFESTS = {
    "not JSON": lambda m: "{'round': 5}",
    "a list": lambda m: "[1, 2]",
    "a number": lambda m: "5",
    "null": lambda m: "null",
    "a missing key": lambda m: json.dumps({k: v for k, v in m.items() if k != "server"}),
    "round as text": lambda m: json.dumps(m | {"round": "five"}),
    "another round": lambda m: json.dumps(m | {"round": 6}),
    "files as a list": lambda m: json.dumps(m | {"sha256": list(m["sha256"])}),
    "memory as a number": lambda m: json.dumps(m | {"memory": 3}),
    "memory of no client": lambda m: json.dumps(m | {"memory": {"nobody": m["server"]}}),
    "a server that is not listed": lambda m: json.dumps(m | {"server": "elsewhere"}),
    "bytes as null": lambda m: json.dumps(m | {"down_bytes": None}),
    "not text": lambda m: b"\xff\xfe\x00",
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_manifest_that_makes_no_sense_falls_back(what, whole, tmp_path):
    out = stopped(tmp_path / "run")
    path = newest(out, "manifest")
    content = MANIFESTS[what](json.loads(path.read_text()))
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match=r"round-\d+\.json"):
        run = fit(out)
    assert_same(run, whole, out)


@pytest.mark.filterwarnings("ignore:.*round-000005.json")
def test_no_single_flipped_bit_goes_unnoticed(tmp_path):
    """Wherever in the manifest (every third byte is tried): the state is that of round 5, or the
    checkpoint counts as damaged.
    """
    out = stopped(tmp_path / "run")
    path = newest(out, "manifest")
    content = path.read_bytes()
    right, _ = checkpoint.load(out / "checkpoint")
    before = 0
    for position in range(0, len(content), 3):
        flip(path, position)
        state, _ = checkpoint.load(out / "checkpoint")
        path.write_bytes(content)
        before += state.done == 4
        if state.done != 4:
            assert (state.done, state.traffic, state.client_rounds) == (
                5,
                right.traffic,
                right.client_rounds,
            )
            assert state.seconds == right.seconds and same_bits(state.server, right.server)
            assert state.store.files == right.store.files
    assert 3 * before > 0.9 * len(re.sub(rb"\s", b"", content))  # white space may change


def test_when_every_checkpoint_is_damaged_the_user_is_told(tmp_path):
    out = stopped(tmp_path / "run")
    for path in (out / "checkpoint").glob("round-*.safetensors"):
        flip(path)
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(InputError, match=r"checkpoint.*(resume|restore|out)"),
    ):
        fit(out)
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(InputError, match=r"checkpoint.*(resume|restore|out)"),
    ):
        fedhb.load(out, model=mlp(torch.float32))


def test_the_constants_belong_to_every_checkpoint(tmp_path):
    out = stopped(tmp_path / "run")
    (constants,) = (out / "checkpoint").glob("constants-*")
    flip(constants)
    with (
        pytest.warns(UserWarning, match="constants-"),
        pytest.raises(InputError, match=r"checkpoint.*(resume|restore|out)"),
    ):
        fit(out)


def test_a_finished_run_whose_last_checkpoint_is_damaged_is_finished_again(whole, tmp_path):
    out = tmp_path / "run"
    fit(out)
    flip(out / f"checkpoint/round-{ROUNDS:06d}.safetensors")
    with pytest.warns(UserWarning, match=r"round-\d+\.json"):
        run = fit(out)
    assert run.state.done == ROUNDS
    assert_same(run, whole, out)


def test_leftovers_of_a_torn_write_are_ignored(whole, tmp_path):
    out = stopped(tmp_path / "run")
    for name in (
        "checkpoint/.round-000006.json.tmp",
        "checkpoint/memory/.000001-000006.safetensors.tmp",
        ".rounds.jsonl.tmp",
    ):
        (out / name).write_bytes(b"half a fi")
    (out / "checkpoint/round-000006.safetensors").write_bytes(
        b"arrays whose manifest was never written"
    )
    assert_same(fit(out), whole, out)


@pytest.mark.parametrize(
    "torn", ['{"round": 6, "lo', "{", '{"round": 6}\n{"round": 7, "loss": 1.', "\0\0\0", "\xff"]
)
def test_a_line_cut_short_is_forgotten(torn, whole, tmp_path):
    out = stopped(tmp_path / "run")
    with (out / "rounds.jsonl").open("ab") as file:
        file.write(torn.encode("latin-1"))
    assert [r["round"] for r in fedhb.load(out, model=mlp(torch.float32)).records][:5] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert_same(fit(out), whole, out)


OTHERS = {
    "learning rate": ({"lr": 0.07}, r"lr=0\.07.*0\.05"),
    "rounds": ({"rounds": 7}, "rounds=7.*6"),
    "fraction": ({"fraction": 0.4}, r"fraction=0\.4.*0\.5"),
    "seed": ({"seed": 4}, "seed=4.*3"),
    "algorithm": ({"algorithm": fedhb.FedAvg()}, r"algorithm=fedavg.*empirical-bayes"),
    "setting": (
        {"algorithm": fedhb.EmpiricalBayes(begin="last", kl_weight=0.5)},
        r"empirical-bayes\.kl_weight=0\.5.*1\.0",
    ),
    "weights": ({"model": mlp(torch.float32, seed=1)}, None),
    "network": ({"model": Wrapped(mlp(torch.float32))}, None),
    "clients": (
        {"clients": clients().select([0, 1, 2, 3, 5])},
        "clients=5.*6.*training examples=",
    ),
    "scaling": ({"clients": clients(standardise=True)}, None),
    "augmentation": ({"clients": replace(clients(), augment="crop-flip")}, None),
    "head": ({"head": ""}, None),
    "server inputs": ({"clients": replace(clients(), server_inputs=torch.ones(5, 4))}, None),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_configuration_is_refused_and_what_differs_is_named(what, tmp_path):
    out = stopped(tmp_path / "run", at=2)
    files = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    changed, differs = OTHERS[what]
    differs = differs or "settings, network or data differ"
    with pytest.raises(
        InputError,
        match=rf"{differs}.*(resume|restore|out)",
    ):
        fit(out, **changed)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == files


def test_another_likelihood_or_frozen_layer_is_refused(tmp_path):
    pairs = [(x, x[:, 0]) for x, _ in (clients().train.examples(k) for k in range(6))]
    real = fedhb.Clients.from_arrays([(x.numpy(), y.numpy()) for x, y in pairs])
    model = mlp(torch.float32, outputs=1)
    model.hidden.bias.requires_grad_(False)
    options = {"clients": real, "model": model, "likelihood": GaussianRegression(noise=1.0)}
    out = stopped(tmp_path / "run", at=2, **options)
    with pytest.raises(InputError, match="resume"):
        fit(out, **(options | {"likelihood": GaussianRegression(noise=2.0)}))
    model.hidden.bias.data += 1.0
    with pytest.raises(InputError, match="resume"):
        fit(out, **options)


@pytest.mark.parametrize("lost", ["settings.toml", "problem.json"])
def test_another_configuration_is_refused_where_nothing_tells_what_it_was(lost, tmp_path):
    out = stopped(tmp_path / "run", at=2)
    (out / lost).write_bytes(b"\x00")
    with pytest.raises(InputError, match=r"settings.*(resume|restore|out)"):
        fit(out, lr=0.07)


def test_what_does_not_change_the_training_may_change(whole, tmp_path):
    out = stopped(tmp_path / "run")
    run = fit(out, checkpoint_every=1, personal_epochs=2, personal_lr=0.5)
    assert_same(run, whole, out)


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    out = stopped(tmp_path / "run")
    monkeypatch.undo()
    with pytest.raises(InputError, match="format 99"):
        fit(out)
