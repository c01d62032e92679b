"""The data of a node: a partition of a named data set, a file, or the result of a Python function.

The owner decides, in the node's config; a run cannot make a node read another file.

    partition-id=2                           its id; its partition of the run's named data set
    partition-id=2 data="/data/mine.npz"     the owner's own file, all of it
    partition-id=2 data="pkg.mod:factory"    factory(client_id, settings) returns
                                             ((x, y), (x_test, y_test) or None)
    partition-id=2 shared="/data/all.npz"    its partition of a file that several nodes can read
    holdout=true                             with data: it never trains and is evaluated as novel
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhb.clients.clients import Clients
from fedhb.data import is_table, read_table
from fedhb.errors import InputError
from fedhb.runs.from_settings import make_clients
from fedhb.runs.settings import Settings
from fedhb.user_code import imported, takes


@dataclass(frozen=True)
class Node:
    """The client of a node.

    Attributes:
        client: its data.
        trains: whether it trains; else it is evaluated as a novel client.
        own: whether the data are its owner's, and nobody else knows how they are scaled.
    """

    client: Clients
    trains: bool
    own: bool

    @property
    def id(self) -> int:
        """The client's id."""
        return int(self.client.ids[0])


def client_id(config: Mapping[str, Any]) -> int:
    """Return the partition id of a node's config."""
    value = config.get("partition-id")
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InputError(
            f"the node's partition-id is {value!r}: start it with --node-config "
            "'partition-id=0', a number of its own"
        )
    return value


def load(settings: Settings, config: Mapping[str, Any]) -> Node:
    """Return the client of a node with this config, in a run with these settings."""
    number, source = client_id(config), config.get("data")
    if source is None:
        return _partition(settings, number, config.get("shared"))
    client = (
        _from_function(str(source), number, settings)
        if _is_function(str(source))
        else _from_file(Path(str(source)), number)
    )
    if settings.data.max_examples:
        client = client.with_at_most(settings.data.max_examples, settings.seed)
    if settings.data.validation:
        client = client.with_validation(settings.data.validation, settings.seed)
    return Node(client, trains=not config.get("holdout", False), own=True)


def _partition(settings: Settings, number: int, shared: Any) -> Node:
    """Return this client's partition, cut as the simulator cuts it."""
    file = settings.data.file
    if file and shared is None:
        raise InputError(
            f"the run's settings name the file {file}, which is not this node's: give the node "
            "its own, --node-config 'data=\"FILE.npz\"', or one that nodes share, "
            "'shared=\"FILE.npz\"'"
        )
    file = str(shared) if shared is not None else ""
    clients, holdout = make_clients(settings.change(data=file))
    for group, trains in ((clients, True), (holdout, False)):
        if group is not None and number in group.ids.tolist():
            position = group.ids.tolist().index(number)
            return Node(group.select([position]), trains, own=False)
    count = len(clients) + (len(holdout) if holdout is not None else 0)
    raise InputError(
        f"partition-id={number}, but the data are cut into {count} partitions: give a number from "
        f"0 to {count - 1}"
    )


def _is_function(source: str) -> bool:
    return ":" in source and not is_table(source)


def _from_file(path: Path, number: int) -> Clients:
    dataset = read_table(path)
    rows = [np.arange(len(dataset.train))], [np.arange(len(dataset.test))]
    return replace(Clients.from_rows(dataset, *rows), ids=torch.tensor([number]), files={})


def _from_function(source: str, number: int, settings: Settings) -> Clients:
    factory = imported("data", source)
    takes(f"data={source!r}", factory, number, settings)
    parts = factory(number, settings)
    try:
        train, test = parts
        (x, y), held = train, None if test is None else [tuple(test)]
    except (TypeError, ValueError) as error:
        raise InputError(
            f"data={source!r} must return ((x, y), (x_test, y_test) or None): {error}"
        ) from None
    with warnings.catch_warnings():
        # one client may lack a class that others have
        warnings.filterwarnings("ignore", "no training example has class")
        return Clients.from_arrays([(x, y)], held, ids=[number])
