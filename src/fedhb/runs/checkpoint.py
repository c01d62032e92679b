"""Checkpoints: arrays as safetensors, everything else as JSON, each file with its checksum. Never pickle.

    checkpoint/constants-FINGERPRINT.safetensors   the initial network, once
    checkpoint/round-000100.safetensors            the server's arrays
    checkpoint/memory/000012-000100.safetensors    what client 12 remembered at round 100 (only where clients remember)
    checkpoint/round-000100.json                   the manifest, written last: round, totals, the hash of every file above,
                                                   of the records of the rounds so far, and of itself

A checkpoint exists once its manifest does. The last two are kept, so that a damaged one falls back to the one before.
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

from fedhb.engine.cohort import Traffic
from fedhb.engine.loop import State
from fedhb.engine.client_memory import ClientStore
from fedhb.errors import InputError
from fedhb.files import sealed, sync_folder, unsealed, write_atomically

KEPT = 2
FORMAT = 1
NAMES = re.compile(r"(constants-\w+|round-\d+|memory/\d+-\d+)\.safetensors")
"""The files of a checkpoint: a manifest from elsewhere must not name others."""

MOST_BYTES = 2**36
"""The largest file of arrays that is believed; one that is read needs as much memory as it has bytes, twice."""


class Damaged(Exception):
    """A checkpoint that cannot be used, and why."""


class Another(InputError):
    """A checkpoint of another run than the one that is to go on."""


def save(folder: Path, state: State, constants: dict[str, Tensor], fingerprint: str, records: str = "") -> None:
    """Write a checkpoint of `state`, then remove those no longer needed; `records` is the hash of the rounds' records."""
    name = f"round-{state.done:06d}"
    constants_name = f"constants-{fingerprint[:12]}.safetensors"
    files = {constants_name: _write_once(folder / constants_name, constants)}
    files[f"{name}.safetensors"] = write_arrays(folder / f"{name}.safetensors", state.server)
    for client in sorted(state.store.changed):
        file = f"memory/{client:06d}-{state.done:06d}.safetensors"
        state.store.files[client] = (file, write_arrays(folder / file, state.store.memories[client], settle=False))
    if state.store.changed:
        sync_folder(folder / "memory")
    state.store.changed.clear()
    files |= dict(state.store.files.values())
    manifest = {
        "format": FORMAT,
        "round": state.done,
        "fingerprint": fingerprint,
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
    folder: Path, fingerprint: str | None = None, records: Callable[[int], str | None] = lambda done: None
) -> tuple[State, dict[str, Tensor]] | None:
    """The newest intact checkpoint and its constants, or None where there is none at all.

    Args:
        folder: where checkpoints lie.
        fingerprint: of the run that is to go on; None for any.
        records: the hash of the records until a round, as they are now; None where they are not asked for, or lost.

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
            if fingerprint is not None and manifest["fingerprint"] != fingerprint:
                raise Another(f"{folder} is the checkpoint of another configuration")
            found = records(manifest["round"])
            if manifest.get("records") and found is not None and found != manifest["records"]:
                raise Damaged("rounds.jsonl is not as it was written; delete it to go on without the records it held")
            return _read(folder, manifest)
        except Damaged as error:
            warnings.warn(f"checkpoint {path.name} is damaged ({error}); falling back to the one before", stacklevel=2)
            reason = error
    raise InputError(f"no intact checkpoint in {folder} ({reason}): restore one, or start again with another --out")


def _manifests(folder: Path) -> list[Path]:
    """The newest first, by number: as text, round 1,000,000 comes before round 999,999."""
    numbers = {path: path.stem.removeprefix("round-") for path in folder.glob("round-*.json")}
    return sorted((path for path in numbers if numbers[path].isdecimal()), key=lambda path: int(numbers[path]), reverse=True)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = unsealed(path)
    except (OSError, ValueError) as error:
        raise Damaged(f"manifest unreadable: {error}") from None
    if manifest.get("format") != FORMAT:
        raise InputError(
            f"{path} has format {manifest.get('format')}, this version reads {FORMAT}: use the version that wrote it"
        )
    if not _makes_sense(manifest):  # its checksum is right, but anybody can compute one
        raise Damaged("the manifest makes no sense")
    return manifest


def _makes_sense(manifest: dict[str, Any]) -> bool:
    files, memory = manifest.get("sha256"), manifest.get("memory")
    counts = (manifest.get(key) for key in ("round", "client_rounds", "down_bytes", "up_bytes"))
    return (
        isinstance(files, dict)
        and isinstance(memory, dict)
        and all(NAMES.fullmatch(name) and isinstance(digest, str) for name, digest in files.items())
        and all(isinstance(name, str) and name in files for name in (manifest.get("constants"), manifest.get("server")))
        and all(re.fullmatch(r"-?\d{1,18}", i) and isinstance(f, str) and f in files for i, f in memory.items())
        and all(type(count) is int and 0 <= count < 2**63 for count in counts)
        and isinstance(manifest.get("seconds"), float | int)
        and isinstance(manifest.get("fingerprint"), str)
        and isinstance(lengths := manifest.get("lengths", []), list)
        and all(isinstance(length, float) and 0 <= length < float("inf") for length in lengths)
        and isinstance(counted := manifest.get("counted", {}), dict)
        and all(re.fullmatch(r"\d{1,18}", i) and type(done) is int and 0 < done < 2**63 for i, done in counted.items())
        and isinstance(manifest.get("records", ""), str)
    )


def _read(folder: Path, manifest: dict[str, Any]) -> tuple[State, dict[str, Tensor]]:
    arrays = {name: _read_checked(folder / name, digest) for name, digest in manifest["sha256"].items()}
    store = ClientStore()
    store.memories = {int(client): arrays[file] for client, file in manifest["memory"].items()}
    store.files = {int(client): (file, manifest["sha256"][file]) for client, file in manifest["memory"].items()}
    state = State(
        server=arrays[manifest["server"]],
        done=manifest["round"],
        store=store,
        traffic=Traffic(manifest["down_bytes"], manifest["up_bytes"]),
        client_rounds=manifest["client_rounds"],
        seconds=manifest["seconds"],
        lengths=tuple(manifest.get("lengths", ())),
        counted={int(client): done for client, done in manifest.get("counted", {}).items()},
    )
    return state, arrays[manifest["constants"]]


def _serialise(arrays: dict[str, Tensor]) -> bytes:
    return safetensors.torch.save({key: value.detach().cpu().contiguous().clone() for key, value in arrays.items()})


def write_arrays(path: Path, arrays: dict[str, Tensor], settle: bool = True) -> str:
    """Arrays as one file, written whole; its hash. `settle` as for `write_atomically`."""
    content = _serialise(arrays)
    write_atomically(path, content, settle)
    return hashlib.sha256(content).hexdigest()


def _write_once(path: Path, arrays: dict[str, Tensor]) -> str:
    """The same for arrays that never change: written only where they are missing."""
    digest = hashlib.sha256(_serialise(arrays)).hexdigest()
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        write_arrays(path, arrays)
    return digest


def read_arrays(path: Path, digest: str | None = None) -> dict[str, Tensor]:
    """The arrays of a file outside of checkpoints; `digest` is its hash, where that is known."""
    try:
        return _read_checked(path, digest)
    except Damaged as error:
        raise InputError(f"{path} cannot be used ({error}): restore it, or make it again") from None


def _read_checked(path: Path, digest: str | None) -> dict[str, Tensor]:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise Damaged(f"{path.name} has {size} bytes, at most {MOST_BYTES} are believed")
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
    for path in manifests[KEPT:]:
        path.unlink(missing_ok=True)
    needed: set[str] = set()
    for path in manifests[:KEPT]:
        try:
            needed |= _read_manifest(path)["sha256"].keys()
        except Damaged:
            continue
    left = (*folder.glob("*.safetensors"), *folder.glob("memory/*.safetensors"))
    torn = (*folder.glob(".*.tmp"), *folder.glob("memory/.*.tmp"))  # of writes that were killed
    for path in (*left, *torn):
        if path.relative_to(folder).as_posix() not in needed:
            path.unlink(missing_ok=True)
