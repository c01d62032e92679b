"""The census: which clients there are, and what they hold.

Nodes answer the server's first question with `Facts`: sizes, shapes, and the moments of their data.
The server makes a `Census` of them: N, |D|, the classes, and how inputs (and real targets) are
scaled. Moments are (count, mean, sum of squares around the mean), which combine without loss; no
agreement is needed before. Partitions of a named data set come with the data set's own scaling, as
in the simulator.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedhb.clients.clients import Clients, Share
from fedhb.clients.scaling import Scaling
from fedhb.errors import InputError
from fedhb.flower.node import Node
from fedhb.likelihood import PerTarget, per_target

Values = tuple[float, ...]
MOST_NUMBERS = 2**40
"""The most examples of a client and numbers of an input: more is an error or an attack."""


@dataclass(frozen=True)
class Moments:
    """The count, mean and sum of squared distances to it, per feature, channel or target."""

    count: int
    mean: Values
    scatter: Values

    @classmethod
    def of(cls, values: np.ndarray, axes: tuple[int, ...]) -> Moments:
        """Return the moments of an array over these axes."""
        count = math.prod(values.shape[a] for a in axes)
        mean, variance = (
            values.mean(axis=axes, dtype=np.float64),
            values.var(axis=axes, dtype=np.float64),
        )
        return cls(
            count, tuple(np.ravel(mean).tolist()), tuple(np.ravel(variance * count).tolist())
        )

    def __add__(self, other: Moments) -> Moments:
        """Return the moments of both together (Chan, Golub and LeVeque)."""
        count = self.count + other.count
        gap = np.array(other.mean) - np.array(self.mean)
        mean = np.array(self.mean) + gap * (other.count / count)
        scatter = (
            np.array(self.scatter)
            + np.array(other.scatter)
            + gap**2 * (self.count * other.count / count)
        )
        return Moments(count, tuple(mean.tolist()), tuple(scatter.tolist()))


@dataclass(frozen=True)
class Facts:
    """The facts that one node reports of itself.

    `num_targets` is 0 for labels; `inputs` are None where a data set gives the scaling.
    """

    client: int
    trains: bool
    examples: int
    input_shape: tuple[int, ...]
    num_targets: int
    num_classes: int
    dataset: str
    files: Mapping[str, str]
    name: str
    augment: str
    scaling: tuple[Values, Values] | None
    inputs: Moments | None
    targets: Moments | None

    @classmethod
    def of(cls, node: Node) -> Facts:
        """Return the facts of a node."""
        client = node.client
        (x, y), labels = client.train.examples(0), client.num_classes is not None
        table = x.numpy()
        axes = {2: (0,), 4: (0, 2, 3)}.get(table.ndim, tuple(range(table.ndim)))  # as Scaling.fit
        scaling = client.scaling
        given = (tuple(scaling.mean.flatten().tolist()), tuple(scaling.std.flatten().tolist()))
        return cls(
            client=node.id,
            trains=node.trains,
            examples=len(y),
            input_shape=tuple(x.shape[1:]),
            num_targets=0 if labels else (y.shape[1] if y.ndim > 1 else 1),
            num_classes=client.num_classes or 0,
            dataset="" if node.own else client.name,
            files={} if node.own else dict(client.files),
            name="" if node.own or client.names is None else client.names[0],
            augment=client.augment or "",
            scaling=None if node.own else given,
            inputs=Moments.of(table, axes) if node.own else None,
            targets=None if labels else Moments.of(y.numpy(), (0,)),
        )

    def to_json(self) -> str:
        """Return this as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Facts:
        """Return the facts in a node's text; raise ValueError, which says what is wrong with it."""
        try:
            raw = json.loads(text)
            if not isinstance(raw, dict) or raw.keys() != {f.name for f in dataclasses.fields(cls)}:
                raise ValueError("not the facts of a node")
            for key in ("client", "examples", "num_targets", "num_classes"):
                _whole(key, raw[key])
            for key in ("dataset", "name", "augment"):
                if not isinstance(raw[key], str) or len(raw[key]) > 200:
                    raise ValueError(f"{key} is not a short text")
            shape = tuple(_whole("input_shape", n) for n in raw["input_shape"])
            if raw["examples"] < 1 or not shape or math.prod(shape) > MOST_NUMBERS:
                raise ValueError(f"{raw['examples']} examples of shape {shape}")
            if not isinstance(raw["trains"], bool) or (raw["num_targets"] == 0) == (
                raw["num_classes"] == 0
            ):
                raise ValueError("neither labels nor real targets")
            given = (
                None
                if raw["scaling"] is None
                else (_values(raw["scaling"][0]), _values(raw["scaling"][1]))
            )
            files = {str(k): str(v) for k, v in dict(raw["files"]).items()}
            inputs, targets = (
                None if raw[key] is None else _moments(raw[key]) for key in ("inputs", "targets")
            )
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"not the facts of a node ({error})") from None
        if (given is None) == (inputs is None) or (targets is None) != (raw["num_targets"] == 0):
            raise ValueError("no moments of the data")
        if targets is not None and len(targets.mean) != raw["num_targets"]:
            raise ValueError(
                f"moments of {len(targets.mean)} of {raw['num_targets']} targets: install the "
                "server's version of fedhb"
            )
        return cls(
            **raw
            | {
                "input_shape": shape,
                "scaling": given,
                "inputs": inputs,
                "targets": targets,
                "files": files,
            }
        )


