"""Checkpoints: arrays as safetensors, everything else as JSON, each file with its checksum.

    checkpoint/constants-HASH.safetensors        the initial network, once
    checkpoint/round-000100.safetensors          the server's arrays
    checkpoint/memory/000012-000100.safetensors  the memory of client 12 at round 100
    checkpoint/round-000100.json                 the manifest, written last: round, totals, the hash
                                                 of every file above, of the records of the rounds
                                                 so far, and of itself

A checkpoint exists once its manifest does. The last two are kept: where one is damaged, the one
before it is used. Nothing is ever pickled.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from fedhb.engine.client_memory import ClientStore
from fedhb.engine.cohort import Traffic
from fedhb.engine.loop import State
from fedhb.errors import InputError
from fedhb.files import sealed, sync_folder, unsealed, write_atomically

CHECKPOINTS_KEPT = 2
FORMAT = 1
NAMES = re.compile(r"(constants-\w+|round-\d+|memory/\d+-\d+)\.safetensors")
"""The names of a checkpoint's files: a manifest from elsewhere must not name others."""

MOST_BYTES = 2**36
"""The largest file of arrays that is read; reading needs twice as much memory as it has bytes."""


class Damaged(Exception):
    """A checkpoint cannot be used; the message says why."""


class Another(InputError):
    """A checkpoint belongs to another run than the one that should go on."""


def save(
    folder: Path, state: State, constants: dict[str, Tensor], trained: str, records: str = ""
) -> None:
    """Write a checkpoint, then remove those no longer needed.

    Args:
        folder: where checkpoints lie.
        state: what is kept.
        constants: the network as it was made.
        trained: the hash of what training depends on.
        records: the hash of the rounds' records.
    """
    name = f"round-{state.done:06d}"
    constants_name = f"constants-{trained[:12]}.safetensors"
    files = {constants_name: _write_once(folder / constants_name, constants)}
    files[f"{name}.safetensors"] = write_arrays(folder / f"{name}.safetensors", state.server)
    for client in sorted(state.store.changed):
        file = f"memory/{client:06d}-{state.done:06d}.safetensors"
        digest = write_arrays(folder / file, state.store.memories[client], settle=False)
        state.store.files[client] = (file, digest)
    if state.store.changed:
        sync_folder(folder / "memory")
    state.store.changed.clear()
    files |= dict(state.store.files.values())
    manifest = {
        "format": FORMAT,
        "round": state.done,
        "trained": trained,
        "client_rounds": state.client_rounds,
        "down_bytes": state.traffic.down,
        "up_bytes": state.traffic.up,
        "seconds": state.seconds,
        "lengths": list(state.lengths),
        "counted": {str(client): done for client, done in state.counted.items()},
        "constants": constants_name,
        "server": f"{name}.safetensors",
        "memory": {str(client): file for client, (file, _) in state.store.files.items()},
        "records": records,
        "sha256": files,
    }
    write_atomically(folder / f"{name}.json", sealed(manifest))
    _remove_old(folder)


def load(
    folder: Path,
    trained: str | None = None,
    records: Callable[[int], str | None] = lambda done: None,
) -> tuple[State, dict[str, Tensor]] | None:
    """Return the newest intact checkpoint and its constants, or None where there is none at all.

    Args:
        folder: where checkpoints lie.
        trained: the hash of what the run that goes on depends on; None for any run.
        records: returns the hash of the records until a round, as they are now; None where they
            are lost.

    Raises:
        Another: the checkpoint belongs to another configuration.
        InputError: every one is damaged.
    """
    manifests = _manifests(folder)
    if not manifests:
        return None
    for path in manifests:
        try:
            manifest = _read_manifest(path)
            if trained is not None and manifest["trained"] != trained:
                raise Another(f"{folder} is the checkpoint of another configuration")
            digest = records(manifest["round"])
            if manifest["records"] and digest is not None and digest != manifest["records"]:
                raise Damaged(
                    "rounds.jsonl is not as it was written; delete it to go on without its records"
                )
            return _read(folder, manifest)
        except Damaged as error:
            warnings.warn(
                f"checkpoint {path.name} is damaged ({error}); falling back to the one before",
                stacklevel=2,
            )
            reason = error
    raise InputError(
        f"no intact checkpoint in {folder} ({reason}): restore one, or start again with another "
        "--out"
    )


def _manifests(folder: Path) -> list[Path]:
    """Return the manifests, the newest first.

    They are ordered by number: as text, round 1,000,000 comes before round 999,999.
    """
    numbers = {path: path.stem.removeprefix("round-") for path in folder.glob("round-*.json")}
    decimal = [path for path in numbers if numbers[path].isdecimal()]
    return sorted(decimal, key=lambda path: int(numbers[path]), reverse=True)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = unsealed(path)
    except (OSError, ValueError) as error:
        raise Damaged(f"manifest unreadable: {error}") from None
    if manifest.get("format") != FORMAT:
        raise InputError(
            f"{path} has format {manifest.get('format')}, this version reads {FORMAT}: use the "
            "version that wrote it"
        )
    if not _makes_sense(manifest):  # its checksum is right, but anybody can compute one
        raise Damaged("the manifest makes no sense")
    return manifest


