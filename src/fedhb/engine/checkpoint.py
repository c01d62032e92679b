"""Checkpoints: arrays as safetensors, everything else as JSON, each file with its checksum. Never pickle.

    checkpoint/constants-FINGERPRINT.safetensors   the initial network, once
    checkpoint/round-000100.safetensors            the server's arrays
    checkpoint/memory/000012-000100.safetensors    what client 12 remembered at round 100 (only where clients remember)
    checkpoint/round-000100.json                   the manifest, written last: round, totals, the hash of every file above
                                                   and of itself

A checkpoint exists once its manifest does. The last two are kept, so that a damaged one falls back to the one before.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from fedhb.engine.executor import Traffic
from fedhb.engine.folder import as_json, write_atomically
from fedhb.engine.loop import State
from fedhb.engine.store import ClientStore
from fedhb.errors import InputError

KEPT = 2
FORMAT = 1


class Damaged(Exception):
    """A checkpoint that cannot be used, and why."""


def save(folder: Path, state: State, constants: dict[str, Tensor], fingerprint: str) -> None:
    """Write a checkpoint of `state`, then remove those no longer needed."""
    name = f"round-{state.done:06d}"
    constants_name = f"constants-{fingerprint[:12]}.safetensors"
    files = {constants_name: _write_once(folder / constants_name, constants)}
    files[f"{name}.safetensors"] = write_arrays(folder / f"{name}.safetensors", state.server)
    for client in sorted(state.store.changed):
        file = f"memory/{client:06d}-{state.done:06d}.safetensors"
        state.store.files[client] = (file, write_arrays(folder / file, state.store.memories[client]))
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
        "constants": constants_name,
        "server": f"{name}.safetensors",
        "memory": {str(client): file for client, (file, _) in state.store.files.items()},
        "sha256": files,
    }
    write_atomically(folder / f"{name}.json", as_json(manifest | {"checksum": _checksum(manifest)}))
    _remove_old(folder)


def load(folder: Path, fingerprint: str | None = None) -> tuple[State, dict[str, Tensor]] | None:
    """The newest intact checkpoint and its constants, or None where there is none at all.

    Raises:
        InputError: the checkpoint belongs to another configuration, or every one is damaged.
    """
    manifests = sorted(folder.glob("round-*.json"), reverse=True)
    if not manifests:
        return None
    for path in manifests:
        try:
            manifest = _read_manifest(path)
            if fingerprint is not None and manifest["fingerprint"] != fingerprint:
                raise InputError(
                    f"{folder} is the checkpoint of another configuration (settings, network or data differ): "
                    "resume with the settings it was begun with, or choose another --out"
                )
            return _read(folder, manifest)
        except Damaged as error:
            warnings.warn(f"checkpoint {path.name} is damaged ({error}); falling back to the one before", stacklevel=2)
    raise InputError(f"no intact checkpoint in {folder}: restore one, or start again with another --out")


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest.pop("checksum") != _checksum(manifest):
            raise Damaged("the manifest does not match its checksum")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"manifest unreadable: {error}") from None
    if manifest["format"] != FORMAT:
        raise InputError(f"{path} has format {manifest['format']}, this version reads {FORMAT}: use the version that wrote it")
    return dict(manifest)


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


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
    )
    return state, arrays[manifest["constants"]]


def _serialise(arrays: dict[str, Tensor]) -> bytes:
    return safetensors.torch.save({key: value.detach().cpu().contiguous().clone() for key, value in arrays.items()})


def write_arrays(path: Path, arrays: dict[str, Tensor]) -> str:
    """Arrays as one file, written whole; its hash."""
    content = _serialise(arrays)
    write_atomically(path, content)
    return hashlib.sha256(content).hexdigest()


def _write_once(path: Path, arrays: dict[str, Tensor]) -> str:
    """The same for arrays that never change: written only where they are missing."""
    digest = hashlib.sha256(_serialise(arrays)).hexdigest()
    if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        write_arrays(path, arrays)
    return digest


def read_arrays(path: Path) -> dict[str, Tensor]:
    """The arrays of a file that no manifest vouches for."""
    try:
        return safetensors.torch.load(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except safetensors.SafetensorError as error:
        raise InputError(f"{path} is damaged ({error}): restore it, or make it again") from None


def _read_checked(path: Path, digest: str) -> dict[str, Tensor]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Damaged(f"{path.name}: {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise Damaged(f"{path.name} does not match its checksum")
    try:
        return safetensors.torch.load(content)
    except safetensors.SafetensorError as error:
        raise Damaged(f"{path.name}: {error}") from None


def _remove_old(folder: Path) -> None:
    manifests = sorted(folder.glob("round-*.json"), reverse=True)
    for path in manifests[KEPT:]:
        path.unlink(missing_ok=True)
    needed: set[str] = set()
    for path in manifests[:KEPT]:
        try:
            needed |= _read_manifest(path)["sha256"].keys()
        except Damaged:
            continue
    for path in (*folder.glob("*.safetensors"), *folder.glob("memory/*.safetensors")):
        if path.relative_to(folder).as_posix() not in needed:
            path.unlink(missing_ok=True)
