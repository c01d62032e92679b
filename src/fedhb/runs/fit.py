"""The library's front door: `fit` trains a global posterior, `load` brings one back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fedhb import algorithms
from fedhb.algorithms import Algorithm, Federation, Plan, Problem
from fedhb.answers.defence import Defence
from fedhb.clients.checks import check_alike
from fedhb.clients.clients import SPLITS, Clients
from fedhb.engine.automatic import Automatic
from fedhb.engine.loop import Callback, State, Training
from fedhb.engine.schedule import cohort_size
from fedhb.errors import InputError
from fedhb.evaluation.ledger import Ledger, mark_of
from fedhb.evaluation.observer import Observer
from fedhb.files import sealed
from fedhb.likelihood import Likelihood
from fedhb.network.factory import check_head, check_model, check_single, default_likelihood
from fedhb.network.vectors import Network
from fedhb.runs.description import problem_record
from fedhb.runs.folder import EVALUATED, EVALUATION, SETTINGS
from fedhb.runs.load import load
from fedhb.runs.recorder import fingerprint_of
from fedhb.runs.run import Run, as_inputs
from fedhb.runs.session import Job, claim, conduct, mechanism, top_settings
from fedhb.runs.settings import Settings, toml_key, toml_value, training_values


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
    dp_noise: float = 0.0,
    dp_clip: float = 1.0,
    dp_delta: float = 1e-5,
    defence: str = "",
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    settings_toml: Callable[[Mapping[str, str]], str] | None = None,
    rebuild: Mapping[str, Any] | None = None,
) -> Run:
    """Train a global posterior.

    Args:
        model: any torch module; its present weights are the starting point, and it is not changed.
        clients: who holds which data.
        algorithm: with its settings; default `EmpiricalBayes()`.
        rounds, fraction, local_epochs, batch_size, lr, momentum, schedule: R, f, tau and the clients' SGD.
        personal_lr, personal_epochs: how clients personalise. These, lr and momentum default to the algorithm's own `training`,
            where it has none to those of `Settings`.
        seed: of cohorts, minibatches, dropout and sampling.
        head: the name of the model's head; default: its last linear layer; "" for none.
        batch_norm: "running", or "batch" for the statistics of the batch.
        likelihood: default: categorical for labels, Gaussian for real targets (each scaled by its training values; a model with
            one output per target instead of two gets noise of a fixed size).
        holdout: clients that never train, with ids of their own; they are evaluated beside the training clients.
        evaluate_on: the split of the result's numbers, read once at the end; None for no evaluation.
        unseen: (what they are, inputs) that are like none of the data: a report shows how uncertain predictions for them are.
        out: the folder for settings, records, result and checkpoints; None keeps nothing on disk.
        resume: go on where a run in `out` stopped.
        checkpoint_every: rounds between checkpoints.
        device, workers: where it runs; workers=0 means as many processes as pay off, at most one per core.
        dp_noise, dp_clip, dp_delta: differential privacy (privacy.py); noise 0 for none.
        defence: filters against hostile or broken clients (defence.py): "default", or some of refuse, clip, winsorise and krum.
        progress: show it.
        callbacks: told of every round.
        settings_toml, rebuild: for the command line: what settings.toml holds, and how `load` makes the model again.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model={model!r}: give a torch module itself, not its class or its name")
    if not isinstance(clients, Clients):
        raise InputError(f"clients is a {type(clients).__name__}: give fedhb.Clients, such as Clients.from_arrays([(x, y), ...])")
    if not isinstance(callbacks, Sequence):
        raise InputError(f"callbacks={callbacks!r}: give a list of them")
    if resume and out is None:
        raise InputError("resume=True without `out`: give the folder of the run to go on with")
    algorithm = algorithms.check(algorithm if algorithm is not None else algorithms.EmpiricalBayes())
    given = {"lr": lr, "momentum": momentum, "personal_lr": personal_lr, "personal_epochs": personal_epochs}
    s = Settings(  # which knows every bound
        rounds=rounds, fraction=fraction, local_epochs=local_epochs, batch_size=batch_size, schedule=schedule, seed=seed,
        batch_norm=batch_norm, checkpoint_every=checkpoint_every, workers=workers, dp_noise=dp_noise,
        dp_clip=dp_clip, dp_delta=dp_delta, defence=defence, **training_values(algorithm, given),
    )  # fmt: skip
    check_device(device)
    if unseen is not None:
        as_inputs(unseen[1], tuple(clients.train.x.shape[1:]))  # before training: a wrong shape should not cost an hour
    if evaluate_on not in (None, *SPLITS):
        raise InputError(f"evaluate_on={evaluate_on!r}: choose train, validation, test or None")
    if evaluate_on and not clients.has(evaluate_on):
        if evaluate_on != "test":
            raise InputError(f"evaluate_on={evaluate_on!r}, but the clients have no such split")
        evaluate_on = None
    if evaluate_on and holdout is not None and not holdout.has(evaluate_on):
        raise InputError(f"the holdout clients have no {evaluate_on} examples: give some, or choose another evaluate_on")
    if holdout is not None:
        check_alike(clients, holdout, "holdout")
    if holdout is not None and (both := set(clients.ids.tolist()) & set(holdout.ids.tolist())):
        raise InputError(
            f"client {min(both)} trains and is held out: give the holdout clients ids of their own, from_arrays(..., ids=...)"
        )
    network = Network(model, head=head, batch_norm=batch_norm, scaling=clients.scaling)
    likelihood = likelihood or default_likelihood(clients, network)
    check_model(network, likelihood, clients)
    if head is None:
        check_head(network, clients)
    for some in (clients, *([holdout] if holdout is not None and evaluate_on else [])):
        check_single(network, some, evaluate_on)
    problem = Problem(
        network, likelihood, Federation(len(clients), clients.num_examples, clients.num_classes, clients.server_inputs)
    )
    plan = Plan(s.local_epochs, s.batch_size, s.lr, s.momentum, train_head=algorithm.update == "full")
    training = Training(s.rounds, s.fraction, plan, s.schedule, s.seed)
    personal_plan = Plan(s.personal_epochs, s.batch_size, s.personal_lr, s.momentum, train_head=True)
    folder = claim(out, resume)
    privacy = mechanism(folder, s.dp_noise, s.dp_clip, s.dp_delta, len(clients), cohort_size(len(clients), s.fraction))
    private = (s.dp_noise, s.dp_clip, s.dp_delta, privacy.mark) if privacy is not None else ()
    job = Job(
        problem=problem,
        algorithm=algorithm,
        training=training,
        personal_plan=personal_plan,
        num_clients=len(clients),
        input_shape=tuple(clients.train.x.shape[1:]),
        fingerprint=fingerprint_of(problem, algorithm, training, clients, *private, *([defence] if defence else [])),
        asked=asked_of(personal_plan, evaluate_on, clients, holdout, unseen),
        constants=network.constants(),
        privacy=privacy,
        defence=Defence.named(defence),
        augment=clients.augment,
    )
    trained = job.trained  # at once: not every algorithm has answers to filter
    network.to(device)
    clients = clients.to(device)
    if folder is not None and resume and job.finished(folder):
        return load(folder.path, model=model, algorithm=algorithm, likelihood=likelihood)

    def files(result: Run) -> dict[str, bytes]:
        toml = settings_toml(versions()) if settings_toml else describe(model, clients, algorithm, training, personal_plan)
        return {SETTINGS: toml.encode(), "problem.json": sealed(problem_record(result, head, batch_norm, rebuild))}

    def engine(state: State) -> Automatic:
        return Automatic(problem, trained, clients, state.store, training=training, done=state.done, workers=s.workers)

    def evaluation(result: Run) -> dict[str, Any]:
        def ledger(who: Clients, name: str) -> Ledger | None:
            about = (name, job.fingerprint, dataclasses.asdict(personal_plan), result.state.done)
            return Ledger(folder.path / EVALUATED, about, who, str(evaluate_on)) if folder is not None else None

        kept = ledger(clients, "known") if evaluate_on else None
        begun = kept is not None and kept.begun
        if folder is not None and not begun:
            (folder.path / EVALUATION).unlink(missing_ok=True)  # of another evaluation than the one that begins here
        if not evaluate_on:
            return {"split": evaluate_on, "known": None, "novel": None}
        if folder is not None and begun and not (folder.path / EVALUATION).exists():
            warnings.warn(  # whoever goes on with an evaluation has not seen all of its predictions
                f"{folder.path} was stopped while it was evaluated: its numbers are kept, but evaluation.json, for reports, "
                "will be missing; to have it, delete result.json at the end and resume once more",
                stacklevel=2,
            )
        observer = observer_of(result, unseen) if folder is not None and not begun else None
        known = result.evaluate(clients, evaluate_on, observer=observer, ledger=kept)
        return {
            "split": evaluate_on,
            "known": known,
            "novel": result.evaluate(holdout, evaluate_on, ledger=ledger(holdout, "novel")) if holdout is not None else None,
            "observed": observer.summary(result.rng) if observer is not None else None,
        }

    return conduct(
        job,
        engine,
        evaluation,
        files,
        about={"dataset": clients.title or clients.name, "data": dict(clients.files)},
        folder=folder,
        resume=resume,
        checkpoint_every=s.checkpoint_every,
        progress=progress,
        callbacks=callbacks,
    )


