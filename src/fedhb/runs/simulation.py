"""Simulates a run: all clients are on this machine. `Simulator` is the session's host."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedhb.algorithms import Algorithm, Federation, Problem
from fedhb.clients.checks import check_alike
from fedhb.clients.clients import Clients
from fedhb.engine.automatic import Automatic
from fedhb.engine.loop import Callback, State
from fedhb.errors import InputError, reason
from fedhb.evaluation.evaluate import Watch
from fedhb.evaluation.ledger import Ledger, evaluated_hash
from fedhb.evaluation.observer import Observer
from fedhb.likelihood import Likelihood
from fedhb.network.factory import check_head, check_model, check_single, default_likelihood
from fedhb.network.vectors import Network
from fedhb.runs.folder import EVALUATED, EVALUATION, RunFolder
from fedhb.runs.load import load
from fedhb.runs.run import Run, as_inputs
from fedhb.runs.session import Evaluated, Session, Task
from fedhb.runs.settings import Settings

Say = Callable[[str], None]


def silent(text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Population:
    """The clients of a run, and inputs that none of them has.

    Attributes:
        clients: those that train.
        holdout: those that never train, and are evaluated beside the others.
        unseen: (what they are, inputs) that predictions should be unsure of.
    """

    clients: Clients
    holdout: Clients | None = None
    unseen: tuple[str, np.ndarray] | None = None


@dataclass(frozen=True)
class Keep:
    """Where a run is kept, and who is told of it.

    Attributes:
        out: the folder for settings, records, result and checkpoints; None keeps nothing on disk.
        resume: go on where the run in `out` stopped.
        progress: show it.
        callbacks: listeners to the rounds.
    """

    out: str | os.PathLike[str] | None = None
    resume: bool = False
    progress: bool = True
    callbacks: Sequence[Callback] = ()


@dataclass(frozen=True)
class Model:
    """The network of a run.

    Attributes:
        module: any torch module; its present weights are the starting point.
        head: the name of its head; None for its last linear layer, "" for none.
        again: how it is made again; None for a module of the user's own.
        likelihood: None for the categorical one of labels, the Gaussian one of real targets.
    """

    module: nn.Module
    head: str | None = None
    again: Mapping[str, Any] | None = None
    likelihood: Likelihood | None = None

    def problem(self, clients: Clients, batch_norm: str) -> Problem:
        """Return the problem of these clients; refuse a network that does not suit their data."""
        network = Network(
            self.module, head=self.head, batch_norm=batch_norm, scaling=clients.scaling
        )
        likelihood = self.likelihood or default_likelihood(clients, network)
        check_model(network, likelihood, clients)
        if self.head is None:
            check_head(network, clients)
        federation = Federation(
            len(clients), clients.num_examples, clients.num_classes, clients.server_inputs
        )
        return Problem(network, likelihood, federation)


class Simulator:
    """The host of a session on this machine (runs/session.py).

    Args:
        session: of the run.
        population: the clients.
        split: the examples that are evaluated; empty for none.
    """

    def __init__(self, session: Session, population: Population, split: str):
        settings = session.task.settings
        groups = [c for c in (population.clients, population.holdout) if c is not None]
        self.session, self.settings, self.split = session, settings, split
        self.population = population
        self.checkpoint_every = settings.place.checkpoint_every
        self.evaluated_hash = evaluated_hash(
            session.trained_hash,
            settings.personal_plan,
            split,
            groups if split else (),
            population.unseen,
        )
        session.task.problem.network.to(settings.place.device)
        self.clients = population.clients.to(settings.place.device)

    def engine(self, state: State) -> Automatic:
        """Return the executor: this process, or workers where they pay."""
        return Automatic(
            self.session.task.problem,
            self.session.algorithm,
            self.clients,
            state.store,
            training=self.session.task.training,
            done=state.done,
            workers=self.settings.place.workers,
            timetable=self.session.timetable,
        )

    def files(self) -> Mapping[str, bytes]:
        """Return no more files than every run has."""
        return {}

    def evaluate(self, run: Run, watch: Watch) -> Evaluated:
        """Return the metrics of all clients; go on with an evaluation that was stopped."""
        folder, observer, ledger = self.session.folder, None, None
        if folder is not None:
            ledger = Ledger(folder.path / EVALUATED, self.evaluated_hash)
            if not ledger.holds_some:  # evaluation.json is of another evaluation
                (folder.path / EVALUATION).unlink(missing_ok=True)
                observer = self._observer(run)
            elif not (folder.path / EVALUATION).exists():
                warnings.warn(  # the observer has not seen all predictions
                    f"{folder.path} was stopped while it was evaluated: its numbers are kept, but "
                    "evaluation.json, for reports, will be missing; to have it, delete result.json "
                    "at the end and resume once more",
                    stacklevel=2,
                )
        if not self.split:
            return Evaluated(None)
        evaluation = replace(run.evaluation(self.split), ledger=ledger, watch=watch)
        known = replace(evaluation, observer=observer).results(self.clients)
        novel = None
        if self.population.holdout is not None:
            novel = evaluation.results(self.population.holdout.to(self.settings.place.device))
        observed = observer.summary(run.rng) if observer is not None else None
        return Evaluated(self.split, known, novel, observed)

    def _observer(self, run: Run) -> Observer:
        unseen = None
        if self.population.unseen is not None:
            name, inputs = self.population.unseen
            unseen = name, as_inputs(inputs, run.input_shape)
        return Observer(run.problem, run.algorithm, run.state.server, run.seed, unseen)


def simulate(
    settings: Settings,
    algorithm: Algorithm,
    model: Model,
    population: Population,
    keep: Keep,
    say: Say = silent,
) -> Run:
    """Train, evaluate and keep a run.

    Args:
        settings: the description of the run, whose data and model are made already.
        algorithm: with its settings.
        model: the network.
        population: the clients.
        keep: where the run is kept, and who is told of it.
        say: is told where the run was finished before.
    """
    check_device(settings.place.device)
    split = check_population(population, settings.evaluation.split)
    problem = model.problem(population.clients, settings.model.batch_norm)
    for clients in (population.clients, population.holdout if split else None):
        if clients is not None:
            check_single(problem.network, clients, split or None)
    folder = None
    if keep.out is not None:
        folder = RunFolder(keep.out)
        folder.claim(keep.resume)
    task = Task(settings, algorithm, problem, population.clients, model.head, model.again)
    session = Session(task, folder, keep.resume)
    host = Simulator(session, population, split)
    if folder is not None and session.finished(host):
        say(f"{folder.path} was finished already: nothing to do")
        run: Run = load(
            folder.path, model=model.module, algorithm=algorithm, likelihood=model.likelihood
        )
        return run
    return session.carry_out(host, keep.progress, keep.callbacks)


def check_population(population: Population, split: str) -> str:
    """Refuse clients that cannot be trained or evaluated together; return the split to evaluate.

    Without test examples nothing is evaluated; another split must be there.
    """
    clients, holdout = population.clients, population.holdout
    if population.unseen is not None:  # before training: a wrong shape should not cost an hour
        as_inputs(population.unseen[1], tuple(clients.train.x.shape[1:]))
    if split and not clients.has(split):
        if split != "test":
            raise InputError(f"evaluate_on={split!r}, but the clients have no such split")
        split = ""
    if holdout is None:
        return split
    if split and not holdout.has(split):
        raise InputError(
            f"the holdout clients have no {split} examples: give some, or choose another "
            "evaluate_on"
        )
    check_alike(clients, holdout, "holdout")
    if both := set(clients.ids.tolist()) & set(holdout.ids.tolist()):
        raise InputError(
            f"client {min(both)} trains and is held out: give the holdout clients ids of their "
            "own, from_arrays(..., ids=...)"
        )
    return split


def check_device(device: str) -> None:
    """Refuse a device that is not there."""
    try:
        torch.zeros(1, device=device).item()  # "meta" has no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"device={device!r} cannot be used ({reason(error)}): use cpu, or cuda where it is "
            "installed"
        ) from None
