"""Folders of runs from elsewhere: a result or an InputError, and bounded memory."""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from builders import mlp
from fuzzing import LIMIT, ROOM, changed, many, only_input_errors, peak
from stopped_runs import fit

import fedhb
from fedhb.data import cifar, idx, table
from fedhb.errors import InputError
from fedhb.files import sealed
from fedhb.runs import checkpoint
from fedhb.runs.simulation import Model

fit_module = import_module("fedhb.runs.fit")


@pytest.fixture(autouse=True)
def bounded(monkeypatch) -> Iterator[None]:
    """Peak memory over the whole test, from the kernel's own count."""
    for module, name in (
        (idx, "MAX_BYTES"),
        (cifar, "MAX_BYTES"),
        (table, "MAX_BYTES"),
        (checkpoint, "MOST_BYTES"),
    ):
        monkeypatch.setattr(module, name, LIMIT)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak()
    yield
    grown = peak() - before
    assert grown < 8 * LIMIT + ROOM, f"{grown / 2**20:.0f} MiB"


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict[str, bytes]:
    """A run of a network by name, so that `load` makes it again by itself."""
    out = tmp_path_factory.mktemp("stored") / "run"
    again = {"name": "mlp", "num_outputs": 3, "options": {"hidden": 5}}
    with torch.random.fork_rng(devices=[]):
        model = fedhb.nets.build("mlp", (4,), 3, hidden=5)
    # `fedhb.fit` itself takes a module and does not know how it is made again
    with mock.patch.object(fit_module, "Model", partial(Model, again=again)):
        fit(out, model=model, rounds=2)
    return {
        p.relative_to(out).as_posix(): p.read_bytes()
        for p in sorted(out.rglob("*"))
        if p.is_file() and p.name != ".lock"
    }


VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7,
    2**31,
    2**63,
    10**9,
    2**70,
    0.0,
    -1.0,
    1e308,
    float("inf"),
    float("nan"),
]
VALUES += [
    "",
    "x",
    "../../etc/passwd",
    "os:system",
    "subprocess:Popen",
    "checkpoint",
    "mlp",
    "mobilenet",
    "empirical-bayes",
    "fedem",
    "local",
]
VALUES += [
    [],
    {},
    [[]],
    [1, 2],
    [-1],
    [3, 32, 32],
    {"a": 1},
    {"hidden": 2**40},
    {"mean": 1, "std": 0},
    {"0": "round-000002.safetensors"},
]