def asked_of(
    plan: Plan, split: str | None, clients: Clients, holdout: Clients | None, unseen: tuple[str, np.ndarray] | None
) -> str:
    """A hash of what is evaluated, on what, and after which personalisation."""
    about = [
        dataclasses.asdict(plan),
        unseen and [unseen[0], hashlib.sha256(np.ascontiguousarray(unseen[1]).tobytes()).hexdigest()],
    ]
    marks = [mark_of(about, who, split) for who in (clients, holdout) if who is not None] if split else []
    return hashlib.sha256(json.dumps(marks).encode()).hexdigest()


def observer_of(result: Run, unseen: tuple[str, np.ndarray] | None) -> Observer:
    """Who watches the evaluation, for evaluation.json."""
    strange = (unseen[0], as_inputs(unseen[1], result.input_shape)) if unseen is not None else None
    return Observer(result.problem, result.algorithm, result.state.server, result.seed, strange)




def check_device(device: str) -> None:
    """Refuse a device that is not there."""
    try:
        torch.zeros(1, device=device).item()  # "meta" has no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"device={device!r} cannot be used ({str(error).splitlines()[0]}): use cpu, or cuda where it is installed"
        ) from None




def describe(model: nn.Module, clients: Clients, algorithm: Any, training: Training, personal: Plan) -> str:
    """settings.toml of a run from Python."""
    lines = ["# A run from Python. Versions: " + ", ".join(f"{k} {v}" for k, v in versions().items())]
    values = {
        "dataset": clients.name,
        "num_clients": len(clients),
        **top_settings(algorithm, training),
        "personal_lr": personal.lr,
        "personal_epochs": personal.epochs,
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
    }
    lines += [f"{key} = {toml_value(value)}" for key, value in values.items()]
    own = {key: value for key, value in dataclasses.asdict(algorithm).items() if value is not None}
    lines += ["", f"[{toml_key(algorithm.name)}]", *(f"{key} = {toml_value(value)}" for key, value in own.items())]
    return "\n".join(lines) + "\n"


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    from fedhb import __version__

    return {
        "fedhb": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
