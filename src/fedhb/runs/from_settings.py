"""From settings to clients, a model and a run; and from several runs to one comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedhb import data
from fedhb.algorithms import Algorithm, build
from fedhb.answers.defence import Defence, defended
from fedhb.answers.privacy import Privacy, Private
from fedhb.clients import partition
from fedhb.clients.checks import suspect_targets
from fedhb.clients.clients import Clients
from fedhb.data.dataset import Dataset
from fedhb.engine.loop import Callback
from fedhb.engine.schedule import cohort_size
from fedhb.errors import InputError
from fedhb.network import nets
from fedhb.network.factory import make_model
from fedhb.runs.fit import fit
from fedhb.runs.run import Run
from fedhb.runs.settings import Settings, check_partition
from fedhb.seeding import derive

MOST = 2000
"""Inputs that are unseen, at most."""


def make_clients(
    settings: Settings, dataset: Dataset | None = None, flags: Mapping[str, Any] | None = None
) -> tuple[Clients, Clients | None]:
    """The clients that train and, where asked for, novel ones that never do.

    Of the `flags` of a command line, those are refused that the partition does not read: often the data alone say which it is.
    """
    dataset = dataset or (data.read_npz(settings.data) if settings.data else data.load(settings.dataset))
    dataset, _ = leave_out(dataset, settings.unseen)
    kind = settings.partition or ("natural" if dataset.train.client is not None else "groups" if dataset.groups else "shards")
    check_partition(kind, flags or {})
    if dataset.groups and (kind != "groups" or settings.server_share):
        wrong = f"partition={kind!r}" if kind != "groups" else f"server_share={settings.server_share}"
        raise InputError(f"{wrong}, but {dataset.name} has groups, whose partition holds test examples back: leave it out")
    dataset, server_inputs = withhold(dataset, settings.server_share, settings.seed)
    if not settings.partition and dataset.num_classes is None and kind == "shards":
        raise InputError(
            f"{dataset.name} has real targets and names no clients: give partition='iid', or a `client` array in the file"
        )
    holdout = None
    if kind == "groups":
        clients, holdout = partition.groups(
            dataset,
            settings.num_clients,
            settings.holdout_clients,
            settings.shards_per_client,
            settings.seed,
            settings.group_split,
        )
    elif kind == "shards":
        clients = partition.shards(dataset, settings.num_clients, settings.shards_per_client, settings.seed)
    elif kind == "dirichlet":
        clients = partition.dirichlet(dataset, settings.num_clients, settings.alpha, settings.seed)
    elif kind == "iid":
        clients = partition.iid(dataset, settings.num_clients, settings.seed)
    else:
        clients = partition.natural(dataset)
    clients = replace(clients, server_inputs=server_inputs)
    if settings.max_examples:
        clients = clients.with_at_most(settings.max_examples, settings.seed)
        holdout = holdout.with_at_most(settings.max_examples, settings.seed) if holdout else None
    if settings.holdout_clients and kind != "groups":
        clients, holdout = clients.hold_out(settings.holdout_clients, settings.seed)
    if settings.validation:
        clients = clients.with_validation(settings.validation, settings.seed)
        holdout = holdout.with_validation(settings.validation, settings.seed) if holdout else None
    return clients, holdout


def leave_out(dataset: Dataset, unseen: str) -> tuple[Dataset, tuple[str, np.ndarray] | None]:
    """What predictions should be unsure of, and the data without it where it is one of their classes."""
    if not unseen:
        return dataset, None
    if not unseen.isdecimal():
        other = data.read_npz(unseen) if unseen.endswith(".npz") else data.load(unseen)
        x = np.concatenate([other.test.x, other.train.x[: max(0, MOST - len(other.test))]])[:MOST]
        if x.shape[1:] != dataset.train.x.shape[1:]:
            raise InputError(
                f"unseen={unseen!r} has inputs of shape {x.shape[1:]}, {dataset.name} of {dataset.train.x.shape[1:]}: "
                "choose data of the same shape, or the number of a class to leave out"
            )
        return dataset, (other.name, x)
    number = int(unseen)
    if dataset.num_classes is None or number >= dataset.num_classes:
        known = f"0..{dataset.num_classes - 1}" if dataset.num_classes else "none, its targets are real numbers"
        raise InputError(f"unseen={unseen!r} is no class of {dataset.name} (it has {known}): choose one, or another data set")
    strange = [part.x[part.y == number] for part in (dataset.test, dataset.train)]

    train, test = (part.take(part.y != number) for part in (dataset.train, dataset.test))
    rest = replace(dataset, train=train, test=test)
    return rest, (f"class {number}, which no client has", np.concatenate(strange)[:MOST])


def withhold(dataset: Dataset, share: float, seed: int) -> tuple[Dataset, torch.Tensor | None]:
    """Take a share of the training examples away from the clients: their inputs, without labels, are the server's."""
    if share == 0:
        return dataset, None
    order = np.random.default_rng([seed, 0x5E2]).permutation(len(dataset.train))
    count = max(1, round(share * len(order)))
    rest, server = (dataset.train.take(np.sort(rows)) for rows in (order[count:], order[:count]))
    return replace(dataset, train=rest), torch.from_numpy(server.x)


