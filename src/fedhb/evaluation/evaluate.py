"""Global prediction and personalisation, each client on its own held-back examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedhb.algorithms.contract import Algorithm, Problem
from fedhb.answers.admission import check_global, check_personal
from fedhb.clients.clients import Clients, Share
from fedhb.engine.cohort import chunk_size
from fedhb.engine.loop import State
from fedhb.errors import InputError
from fedhb.evaluation.ledger import Ledger
from fedhb.evaluation.observer import Observer
from fedhb.seeding import Randomness
from fedhb.training.plan import Plan

EXAMPLES_AT_ONCE = 4096
"""Examples predicted at once, where clients may share a batch."""

Metrics = dict[str, float]
Watch = Callable[[int, int], None]
"""A function that is told how many of how many clients are evaluated."""


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one state of a run.

    Attributes:
        problem, algorithm, state: what predicts.
        plan: how clients personalise.
        rng: the randomness of the predictions.
        split: the examples that are predicted.
        observer: is told of every prediction; no number depends on it.
        ledger: keeps the metrics of each client; clients that it holds already are not evaluated.
        watch: is told how many clients are done.
    """

    problem: Problem
    algorithm: Algorithm
    state: State
    plan: Plan
    rng: Randomness
    split: str = "test"
    observer: Observer | None = None
    ledger: Ledger | None = None
    watch: Watch | None = None

    def results(self, clients: Clients) -> dict[str, Any]:
        """Return the metrics of both tasks, as means over clients and for every client.

        The metrics of a client without examples are None.
        """
        held = self._share(clients).sizes.nonzero().flatten().tolist()
        if not held:
            raise InputError(
                f"no client has {self.split} examples: give some, or choose another split to "
                "evaluate on"
            )
        selected = clients.select(held)
        if self.observer is not None:
            self.observer.begin(selected, self._share(selected))
        before = self.global_metrics(selected)
        after = self.personalised_metrics(selected)
        names = list(clients.names) if clients.names else clients.ids.tolist()
        return tabulate(
            names, dict(zip(held, before, strict=True)), dict(zip(held, after, strict=True))
        )

    def global_metrics(self, clients: Clients) -> list[Metrics]:
        """Return the metrics of the global prediction on each client's own examples."""
        problem, share, store = self.problem, self._share(clients), self.state.store
        # batch statistics, and predictions that depend on a client's memory, need each client's
        # examples as a batch of their own
        remembers = bool(self.algorithm.remember(problem, clients.select([0])))
        alone = problem.network.normalises_by_batch or remembers
        metrics: list[Metrics] = []
        for group in _groups(share.sizes.tolist(), 0 if alone else EXAMPLES_AT_ONCE):
            parts = [share.examples(k) for k in group]
            selected = clients.select(group)
            memory = store.load(self.algorithm, problem, selected) if alone else None
            x = torch.cat([x for x, _ in parts])
            predictions = self.algorithm.predict(problem, self.state.server, x, self.rng, memory)
            check_global(predictions)
            pieces = predictions.split([len(x) for x, _ in parts])
            for k, prediction, (_, y) in zip(group, pieces, parts, strict=True):
                metrics.append(problem.likelihood.metrics(prediction, y))
                if self.observer is not None:
                    self.observer.predicted("global", k, prediction, y, metrics[k])
        return metrics

    def personalised_metrics(self, clients: Clients) -> list[Metrics]:
        """Return the metrics of each client's own posterior, fitted on its training examples.

        Clients in the ledger are taken from there; the others are added to it.
        """
        order = sorted(range(len(clients)), key=lambda k: (-int(clients.sizes[k]), k))
        chunk = chunk_size(self.problem.network)
        metrics: dict[int, Metrics] = {}
        for start in range(0, len(order), chunk):
            positions = order[start : start + chunk]
            ids = clients.ids[positions].tolist()
            values = self.ledger.find(ids) if self.ledger is not None else None
            if values is None:
                values = self._personalise(clients, positions)
                if self.ledger is not None:
                    self.ledger.keep(ids, values)
            metrics |= dict(zip(positions, values, strict=True))
            if self.watch is not None:
                self.watch(len(metrics), len(clients))
        return [metrics[k] for k in range(len(clients))]

    def _personalise(self, clients: Clients, positions: Sequence[int]) -> list[Metrics]:
        """Return the metrics of the clients at these positions, which are personalised together."""
        problem, share, selected = self.problem, self._share(clients), clients.select(positions)
        ids = selected.ids.tolist()
        memory = self.state.store.load(self.algorithm, problem, selected)
        personal = self.algorithm.personalise(
            problem, self.state.server, selected, memory, self.plan, self.rng
        )
        check_personal(personal.theta, ids)
        if self.observer is not None:
            self.observer.personalised(positions, personal)
        metrics = []
        for c, k in enumerate(positions):
            x, y = share.examples(k)
            prediction = personal.client(c).predict(x.unsqueeze(0))[0]
            # the weights may be finite, and too large to predict with
            check_personal(prediction.unsqueeze(0), ids[c : c + 1])
            metrics.append(problem.likelihood.metrics(prediction, y))
            if self.observer is not None:
                self.observer.predicted("personalised", k, prediction, y, metrics[c])
        return metrics

    def _share(self, clients: Clients) -> Share:
        share: Share | None = getattr(clients, self.split)
        if share is None:
            raise InputError(
                f"the clients have no {self.split} examples: give some, or choose another split to "
                "evaluate on"
            )
        return share


def tabulate(
    names: Sequence[Any], before: Mapping[int, Metrics], after: Mapping[int, Metrics]
) -> dict[str, Any]:
    """Return means over clients, and the main metric of every client.

    Args:
        names: of all clients.
        before, after: the metrics of both tasks by position, for the clients that have examples.
    """
    main = next(iter(next(iter(before.values()))))  # accuracy or rmse
    per_client: dict[str, list[Any]] = {"client": list(names)}
    for task, metrics in (("global", before), ("personalised", after)):
        per_client[f"{task}_{main}"] = [
            metrics[k][main] if k in metrics else None for k in range(len(names))
        ]
    return {
        "global": mean(list(before.values())),
        "personalised": mean(list(after.values())),
        "per_client": per_client,
    }


def mean(metrics: Sequence[Metrics]) -> Metrics:
    """Return the mean over clients of each metric."""
    return {key: sum(m[key] for m in metrics) / len(metrics) for key in metrics[0]}


def _groups(sizes: Sequence[int], block: int) -> list[list[int]]:
    """Return consecutive positions whose sizes add up to at most `block`, at least one each."""
    groups: list[list[int]] = []
    held = 0
    for k, size in enumerate(sizes):
        if groups and held + size <= block:
            groups[-1].append(k)
            held += size
        else:
            groups.append([k])
            held = size
    return groups


def predict_in_blocks(problem: Problem, predict: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return predict(x), computed in blocks of examples.

    Where batch norm uses the batch's own statistics, all examples are one block.
    """
    parts = [x] if problem.network.normalises_by_batch else x.split(EXAMPLES_AT_ONCE)
    return torch.cat([predict(part) for part in parts]).cpu()
