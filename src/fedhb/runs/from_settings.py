"""Makes what a description names: the clients, the network, the algorithm; and trains them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedhb import data
from fedhb.algorithms import Algorithm, build
from fedhb.answers.defence import Defence, defended
from fedhb.answers.privacy import Mechanism, Private
from fedhb.clients import partition
from fedhb.clients.checks import suspect_targets
from fedhb.clients.clients import Clients
from fedhb.data.dataset import Dataset
from fedhb.engine.loop import Callback
from fedhb.engine.schedule import cohort_size
from fedhb.errors import InputError
from fedhb.network import nets
from fedhb.network.factory import make_model
from fedhb.runs.run import Run
from fedhb.runs.settings import DataSettings, Settings, check_partition
from fedhb.runs.simulation import Keep, Model, Population, Say, silent, simulate
from fedhb.seeding import derive

MOST_UNSEEN = 2000
"""The most inputs that are unseen."""


def read_dataset(settings: Settings) -> Dataset:
    """Return the data of a run: the user's file, or the named data set."""
    file = settings.data.file
    return data.read_table(file) if file else data.load(settings.data.dataset)


def make_population(
    settings: Settings, dataset: Dataset, flags: Mapping[str, Any] | None = None
) -> Population:
    """Return the clients that train, those that never do, and unseen inputs.

    Args:
        settings: of the run.
        dataset: the examples.
        flags: of the command line; those that the partition does not read are refused. Often the
            data alone decide which partition it is.
    """
    wanted, seed = settings.data, settings.seed
    dataset, unseen = leave_out(dataset, settings.evaluation.unseen)
    kind = wanted.partition or _natural_kind(dataset)
    check_partition(kind, flags or {})
    if dataset.groups and (kind != "groups" or wanted.server_share):
        wrong = f"server_share={wanted.server_share}"
        wrong = f"partition={kind!r}" if kind != "groups" else wrong
        raise InputError(
            f"{wrong}, but {dataset.name} has groups, whose partition holds test examples back: "
            "leave it out"
        )
    dataset, server_inputs = withhold(dataset, wanted.server_share, seed)
    if not wanted.partition and dataset.num_classes is None and kind == "shards":
        raise InputError(
            f"{dataset.name} has real targets and names no clients: give partition='iid', or a "
            "`client` array in the file"
        )
    clients, holdout = _partitioned(dataset, kind, wanted, seed)
    clients = replace(clients, server_inputs=server_inputs)
    if wanted.max_examples:
        clients = clients.with_at_most(wanted.max_examples, seed)
        holdout = holdout.with_at_most(wanted.max_examples, seed) if holdout else None
    if wanted.holdout_clients and kind != "groups":
        clients, holdout = clients.hold_out(wanted.holdout_clients, seed)
    if wanted.validation:
        clients = clients.with_validation(wanted.validation, seed)
        holdout = holdout.with_validation(wanted.validation, seed) if holdout else None
    return Population(clients, holdout, unseen)


def _natural_kind(dataset: Dataset) -> str:
    """Return the partition that suits data where none is given."""
    if dataset.train.client is not None:
        return "natural"
    return "groups" if dataset.groups else "shards"


def _partitioned(
    dataset: Dataset, kind: str, wanted: DataSettings, seed: int
) -> tuple[Clients, Clients | None]:
    """Return the clients of a partition, and those that it holds out by itself."""
    count, shards = wanted.num_clients, wanted.shards_per_client
    if kind == "groups":
        return partition.groups(
            dataset, count, wanted.holdout_clients, shards, seed, wanted.group_split
        )
    if kind == "shards":
        return partition.shards(dataset, count, shards, seed), None
    if kind == "dirichlet":
        return partition.dirichlet(dataset, count, wanted.alpha, seed), None
    if kind == "iid":
        return partition.iid(dataset, count, seed), None
    return partition.natural(dataset), None


def make_clients(
    settings: Settings, dataset: Dataset | None = None
) -> tuple[Clients, Clients | None]:
    """Return the clients of a run that train, and those that never do."""
    population = make_population(settings, dataset or read_dataset(settings))
    return population.clients, population.holdout


def make_server_inputs(settings: Settings) -> torch.Tensor | None:
    """Return the unlabelled inputs that the server of a run holds, without making its clients."""
    if not settings.data.server_share:
        return None
    dataset, _ = leave_out(read_dataset(settings), settings.evaluation.unseen)
    return withhold(dataset, settings.data.server_share, settings.seed)[1]