def replaced(record: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The record with one to three values, at any depth, replaced or removed."""
    record = json.loads(json.dumps(record))
    for _ in range(rng.randint(1, 3)):
        at: Any = record
        while at:
            key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if not (isinstance(at[key], dict | list) and at[key] and rng.random() < 0.8):
                if isinstance(at, dict) and rng.random() < 0.15:
                    del at[key]
                else:
                    at[key] = deepcopy(rng.choice(VALUES))
                break
            at = at[key]
    return record


def lay_out(out: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)


def opened(out: Path) -> Any:
    """The run, used: what is stored must fit together, or be refused."""
    run = fedhb.load(out)
    prediction = run.predict(np.zeros((2, *run.input_shape), dtype=np.float32))
    assert np.isfinite(prediction).all()
    return run


def manifests(files: dict[str, bytes]) -> list[str]:
    return [
        name for name in files if name.startswith("checkpoint/round-") and name.endswith(".json")
    ]


@pytest.mark.filterwarnings("ignore")
@many
def test_checkpoint(path, rng, stored):
    """Manifests, arrays and descriptions that are changed and then sealed again, as somebody who
    means harm would.
    """
    if not path.exists():
        lay_out(path, stored)
    files: dict[str, bytes] = {}
    what = rng.choice(
        (
            "manifest",
            "problem.json",
            "problem.json",
            "arrays",
            "sealed arrays",
            "sealed arrays",
            "bytes",
            "rounds.jsonl",
        )
    )
    if what in ("manifest", "problem.json"):
        name = what if what == "problem.json" else max(manifests(stored))
        record = json.loads(stored[name])
        record.pop("checksum")
        files[name] = sealed(replaced(record, rng))
    elif what in ("arrays", "sealed arrays"):
        name = rng.choice([name for name in stored if name.endswith(".safetensors")])
        files[name] = changed(stored[name], rng)
        for manifest in manifests(stored) if what == "sealed arrays" else ():
            record = json.loads(stored[manifest])
            record.pop("checksum")
            inside = name.removeprefix("checkpoint/")
            if inside in record["sha256"]:
                record["sha256"][inside] = hashlib.sha256(files[name]).hexdigest()
            files[manifest] = sealed(record)
    else:
        name = what if what == "rounds.jsonl" else rng.choice(sorted(stored))
        files[name] = changed(stored[name], rng)
    lay_out(path, files)
    try:
        only_input_errors(lambda: opened(path))
    finally:
        lay_out(path, {name: stored[name] for name in files})


@pytest.mark.parametrize("name", [b"theta", b"head", b"buffers"])
def test_constants_that_lack_a_vector(stored, name, tmp_path):
    """Found by the full number of cases: a name of the same length in the file's head, sealed
    again.
    """
    lay_out(tmp_path, stored)
    (constants,) = (tmp_path / "checkpoint").glob("constants-*")
    content = constants.read_bytes().replace(b'"' + name + b'"', b'"' + name[:-1] + b'z"')
    constants.write_bytes(content)
    record = json.loads(stored[max(manifests(stored))])
    record.pop("checksum")
    record["sha256"][constants.name] = hashlib.sha256(content).hexdigest()
    (tmp_path / max(manifests(stored))).write_bytes(sealed(record))
    with pytest.raises(InputError, match=name.decode()):
        fedhb.load(tmp_path)


def test_a_folder_from_elsewhere_runs_no_code(stored, tmp_path):
    """A description can name any function of any module, with arguments: none is imported, none
    called.
    """
    record = json.loads(stored["problem.json"])
    record.pop("checksum")
    made = tmp_path / "made"
    for name, options in (("subprocess:Popen", {}), ("os:mkdir", {}), ("this:d", {})):
        record["model"] = {"name": name, "num_outputs": 3, "options": options}
        record["input_shape"] = [4]
        lay_out(tmp_path / "run", stored | {"problem.json": sealed(record)})
        with pytest.raises(InputError, match=r"load\(path|own"):
            fedhb.load(tmp_path / "run")
    record["model"], record["input_shape"] = (
        {"name": "os:mkdir", "num_outputs": 511, "options": {}},
        str(made),
    )
    lay_out(tmp_path / "run", stored | {"problem.json": sealed(record)})
    with pytest.raises(InputError):
        fedhb.load(tmp_path / "run", model="os:mkdir")
    assert not made.exists()


def test_what_a_description_declares_is_bounded(stored, tmp_path):
    record = json.loads(stored["problem.json"])
    record.pop("checksum")
    record["model"]["options"]["hidden"] = 10**10  # 160 GB of weights
    lay_out(tmp_path, stored | {"problem.json": sealed(record)})
    with pytest.raises(InputError, match=r"\d.* weights.* \d"):
        fedhb.load(tmp_path)


@pytest.mark.parametrize(
    "content", [b"[" * 10**5, b'{"a":' * 10**5, b"1" * 10**4, b"\xff", b"", b"null"]
)
def test_json_that_is_no_record(content, stored, tmp_path):
    """Nested a hundred thousand deep, numbers of ten thousand digits: no traceback."""
    for name in (
        "problem.json",
        "result.json",
        "rounds.jsonl",
        max(manifests(stored)),
        "checkpoint/result.json",
    ):
        out = tmp_path / name.replace("/", "-")
        lay_out(out, stored | {name: content})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            only_input_errors(lambda out=out: opened(out))


def test_a_json_file_has_a_bound(stored, tmp_path, monkeypatch):
    monkeypatch.setattr("fedhb.files.MOST_JSON", 100)
    lay_out(tmp_path, stored)
    with pytest.raises(InputError, match="100 bytes"):
        fedhb.load(tmp_path, model=mlp(torch.float32))
