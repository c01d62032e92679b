"""Reads runs and personal models from their folders, and writes personal models to theirs."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from fedhb.algorithms import Algorithm, Arrays, Personalised, Problem
from fedhb.engine.loop import State
from fedhb.errors import InputError
from fedhb.files import check_unused, sealed
from fedhb.likelihood import Likelihood
from fedhb.network.vectors import Network
from fedhb.runs import checkpoint
from fedhb.runs.description import Description, try_out
from fedhb.runs.folder import PROBLEM, RESULT, RunFolder
from fedhb.runs.run import Personal, Run

PERSONAL, CONSTANTS = "personal.safetensors", "constants.safetensors"


def load(
    path: str | os.PathLike[str],
    model: nn.Module | str | None = None,
    algorithm: Algorithm | None = None,
    likelihood: Likelihood | None = None,
) -> Any:
    """Return a `Run` from its folder, or a `Personal` model from its own.

    Args:
        path: the folder.
        model: the module that was trained, where it was your own (its weights do not matter), or
            the name of its factory, pkg.mod:factory, which is then run.
        algorithm: the algorithm, where it is your own.
        likelihood: the likelihood, where it is your own.
    """
    folder = RunFolder(path)
    stored = Description.read(folder)
    personal = (folder.path / PERSONAL).exists()
    state, constants = _arrays(folder, stored, personal)
    module = model if isinstance(model, nn.Module) else stored.make_model(folder, model, constants)
    network = Network(
        module, head=stored.head, batch_norm=stored.batch_norm, scaling=stored.scaling
    )
    network.restore(constants)
    stored.recognise(folder, network)
    algorithm = stored.make_algorithm(folder, algorithm)
    problem = Problem(network, stored.make_likelihood(folder, likelihood), stored.federation)
    if state is None:
        return _personal(folder, stored, problem, constants)
    run = Run(
        problem,
        algorithm,
        state,
        stored.seed,
        stored.personal_plan,
        stored.input_shape,
        folder.result() if (folder.path / RESULT).exists() else {},
        folder.rounds(),
        stored.augment,
    )
    try_out(
        folder,
        [constants, state.server],
        lambda x: run.algorithm.predict(problem, state.server, x, run.rng),
        stored.input_shape,
    )
    return run


def _arrays(folder: RunFolder, stored: Description, personal: bool) -> tuple[State | None, Arrays]:
    """Return the state of a run (None for a personal model) and its network as it was made."""
    if personal:
        path = folder.path / CONSTANTS
        return None, checkpoint.read_arrays(path, stored.files.get(CONSTANTS, ""))
    loaded = checkpoint.load(folder.checkpoints, records=folder.records_until)
    if loaded is None:
        raise InputError(f"{folder.path} holds no checkpoint: train with --out {folder.path} first")
    return loaded


def _personal(
    folder: RunFolder, stored: Description, problem: Problem, constants: Arrays
) -> Personal:
    """Return the personal model of a folder."""
    path = folder.path / PERSONAL
    arrays = checkpoint.read_arrays(path, stored.files.get(PERSONAL, ""))
    if arrays.keys() != {"theta", "head", "buffers", "weights"}:
        raise InputError(
            f"{path} holds {sorted(arrays)}, which is no personal model: restore it, or make it "
            "again"
        )
    posterior = Personalised(problem, **arrays)
    try_out(
        folder,
        [constants, arrays],
        lambda x: posterior.predict(x.unsqueeze(0))[0],
        stored.input_shape,
    )
    return Personal(posterior, stored.input_shape)


def save_personal(
    path: str | os.PathLike[str], run: str | os.PathLike[str], personal: Personal
) -> None:
    """Keep a personal model in a new or empty folder, which needs no other file of the run."""
    folder, source = RunFolder(path), RunFolder(run)
    check_unused(folder.path, "give a new folder for a personal model")
    record, stored = source.read_json(PROBLEM, required=True), Description.read(source)
    network = personal.posterior.problem.network
    same_scaling = torch.equal(stored.scaling.mean, network.scaling.mean) and torch.equal(
        stored.scaling.std, network.scaling.std
    )
    if not same_scaling or stored.input_shape != tuple(personal.input_shape):
        raise InputError(
            f"{run} is not the run that this model comes from: give the folder of that one"
        )
    stored.recognise(source, network)
    arrays = {PERSONAL: personal.posterior.arrays(), CONSTANTS: network.constants()}
    files = {
        name: checkpoint.write_arrays(folder.path / name, content)
        for name, content in arrays.items()
    }
    folder.write(PROBLEM, sealed(record | {"files": files}))
