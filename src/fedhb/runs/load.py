"""Runs and personal models from their folders, and personal models to one."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from fedhb.algorithms import Algorithm, Personalised, Problem
from fedhb.errors import InputError
from fedhb.files import check_unused, sealed
from fedhb.likelihood import Likelihood
from fedhb.network.vectors import Network
from fedhb.runs import checkpoint
from fedhb.runs.description import Stored, try_out
from fedhb.runs.folder import RunFolder
from fedhb.runs.run import Personal, Run

PERSONAL, CONSTANTS = "personal.safetensors", "constants.safetensors"


def load(
    path: str | os.PathLike[str],
    model: nn.Module | str | None = None,
    algorithm: Algorithm | None = None,
    likelihood: Likelihood | None = None,
) -> Any:
    """A `Run` from its folder, or a `Personal` model from its own.

    Args:
        path: the folder.
        model: the module that was trained, where it was your own (its weights do not matter), or the name of its factory,
            pkg.mod:factory, which is then run.
        algorithm: the algorithm, where it is your own.
        likelihood: the likelihood, where it is your own.
    """
    folder = RunFolder(path)
    stored = Stored.read(folder)
    personal = folder.path / PERSONAL
    loaded = None if personal.exists() else checkpoint.load(folder.checkpoints, records=folder.records_until)
    if loaded is None and not personal.exists():
        raise InputError(f"{folder.path} holds no checkpoint: train with --out {folder.path} first")
    if loaded is not None:
        state, constants = loaded
    else:
        state, constants = None, checkpoint.read_arrays(folder.path / CONSTANTS, stored.files.get(CONSTANTS, ""))
    module = model if isinstance(model, nn.Module) else stored.make_model(folder, model, constants)
    network = Network(module, head=stored.head, batch_norm=stored.batch_norm, scaling=stored.scaling)
    network.restore(constants)
    stored.recognise(folder, network)
    algorithm = stored.make_algorithm(folder, algorithm)
    problem = Problem(network, stored.make_likelihood(folder, likelihood), stored.federation)
    if state is None:
        arrays = checkpoint.read_arrays(personal, stored.files.get(PERSONAL, ""))
        if arrays.keys() != {"theta", "head", "buffers", "weights"}:
            raise InputError(f"{personal} holds {sorted(arrays)}, which is no personal model: restore it, or make it again")
        posterior = Personalised(problem, **arrays)
        try_out(folder, [constants, arrays], lambda x: posterior.predict(x.unsqueeze(0))[0], stored.input_shape)
        return Personal(posterior, stored.input_shape)
    result = folder.result() if (folder.path / "result.json").exists() else {}
    plan, shape = stored.personal_plan, stored.input_shape
    run = Run(problem, algorithm, state, stored.seed, plan, shape, result, folder.rounds(), stored.augment)
    try_out(
        folder, [constants, state.server], lambda x: run.algorithm.predict(problem, state.server, x, run.rng), stored.input_shape
    )
    return run


def save_personal(path: str | os.PathLike[str], run: str | os.PathLike[str], personal: Personal) -> None:
    """Keep a personalised model in a folder of its own, new or empty, which needs nothing of the run it came from."""
    folder = RunFolder(path)
    check_unused(folder.path, "give a new folder for a personal model")
    record = RunFolder(run).read_json("problem.json", required=True)
    network, stored = personal.posterior.problem.network, Stored.read(RunFolder(run))
    of_it = torch.equal(stored.scaling.mean, network.scaling.mean) and torch.equal(stored.scaling.std, network.scaling.std)
    if not of_it or stored.input_shape != tuple(personal.input_shape):
        raise InputError(f"{run} is not the run that this model comes from: give the folder of that one")
    stored.recognise(RunFolder(run), network)
    arrays = {PERSONAL: personal.posterior.arrays(), CONSTANTS: personal.posterior.problem.network.constants()}
    files = {name: checkpoint.write_arrays(folder.path / name, content) for name, content in arrays.items()}
    folder.write("problem.json", sealed(record | {"files": files}))