def model_of(settings: Settings, clients: Clients) -> tuple[nn.Module, dict[str, Any]]:
    """The network of a run, with its first weights, and how it is made again."""
    name = settings.model or nets.DEFAULT.get(clients.name, "mlp")
    targets = clients.train.y.shape[1] if clients.train.y.ndim > 1 else 1
    spec: dict[str, Any] = {
        "name": name,
        "num_outputs": clients.num_classes or 2 * targets,
        "options": dict(settings.options.get("model", {})),
    }
    shape = list(clients.train.x.shape[1:])
    return make_model(name, shape, spec["num_outputs"], spec["options"], derive(settings.seed, "model")), spec


def fit_options(settings: Settings) -> dict[str, Any]:
    """What `fit` takes of the settings as they are."""
    names = "rounds fraction local_epochs batch_size lr momentum schedule personal_lr personal_epochs seed batch_norm evaluate_on"
    more = "checkpoint_every device workers dp_noise dp_clip dp_delta defence"
    found = {name: getattr(settings, name) for name in (*names.split(), *more.split())}
    return found | {"head": settings.head or None}


def algorithm_of(settings: Settings) -> Algorithm:
    """The algorithm of these settings, which must go with their privacy and their defence: nothing is trained to find out."""
    algorithm = build(settings.algorithm, settings.options.get(settings.algorithm, {}))
    if settings.dp_noise:
        Private(algorithm, Privacy(settings.dp_noise, settings.dp_clip, settings.dp_delta, 1, 1))
    defended(algorithm, Defence.named(settings.defence))
    return algorithm


def train(
    settings: Settings,
    out: Path | None,
    resume: bool = False,
    dataset: Dataset | None = None,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    flags: Mapping[str, Any] | None = None,
    about: Callable[[str], None] = lambda text: None,
) -> Run:
    """One run by its settings; `flags` as in `make_clients`. `about` is told what the data were taken for."""
    algorithm = algorithm_of(settings)
    dataset = dataset or (data.read_npz(settings.data) if settings.data else data.load(settings.dataset))
    unseen = leave_out(dataset, settings.unseen)[1]
    clients, holdout = make_clients(settings, dataset, flags)
    about(understood(settings, dataset, clients, holdout))
    model, spec = model_of(settings, clients)
    return fit(
        model,
        clients,
        algorithm,
        **fit_options(settings),
        holdout=holdout,
        unseen=unseen,
        out=out,
        resume=resume,
        progress=progress,
        callbacks=callbacks,
        settings_toml=settings.to_toml,
        rebuild=spec,
    )


def understood(settings: Settings, dataset: Dataset, clients: Clients, holdout: Clients | None) -> str:
    """What the data were taken for, in a line or two; with whatever was made up where they are the user's own."""
    count, sizes = cohort_size(len(clients), settings.fraction), clients.sizes
    novel = f", {len(holdout)} more that never train" if holdout is not None else ""
    kind = f"{clients.num_classes} classes" if clients.num_classes is not None else "real targets"
    text = f"{dataset.name}: {len(clients)} clients with {sizes.min()} to {sizes.max()} training examples, {kind}"
    text += f"; {count} of them a round{novel}"
    if not settings.data:
        return text
    suspect_targets(dataset.train.y)
    if dataset.train.client is None and not settings.partition:
        text += "\nthe file names no clients (`client`): these are simulated, each with some of the classes (--partition)"
    if dataset.drawn:
        text += f"\nthe file does not say which rows are for testing (`split`): {dataset.drawn:.0%} of each client's were drawn"
    return text