def _whole(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_NUMBERS:
        raise ValueError(f"{key}={value!r} is not a count")
    return value


def _values(values: Any) -> Values:
    numbers = tuple(float(v) for v in values)
    if not all(map(math.isfinite, numbers)):
        raise ValueError("moments that are not finite")
    return numbers


def _moments(raw: Any) -> Moments:
    count, mean = _whole("count", raw["count"]), _values(raw["mean"])
    scatter = _values(raw["scatter"])
    if count < 1 or len(mean) != len(scatter) or min(scatter, default=0.0) < 0:
        raise ValueError("moments of nothing")
    return Moments(count, mean, scatter)


@dataclass(frozen=True)
class Census:
    """The server's knowledge of its clients, of which every node makes the same problem."""

    clients: tuple[int, ...]
    holdout: tuple[int, ...]
    names: tuple[str, ...] | None
    num_examples: int
    input_shape: tuple[int, ...]
    num_targets: int
    num_classes: int
    dataset: str
    files: Mapping[str, str]
    augment: str
    scaling: tuple[Values, Values]
    targets: tuple[PerTarget, PerTarget]
    """Mean and deviation of each real target."""

    @classmethod
    def of(cls, facts: Sequence[Facts]) -> Census:
        """Return the census of all nodes; refuse nodes that do not fit together, and name two."""
        ordered = sorted(facts, key=lambda f: f.client)
        train = [f for f in ordered if f.trains]
        if not train:
            raise InputError("no node trains: start at least one without holdout=true")
        first = train[0]
        for other in ordered:
            for key in ("input_shape", "num_targets", "dataset", "augment"):
                if getattr(other, key) != getattr(first, key):
                    raise InputError(
                        f"client {first.client} has {key}={getattr(first, key)!r}, client "
                        f"{other.client} {getattr(other, key)!r}: make the nodes' data alike"
                    )
            if other.scaling != first.scaling or other.files != first.files:
                raise InputError(
                    f"clients {first.client} and {other.client} hold different versions of "
                    f"{first.dataset or 'data'}"
                )
        if first.scaling is not None:
            scaling = first.scaling
        else:
            inputs = _total([f.inputs for f in train if f.inputs is not None])
            deviation = [math.sqrt(s / inputs.count) for s in inputs.scatter]
            scaling = inputs.mean, tuple(d if d > 1e-12 else 1.0 for d in deviation)
        targets: tuple[PerTarget, PerTarget] = (0.0, 1.0)
        if first.num_targets:
            y = _total([f.targets for f in train if f.targets is not None])
            targets = (
                per_target(y.mean),
                per_target([math.sqrt(s / max(y.count - 1, 1)) for s in y.scatter]),
            )
        return cls(
            clients=tuple(f.client for f in train),
            holdout=tuple(f.client for f in ordered if not f.trains),
            names=tuple(f.name for f in ordered) if first.name else None,
            num_examples=sum(f.examples for f in train),
            input_shape=first.input_shape,
            num_targets=first.num_targets,
            num_classes=max(f.num_classes for f in ordered),
            dataset=first.dataset or "nodes",
            files=first.files,
            augment=first.augment,
            scaling=scaling,
            targets=targets,
        )

    def to_json(self) -> str:
        """Return this as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Census:
        """Return the census in the server's text."""
        raw = json.loads(text)
        for key in ("clients", "holdout", "input_shape"):
            raw[key] = tuple(raw[key])
        raw["targets"] = tuple(tuple(v) if isinstance(v, list) else v for v in raw["targets"])
        raw["names"] = None if raw["names"] is None else tuple(raw["names"])
        return cls(**raw | {"scaling": (tuple(raw["scaling"][0]), tuple(raw["scaling"][1]))})

    def input_scaling(self) -> Scaling:
        """Return how inputs are scaled."""
        count, dims = len(self.scaling[0]), len(self.input_shape)
        shape = (count, 1, 1) if dims == 3 else (count,) if dims == 1 else ()
        mean, std = (torch.tensor(v, dtype=torch.float32).reshape(shape) for v in self.scaling)
        return Scaling(mean, std)

    def specimen(self) -> Clients:
        """Return a client with two zeros, which stands for all where only shapes matter."""
        y = (
            torch.zeros(2, dtype=torch.int64)
            if self.num_classes
            else torch.zeros(2, self.num_targets)
        )
        share = Share(torch.zeros(2, *self.input_shape), y, torch.arange(2), torch.tensor([0, 2]))
        return Clients(
            ids=torch.tensor([self.clients[0]]),
            train=share,
            num_classes=self.num_classes or None,
            scaling=self.input_scaling(),
            name=self.dataset,
        )


def _total(parts: Sequence[Moments]) -> Moments:
    total = parts[0]
    for part in parts[1:]:
        if len(part.mean) != len(total.mean):
            raise InputError(
                "the nodes' moments have different lengths: make the nodes' data alike"
            )
        total += part
    return total
