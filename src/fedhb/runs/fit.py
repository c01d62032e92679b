"""The library's front door: `fit` trains a global posterior."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from torch import nn

from fedhb import algorithms
from fedhb.algorithms import Algorithm
from fedhb.clients.clients import Clients
from fedhb.engine.loop import Callback
from fedhb.errors import InputError
from fedhb.likelihood import Likelihood
from fedhb.runs.run import Run
from fedhb.runs.settings import (
    EvaluationSettings,
    ModelSettings,
    PersonalisationSettings,
    PlaceSettings,
    Privacy,
    Settings,
    TrainingSettings,
    training_values,
)
from fedhb.runs.simulation import Keep, Model, Population, simulate


def fit(
    model: nn.Module,
    clients: Clients,
    algorithm: Algorithm | None = None,
    *,
    rounds: int = 100,
    fraction: float = 0.1,
    local_epochs: int = 1,
    batch_size: int = 50,
    lr: float | None = None,
    momentum: float | None = None,
    schedule: str = "step",
    personal_lr: float | None = None,
    personal_epochs: int | None = None,
    seed: int = 0,
    head: str | None = None,
    batch_norm: str = "running",
    likelihood: Likelihood | None = None,
    holdout: Clients | None = None,
    evaluate_on: str | None = "test",
    unseen: tuple[str, np.ndarray] | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    checkpoint_every: int = 10,
    device: str = "cpu",
    workers: int = 0,
    privacy: Privacy | None = None,
    defence: str = "",
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train a global posterior.

    Args:
        model: any torch module; its present weights are the starting point, and it is not changed.
        clients: the clients that train, with their data.
        algorithm: with its settings; default `EmpiricalBayes()`.
        rounds: the number of rounds (R).
        fraction: the share of the clients in a round (f).
        local_epochs: epochs of a client in a round (tau).
        batch_size: examples per minibatch.
        lr, momentum: of the clients' SGD. These, personal_lr and personal_epochs default to the
            algorithm's own `training`, and where it has none to those of `Settings`.
        schedule: of lr over the rounds: "step", "constant" or "cosine".
        personal_lr, personal_epochs: how clients personalise.
        seed: of cohorts, minibatches, dropout and sampling.
        head: the name of the model's head; default: its last linear layer; "" for none.
        batch_norm: "running", or "batch" for the statistics of the batch.
        likelihood: default: categorical for labels, Gaussian for real targets (each scaled by its
            training values; a model with one output per target instead of two gets noise of a
            fixed size).
        holdout: clients that never train, with ids of their own; they are evaluated beside the
            training clients.
        evaluate_on: the split of the result's numbers, read once at the end; None for no
            evaluation.
        unseen: (what they are, inputs) that are like none of the data: a report shows how uncertain
            predictions for them are.
        out: the folder for settings, records, result and checkpoints; None keeps nothing on disk.
        resume: go on where a run in `out` stopped.
        checkpoint_every: rounds between checkpoints.
        device: "cpu", or "cuda" where it is installed.
        workers: processes that train; 0 means as many as pay off, at most one per core.
        privacy: differential privacy, such as `Privacy(noise=1.0)`.
        defence: filters against hostile or broken clients: "default", or some of refuse, clip,
            winsorise and krum with commas between them.
        progress: show it.
        callbacks: listeners to every round.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model={model!r}: give a torch module itself, not its class or its name")
    if not isinstance(clients, Clients):
        raise InputError(
            f"clients is a {type(clients).__name__}: give fedhb.Clients, such as "
            "Clients.from_arrays([(x, y), ...])"
        )
    if not isinstance(callbacks, Sequence):
        raise InputError(f"callbacks={callbacks!r}: give a list of them")
    if privacy is not None and not isinstance(privacy, Privacy):
        raise InputError(f"privacy={privacy!r}: give fedhb.Privacy(noise=...)")
    if resume and out is None:
        raise InputError("resume=True without `out`: give the folder of the run to go on with")
    algorithm = algorithms.check(
        algorithm if algorithm is not None else algorithms.EmpiricalBayes()
    )
    given = {
        "lr": lr,
        "momentum": momentum,
        "personal_lr": personal_lr,
        "personal_epochs": personal_epochs,
    }
    chosen = training_values(algorithm, given)
    settings = Settings(
        algorithm=algorithm.name,
        seed=seed,
        defence=defence,
        model=ModelSettings(batch_norm=batch_norm),
        training=TrainingSettings(
            rounds=rounds,
            fraction=fraction,
            local_epochs=local_epochs,
            batch_size=batch_size,
            lr=chosen["lr"],
            momentum=chosen["momentum"],
            schedule=schedule,
        ),
        personalisation=PersonalisationSettings(chosen["personal_lr"], chosen["personal_epochs"]),
        privacy=privacy or Privacy(),
        evaluation=EvaluationSettings(split=evaluate_on or ""),
        place=PlaceSettings(device, workers, checkpoint_every),
    )
    return simulate(
        settings,
        algorithm,
        Model(model, head, likelihood=likelihood),
        Population(clients, holdout, unseen),
        Keep(out, resume, progress, callbacks),
    )