def _makes_sense(manifest: dict[str, Any]) -> bool:
    """Return whether a manifest holds everything that is read, in the right types and bounds."""
    try:
        files, memory, counted = (manifest[key] for key in ("sha256", "memory", "counted"))
        counts = [manifest[key] for key in ("round", "client_rounds", "down_bytes", "up_bytes")]
        texts = [manifest["trained"], manifest["records"], *files.values()]
        return (
            all(NAMES.fullmatch(name) for name in files)
            and all(isinstance(text, str) for text in texts)
            and all(name in files for name in (manifest["constants"], manifest["server"]))
            and all(re.fullmatch(r"-?\d{1,18}", i) and f in files for i, f in memory.items())
            and all(type(count) is int and 0 <= count < 2**63 for count in counts)
            and isinstance(manifest["seconds"], float | int)
            and isinstance(manifest["lengths"], list)
            and all(isinstance(v, float) and 0 <= v < float("inf") for v in manifest["lengths"])
            and all(re.fullmatch(r"\d{1,18}", i) for i in counted)
            and all(type(done) is int and 0 < done < 2**63 for done in counted.values())
        )
    except (KeyError, TypeError, AttributeError):
        return False


def _read(folder: Path, manifest: dict[str, Any]) -> tuple[State, dict[str, Tensor]]:
    hashes: dict[str, str] = manifest["sha256"]
    arrays = {name: _read_checked(folder / name, digest) for name, digest in hashes.items()}
    store, memory = ClientStore(), manifest["memory"].items()
    store.memories = {int(client): arrays[file] for client, file in memory}
    store.files = {int(client): (file, hashes[file]) for client, file in memory}
    state = State(
        server=arrays[manifest["server"]],
        done=manifest["round"],
        store=store,
        traffic=Traffic(manifest["down_bytes"], manifest["up_bytes"]),
        client_rounds=manifest["client_rounds"],
        seconds=manifest["seconds"],
        lengths=tuple(manifest["lengths"]),
        counted={int(client): done for client, done in manifest["counted"].items()},
    )
    return state, arrays[manifest["constants"]]


def _serialise(arrays: dict[str, Tensor]) -> bytes:
    return safetensors.torch.save(
        {key: value.detach().cpu().contiguous().clone() for key, value in arrays.items()}
    )


def write_arrays(path: Path, arrays: dict[str, Tensor], settle: bool = True) -> str:
    """Write arrays as one file and return its hash; `settle` is that of `write_atomically`."""
    content = _serialise(arrays)
    write_atomically(path, content, settle)
    return hashlib.sha256(content).hexdigest()


def _write_once(path: Path, arrays: dict[str, Tensor]) -> str:
    """Write arrays that never change, where they are missing; return the file's hash."""
    digest = hashlib.sha256(_serialise(arrays)).hexdigest()
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        write_arrays(path, arrays)
    return digest


def read_arrays(path: Path, digest: str | None = None) -> dict[str, Tensor]:
    """Return the arrays of a file outside of checkpoints; `digest` is its hash, if given."""
    try:
        return _read_checked(path, digest)
    except Damaged as error:
        raise InputError(f"{path} cannot be used ({error}): restore it, or make it again") from None


def _read_checked(path: Path, digest: str | None) -> dict[str, Tensor]:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise Damaged(f"{path.name} has {size} bytes, at most {MOST_BYTES} are read")
        content = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path.name}: {error.strerror}") from None
    if digest is not None and hashlib.sha256(content).hexdigest() != digest:
        raise Damaged(f"{path.name} does not match its checksum")
    try:
        return safetensors.torch.load(content)
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise Damaged(f"{path.name}: {error}") from None


def _remove_old(folder: Path) -> None:
    manifests = _manifests(folder)
    for path in manifests[CHECKPOINTS_KEPT:]:
        path.unlink(missing_ok=True)
    needed: set[str] = set()
    for path in manifests[:CHECKPOINTS_KEPT]:
        try:
            needed |= _read_manifest(path)["sha256"].keys()
        except Damaged:
            continue
    left = (*folder.glob("*.safetensors"), *folder.glob("memory/*.safetensors"))
    torn = (*folder.glob(".*.tmp"), *folder.glob("memory/.*.tmp"))  # of writes that were killed
    for path in (*left, *torn):
        if path.relative_to(folder).as_posix() not in needed:
            path.unlink(missing_ok=True)
