"""Files from elsewhere: whatever is in them, a reader gives a result or an InputError, and needs no more memory than it says.

Cases are drawn from seeds by hypothesis: sound files that are changed at random places, their fields replaced by values that
matter, packed and sealed again where a reader looks at hashes first, and bytes without any sense. A case that fails is said with
its seed. `FEDHB_FAULTS=1` draws 100,000 of each kind.
"""

from __future__ import annotations

import gzip
import hashlib
import inspect
import io
import json
import random
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import mlp
from fault_share import cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stopped_runs import fit

import fedhb
from fedhb.data import cifar, idx, table
from fedhb.errors import InputError
from fedhb.files import sealed
from fedhb.runs import checkpoint
from fedhb.runs.settings import Settings

FULL, LEAST = 100_000, 500
LIMIT = 2**22
"""Bytes that a file may declare here (the readers' own bounds are larger, and lowered for these tests)."""

ROOM = 2**25
"""Bytes that a process may take beside what it has: a reader needs a few times the size of the file, or of what that declares."""

BATCH = 50
"""Cases of one seed: hypothesis takes longer to draw an example than a reader to read it."""


def many(case: Callable[..., None]) -> Callable[..., None]:
    """Run `case(path, rng, ...)` for every seed of so many; `path` is a file or folder of its own."""
    signature = inspect.signature(case)
    own = [name for name in signature.parameters if name not in ("path", "rng")]

    def test(tmp_path_factory: Any, seed: int, **fixtures: Any) -> None:
        path = tmp_path_factory.getbasetemp() / f"fuzzed-{case.__name__}"
        for k in range(BATCH):
            try:
                case(path, random.Random(f"{seed} {k}"), **fixtures)
            except Exception as error:
                error.add_note(f"case {k} of seed {seed}")
                raise

    parameters = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY)
        for n in ("tmp_path_factory", "seed", *own)
    ]
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    test.__name__ = test.__qualname__ = case.__name__
    test.__doc__ = case.__doc__
    count = -(-cases(FULL, LEAST) // BATCH)
    how = settings(
        max_examples=count,
        database=None,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return how(given(seed=st.integers(0, 2**63))(test))


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


def peak() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(
        next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]
    )


def only_input_errors(read: Callable[[], Any]) -> Any:
    """The result, or None where the reader refused."""
    try:
        return read()
    except InputError as error:
        assert str(error) and "\n\n" not in str(error)
        return None


# ---- how files are changed

NUMBERS = [0, 1, 2, 7, 8, 255, 256, 0x7FFF, 0xFFFF, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1]
PIECES = [struct.pack(order, number) for number in NUMBERS for order in (">I", "<I")]
PIECES += [
    b"\x00" * 64,
    b"\xff" * 64,
    b"(" * 200,
    b"[" * 200,
    b"-1",
    b"1e999",
    b"nan",
    b"\\x00",
    b"'",
    b'"',
    b"\n",
    b"{",
    b"}",
    b",",
]


def changed(sound: bytes, rng: random.Random) -> bytes:
    """The sound file with up to four places overwritten, filled, removed, cut or doubled; or nonsense."""
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(300))
    content = bytearray(sound)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 4))):
        # the front, where headers are, as often as everything else
        place = rng.randrange(1 + (min(200, len(content)) if rng.random() < 0.5 else len(content)))
        piece = rng.choice(PIECES) if rng.random() < 0.5 else rng.randbytes(rng.randrange(9))
        how = rng.randrange(5)
        if how == 0:
            content[place : place + len(piece)] = piece
        elif how == 1:
            content[place:place] = piece
        elif how == 2:
            del content[place : place + len(piece)]
        elif how == 3:
            del content[place:]
        else:
            content[place:place] = content[place : place + 500]
    return bytes(content)