def leave_out(dataset: Dataset, unseen: str) -> tuple[Dataset, tuple[str, np.ndarray] | None]:
    """Return the data, without a class that is left out, and the inputs that are unseen.

    Args:
        dataset: the examples.
        unseen: a class to leave out, another data set or a file; empty for none.
    """
    if not unseen:
        return dataset, None
    if not unseen.isdecimal():
        other = data.read_table(unseen) if data.is_table(unseen) else data.load(unseen)
        rest = max(0, MOST_UNSEEN - len(other.test))
        x = np.concatenate([other.test.x, other.train.x[:rest]])[:MOST_UNSEEN]
        if x.shape[1:] != dataset.train.x.shape[1:]:
            raise InputError(
                f"unseen={unseen!r} has inputs of shape {x.shape[1:]}, {dataset.name} of "
                f"{dataset.train.x.shape[1:]}: choose data of the same shape, or the number of a "
                "class to leave out"
            )
        return dataset, (other.name, x)
    number, classes = int(unseen), dataset.num_classes
    if classes is None or number >= classes:
        known = f"0..{classes - 1}" if classes else "none, its targets are real numbers"
        raise InputError(
            f"unseen={unseen!r} is no class of {dataset.name} (it has {known}): choose one, or "
            "another data set"
        )
    inputs = [part.x[part.y == number] for part in (dataset.test, dataset.train)]
    train, test = (part.take(part.y != number) for part in (dataset.train, dataset.test))
    name = f"class {number}, which no client has"
    return replace(dataset, train=train, test=test), (name, np.concatenate(inputs)[:MOST_UNSEEN])


def withhold(dataset: Dataset, share: float, seed: int) -> tuple[Dataset, torch.Tensor | None]:
    """Return the data without a share of the training examples, and the inputs of that share.

    The inputs go to the server, without labels.
    """
    if share == 0:
        return dataset, None
    order = np.random.default_rng([seed, 0x5E2]).permutation(len(dataset.train))
    count = max(1, round(share * len(order)))
    rest, server = (dataset.train.take(np.sort(rows)) for rows in (order[count:], order[:count]))
    return replace(dataset, train=rest), torch.from_numpy(server.x)


def model_of(settings: Settings, clients: Clients) -> Model:
    """Return the network of a run, with its first weights."""
    name = settings.model.name or nets.DEFAULT.get(clients.name, "mlp")
    targets = clients.train.y.shape[1] if clients.train.y.ndim > 1 else 1
    again: dict[str, Any] = {
        "name": name,
        "num_outputs": clients.num_classes or 2 * targets,
        "options": dict(settings.options.get("model", {})),
    }
    shape, seed = list(clients.train.x.shape[1:]), derive(settings.seed, "model")
    module = make_model(name, shape, again["num_outputs"], again["options"], seed)
    return Model(module, settings.model.head or None, again)


def algorithm_of(settings: Settings) -> Algorithm:
    """Return the algorithm of a run; refuse one that its privacy or its defence does not suit."""
    algorithm = build(settings.algorithm, settings.options.get(settings.algorithm, {}))
    privacy = settings.privacy
    if privacy.noise:
        Private(algorithm, Mechanism(privacy.noise, privacy.clip, privacy.delta, 1, 1))
    defended(algorithm, Defence.named(settings.defence))
    return algorithm


def train(
    settings: Settings,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    dataset: Dataset | None = None,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    flags: Mapping[str, Any] | None = None,
    say: Say = silent,
) -> Run:
    """Train the run that the settings describe.

    Args:
        settings: of the run.
        out, resume, progress, callbacks: as in `Keep`.
        dataset: the examples, where they are loaded already.
        flags: of the command line, as in `make_population`.
        say: is told how the data are understood, and where the run was finished before.
    """
    algorithm = algorithm_of(settings)
    dataset = dataset or read_dataset(settings)
    population = make_population(settings, dataset, flags)
    say(understood(settings, dataset, population))
    model = model_of(settings, population.clients)
    keep = Keep(out, resume, progress, callbacks)
    return simulate(settings, algorithm, model, population, keep, say)


def understood(settings: Settings, dataset: Dataset, population: Population) -> str:
    """Return how the data are understood, in a line or two.

    Of a file of the user's own it says what was decided without it.
    """
    clients, sizes = population.clients, population.clients.sizes
    count = cohort_size(len(clients), settings.training.fraction)
    holdout = population.holdout
    novel = f", {len(holdout)} more that never train" if holdout is not None else ""
    classes = clients.num_classes
    kind = f"{classes} classes" if classes is not None else "real targets"
    text = (
        f"{dataset.name}: {len(clients)} clients with {sizes.min()} to {sizes.max()} training "
        f"examples, {kind}; {count} of them a round{novel}"
    )
    if not settings.data.file:
        return text
    suspect_targets(dataset.train.y)
    if dataset.train.client is None and not settings.data.partition:
        text += (
            "\nthe file names no clients (`client`): these are simulated, each with some of the "
            "classes (--partition)"
        )
    if dataset.drawn:
        text += (
            "\nthe file does not say which rows are for testing (`split`): "
            f"{dataset.drawn:.0%} of each client's were drawn"
        )
    return text
