"""Global prediction and personalisation, each client on its own held-back examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedhb.algorithms.contract import Algorithm, Arrays, Problem
from fedhb.answers.admission import check_global, check_personal
from fedhb.clients.clients import Clients, Share
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.cohort import chunk_size
from fedhb.errors import InputError
from fedhb.evaluation.ledger import Ledger
from fedhb.evaluation.observer import Observer
from fedhb.seeding import Randomness
from fedhb.training.plan import Plan

BLOCK = 4096
"""Examples predicted at once, where clients may share a batch."""

Metrics = dict[str, float]


def evaluate(
    problem: Problem,
    algorithm: Algorithm,
    server: Arrays,
    clients: Clients,
    store: ClientStore,
    plan: Plan,
    rng: Randomness,
    split: str = "test",
    observer: Observer | None = None,
    watch: Callable[[int, int], None] | None = None,
    ledger: Ledger | None = None,
) -> dict[str, Any]:
    """Means over clients of global and personalised metrics, and both for every client (None where it has no examples).

    An `observer` is told of every prediction, `watch` how many of the clients are done; no number depends on them. Clients in the
    `ledger` are taken from there.
    """
    held = _share(clients, split).sizes.nonzero().flatten().tolist()
    if not held:
        raise InputError(
            f"no client has {split} examples: give some, or choose another split to evaluate on"
        )
    some = clients.select(held)
    if observer is not None:
        observer.begin(some, _share(some, split))
    before = global_metrics(problem, algorithm, server, some, store, rng, split, observer)
    after = personalised_metrics(
        problem, algorithm, server, some, store, plan, rng, split, observer, watch, ledger
    )
    who = list(clients.names) if clients.names else clients.ids.tolist()
    return tabulate(who, dict(zip(held, before, strict=True)), dict(zip(held, after, strict=True)))


def tabulate(
    who: Sequence[Any], before: Mapping[int, Metrics], after: Mapping[int, Metrics]
) -> dict[str, Any]:
    """Means over clients, and the main metric of every client, from the metrics of those positions that have some."""
    main = next(iter(next(iter(before.values()))))  # accuracy or rmse
    per_client: dict[str, list[Any]] = {"client": list(who)}
    for task, metrics in (("global", before), ("personalised", after)):
        per_client[f"{task}_{main}"] = [
            metrics[k][main] if k in metrics else None for k in range(len(who))
        ]
    return {
        "global": mean(list(before.values())),
        "personalised": mean(list(after.values())),
        "per_client": per_client,
    }


def global_metrics(
    problem: Problem,
    algorithm: Algorithm,
    server: Arrays,
    clients: Clients,
    store: ClientStore,
    rng: Randomness,
    split: str = "test",
    observer: Observer | None = None,
) -> list[Metrics]:
    """The metrics of the global prediction on each client's own examples."""
    share = _share(clients, split)
    # batch statistics, and predictions that depend on a client's memory, need each client's examples as a batch of their own
    alone = problem.network.normalises_by_batch or algorithm.remember(problem, clients.select([0]))
    metrics: list[Metrics] = []
    for group in _groups(share.sizes.tolist(), 0 if alone else BLOCK):
        parts = [share.examples(k) for k in group]
        memory = store.load(algorithm, problem, clients.select(group)) if alone else None
        predictions = algorithm.predict(
            problem, server, torch.cat([x for x, _ in parts]), rng, memory
        )
        pieces = predictions.split([len(x) for x, _ in parts])
        check_global(predictions)
        for k, p, (_, y) in zip(group, pieces, parts, strict=True):
            metrics.append(problem.likelihood.metrics(p, y))
            if observer is not None:
                observer.predicted("global", k, p, y, metrics[k])
    return metrics


def personalised_metrics(
    problem: Problem,
    algorithm: Algorithm,
    server: Arrays,
    clients: Clients,
    store: ClientStore,
    plan: Plan,
    rng: Randomness,
    split: str = "test",
    observer: Observer | None = None,
    watch: Callable[[int, int], None] | None = None,
    ledger: Ledger | None = None,
) -> list[Metrics]:
    """The metrics of each client's own posterior, fitted on its training examples, on its own held-back ones.

    Clients in the ledger are taken from there; the others are added to it.
    """
    share = _share(clients, split)
    order = sorted(range(len(clients)), key=lambda k: (-int(clients.sizes[k]), k))
    chunk = chunk_size(problem.network)
    metrics: dict[int, Metrics] = {}
    for start in range(0, len(order), chunk):
        positions = order[start : start + chunk]
        selected = clients.select(positions)
        ids = selected.ids.tolist()
        found = ledger.find(ids) if ledger is not None else None
        if found is None:
            memory = store.load(algorithm, problem, selected)
            personal = algorithm.personalise(problem, server, selected, memory, plan, rng)
            check_personal(personal.theta, ids)
            if observer is not None:
                observer.personalised(positions, personal)
            found = []
            for c, k in enumerate(positions):
                x, y = share.examples(k)
                prediction = personal.client(c).predict(x.unsqueeze(0))[0]
                check_personal(
                    prediction.unsqueeze(0), ids[c : c + 1]
                )  # weights may be finite, and too large to predict with
                found.append(problem.likelihood.metrics(prediction, y))
                if observer is not None:
                    observer.predicted("personalised", k, prediction, y, found[c])
            if ledger is not None:
                ledger.keep(ids, found)
        metrics |= dict(zip(positions, found, strict=True))
        if watch is not None:
            watch(len(metrics), len(clients))
    return [metrics[k] for k in range(len(clients))]


def mean(metrics: Sequence[Metrics]) -> Metrics:
    """The mean over clients of each metric."""
    return {key: sum(m[key] for m in metrics) / len(metrics) for key in metrics[0]}


def _share(clients: Clients, split: str) -> Share:
    share: Share | None = getattr(clients, split)
    if share is None:
        raise InputError(
            f"the clients have no {split} examples: give some, or choose another split to evaluate on"
        )
    return share


def _groups(sizes: Sequence[int], block: int) -> list[list[int]]:
    """Consecutive positions whose sizes add up to at most `block` (at least one each)."""
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


def predict_in_blocks(problem: Problem, predict: Any, x: Tensor) -> Tensor:
    """predict(x) in blocks of examples; in one where batch norm uses the batch's own statistics."""
    return torch.cat(
        [predict(part) for part in ([x] if problem.network.normalises_by_batch else x.split(BLOCK))]
    ).cpu()