def idx_file(shape: tuple[int, ...]) -> bytes:
    head = bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape)
    return (
        head + bytes(range(256)) * (int(np.prod(shape)) // 256) + bytes(int(np.prod(shape)) % 256)
    )


# ---- the readers


IDX = {1: idx_file((40,)), 3: idx_file((3, 28, 28))}


@many
def test_idx(path, rng):
    axes = rng.choice((1, 3))
    content = changed(IDX[rng.choice((1, 3, axes, axes))], rng)
    if rng.random() < 0.4:
        content = gzip.compress(content, 1)
        content = changed(content, rng) if rng.random() < 0.5 else content
    path.write_bytes(content)
    found = only_input_errors(lambda: idx.read(path, axes))
    if found is not None:
        assert found[0].ndim == axes and found[0].dtype == np.uint8 and 0 < found[0].nbytes <= LIMIT


def zeros(file: Any, count: int) -> None:
    for _ in range(count // 2**20):
        file.write(bytes(2**20))


def test_a_bomb_of_zeros_is_bounded(tmp_path):
    """A gzip or zip file of some kilobytes can unpack to gigabytes: what is declared bounds what is read."""
    path = tmp_path / "bomb"
    with gzip.open(path, "wb") as file:
        file.write(bytes((0, 0, 8, 3)) + struct.pack(">3I", 100, 28, 28))
        zeros(file, 2**28)
    with pytest.raises(InputError, match="bytes follow the 78400 declared"):
        idx.read(path, 3)
    path.write_bytes(gzip.compress(bytes((0, 0, 8, 3)) + struct.pack(">3I", 2**20, 28, 28)))
    with pytest.raises(InputError, match="it declares 1048576 x 28 x 28"):
        idx.read(path, 3)
    for declared, held in ((2**28, 2**28), (2**40, 2**20), (2**20, 2**28)):
        member = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            member, {"descr": "|u1", "fortran_order": False, "shape": (declared // 4, 4)}
        )
        with zipfile.ZipFile(path.with_suffix(".npz"), "w", zipfile.ZIP_DEFLATED) as archive:
            for name in ("x.npy", "y.npy"):
                with archive.open(name, "w") as file:
                    file.write(member.getvalue())
                    zeros(file, held)
        with pytest.raises(InputError, match=r"bytes"):
            table.read_npz(path.with_suffix(".npz"))


@many
def test_cifar(path, rng):
    content = changed(bytes(2 * cifar.RECORD), rng)
    path.write_bytes(
        content[: len(content) // cifar.RECORD * cifar.RECORD] if rng.random() < 0.7 else content
    )
    found = only_input_errors(lambda: cifar.read(path, rng.random() < 0.5))
    if found is not None:
        examples, _ = found
        assert (
            examples.x.shape == (len(examples.y), 3, 32, 32)
            and 0 <= examples.y.min() <= examples.y.max() < 100
        )


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


KINDS = [
    "<f4",
    "<f8",
    "|u1",
    "|O",
    "<U3",
    "<U100000000",
    "|S5",
    "<c8",
    "<M8[s]",
    "|V8",
    "<f2",
    ">i8",
    "|b1",
    [("a", "<f4")],
]


def npy_file(sound: np.ndarray, rng: random.Random) -> bytes:
    """An array as it is, changed at random, or with a header of its own."""
    how = rng.randrange(5)
    if how < 2:
        return npy(sound)
    if how == 2:
        return changed(npy(sound), rng)
    shape = tuple(
        rng.choice((0, 1, 2, 3, 20, -1, 2**31, 2**62, 2**64)) for _ in range(rng.randrange(5))
    )
    header = repr(
        {"descr": rng.choice(KINDS), "fortran_order": rng.random() < 0.5, "shape": shape}
    ).encode()
    header = changed(header, rng) if how == 4 else header
    version = rng.choice((1, 2, 3))
    length = struct.pack("<H" if version == 1 else "<I", len(header) % 2**16)
    return b"\x93NUMPY" + bytes((version, 0)) + length + header + bytes(rng.choice((0, 8, 80, 160)))


ROWS = 20
SOUND = {
    "x": np.arange(4.0 * ROWS, dtype=np.float32).reshape(ROWS, 4),
    "y": np.arange(ROWS) % 3,
    "client": np.array([f"c{k % 4}" for k in range(ROWS)]),
    "split": (np.arange(ROWS) % 5 == 0).astype(np.int8),
}


@many
def test_npz(path, rng):
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns of a name given twice
        with zipfile.ZipFile(
            file, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
        ) as archive:
            for name in [
                "x",
                "y",
                *rng.sample(["client", "split", "x", "z", "../y"], rng.choice((0, 0, 1, 1, 2))),
            ]:
                suffix = rng.choice((".npy", ".npy", ".npy", ""))
                archive.writestr(f"{name}{suffix}", npy_file(SOUND.get(name, SOUND["x"]), rng))
    path.write_bytes(changed(file.getvalue(), rng) if rng.random() < 0.5 else file.getvalue())
    found = only_input_errors(lambda: table.read_npz(path))
    if found is not None:
        assert (
            len(found.train)
            and found.train.x.dtype in (np.float32, np.uint8)
            and np.isfinite(found.train.x).all()
        )


@many
def test_npy(path, rng):
    path.write_bytes(npy_file(SOUND["x"], rng))
    found = only_input_errors(lambda: table.read_npy(path))
    assert found is None or found.nbytes <= LIMIT


# ---- run folders


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict[str, bytes]:
    """A run of a network by name, so that `load` makes it again by itself."""
    out = tmp_path_factory.mktemp("stored") / "run"
    rebuild = {"name": "mlp", "num_outputs": 3, "options": {"hidden": 5}}
    with torch.random.fork_rng(devices=[]):
        model = fedhb.nets.build("mlp", (4,), 3, hidden=5)
    fit(out, model=model, rebuild=rebuild, rounds=2)
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
    "niw",
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
    """Manifests, arrays and descriptions that are changed and then sealed again, as somebody who means harm would."""
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
    """Found by the full number of cases: a name of the same length in the file's head, sealed again."""
    lay_out(tmp_path, stored)
    (constants,) = (tmp_path / "checkpoint").glob("constants-*")
    content = constants.read_bytes().replace(b'"' + name + b'"', b'"' + name[:-1] + b'z"')
    constants.write_bytes(content)
    record = json.loads(stored[max(manifests(stored))])
    record.pop("checksum")
    record["sha256"][constants.name] = hashlib.sha256(content).hexdigest()
    (tmp_path / max(manifests(stored))).write_bytes(sealed(record))
    with pytest.raises(InputError, match=f"the run has no {name.decode()}"):
        fedhb.load(tmp_path)


def test_a_folder_from_elsewhere_runs_no_code(stored, tmp_path):
    """A description can name any function of any module, with arguments: none is imported, none called."""
    record = json.loads(stored["problem.json"])
    record.pop("checksum")
    made = tmp_path / "made"
    for name, options in (("subprocess:Popen", {}), ("os:mkdir", {}), ("this:d", {})):
        record["model"] = {"name": name, "num_outputs": 3, "options": options}
        record["input_shape"] = [4]
        lay_out(tmp_path / "run", stored | {"problem.json": sealed(record)})
        with pytest.raises(InputError, match="code of your own"):
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
    with pytest.raises(InputError, match=r"declares .* weights, but .* are stored"):
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
    with pytest.raises(InputError, match="more than 100 bytes"):
        fedhb.load(tmp_path, model=mlp(torch.float32))


# ---- settings

TOML = b"""
# a comment
dataset = "digits"
algorithm = "niw"
rounds = 3
lr = 1e-2
fraction = 0.5
seed = 0x1F
schedule = 'step'
workers = 1_0
model = "mlp"
[niw]
kl_weight = 1e-4
begin = \"\"\"global\"\"\"
p_do = inf
[mixture]
sigma2 = [1.0, 2.0]
when = 1979-05-27T07:32:00Z
[fedavg]
deep = {a = {b = [1, {c = true}]}}
"""
PLAIN = b"""
dataset = "digits"
rounds = 3
lr = 1e-2
fraction = 0.5
schedule = 'step'
[niw]
begin = \"\"\"last\"\"\"
num_samples = 3
[fedprox]
mu = 0.5
"""
WORDS = [
    b"= 1",
    b"[niw]",
    b"[[niw]]",
    b"[" * 300,
    b"=" + b"[" * 5000,
    b"= " + b"9" * 5000,
    b"\r\n",
    b"= nan",
    b"= -1",
    b"= 1e400",
]
WORDS += [
    b"\xef\xbb\xbf",
    b"\x00",
    b'"""',
    b"= {}",
    b"= [1, 2]",
    b"model = 3",
    b"[model]\nname = 1",
    b"= 07:32:00",
    b"a.b.c = 1",
]


@many
def test_toml(path, rng):
    content = changed(rng.choice((TOML, PLAIN)), rng)
    for _ in range(rng.choice((0, 0, 1, 2))):
        place = rng.randrange(400)
        content = content[:place] + rng.choice(WORDS) + content[place:]
    path.write_bytes(content)
    found = only_input_errors(lambda: Settings.resolve(path, {}))
    if found is not None:
        path.write_text(found.to_toml({}), encoding="utf-8")
        assert repr(Settings.resolve(path, {})) == repr(
            found
        )  # what is written is read back, and NaN is NaN


def test_a_settings_file_has_a_bound(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_bytes(b"#" * 2**21)
    with pytest.raises(InputError, match="more than 1048576 bytes"):
        Settings.resolve(path, {})


@many
def test_overrides(path, rng):
    text = "niw.p_do=" + "".join(
        rng.choice('[]{}="\n.#9-eainf_:T') for _ in range(rng.choice((3, 10, 5000)))
    )
    only_input_errors(lambda: Settings.resolve(None, {}, [text[rng.choice((0, 0, 0, 3, 5)) :]]))
