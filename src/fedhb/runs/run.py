"""A trained federation: it predicts, personalises itself, and evaluates itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhb.algorithms import Algorithm, Personalised, Plan, Problem
from fedhb.clients.clients import SPLITS, Clients, Share, check_finite, targets
from fedhb.engine.loop import State
from fedhb.engine.client_memory import ClientStore
from fedhb.errors import InputError
from fedhb.evaluation.evaluate import evaluate, predict_in_blocks
from fedhb.evaluation.ledger import Ledger
from fedhb.evaluation.observer import Observer
from fedhb.seeding import Randomness
from fedhb.answers.admission import check_personal


@dataclass(frozen=True, repr=False)
class Personal:
    """A personalised model: the posterior of one client."""

    posterior: Personalised
    input_shape: tuple[int, ...]

    def __repr__(self) -> str:
        return f"<a personal model of inputs {' x '.join(map(str, self.input_shape))}>"

    def predict(self, x: np.ndarray | Tensor) -> np.ndarray:
        """Class probabilities [n, classes], or mean and variance [n, 2, q], for inputs in the units they were trained in."""
        inputs = as_inputs(x, self.input_shape).to(self.posterior.problem.network.device)
        with one_thread():
            return predict_in_blocks(
                self.posterior.problem, lambda part: self.posterior.predict(part.unsqueeze(0))[0], inputs
            ).numpy()


@dataclass(repr=False)
class Run:
    """A trained federation.

    Attributes:
        problem: network, likelihood and federation.
        algorithm: with its settings.
        state: the server's arrays, the clients' memories, bytes and seconds.
        seed: of the run.
        personal_plan: how it personalises.
        input_shape: of one example.
        result: what result.json holds.
        records: one per round, as in rounds.jsonl.
        augment: how its clients' inputs are varied while they train and personalise, as in `Clients`.
        watch: told how many of how many clients are evaluated, while the run is.
    """

    problem: Problem
    algorithm: Algorithm
    state: State
    seed: int
    personal_plan: Plan
    input_shape: tuple[int, ...]
    result: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    augment: str | None = None
    watch: Callable[[int, int], None] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        federation = self.problem.federation
        return f"<{self.algorithm.name} after {self.state.done} rounds with {federation.num_clients} clients, seed {self.seed}>"

    @property
    def rng(self) -> Randomness:
        """The randomness of everything after training."""
        return Randomness(self.seed, self.state.done + 1)

    def predict(self, x: np.ndarray | Tensor) -> np.ndarray:
        """The posterior predictive p(y | x, D_1..N) for inputs in the units they were trained in.

        Returns:
            Class probabilities [n, classes]; for regression mean and variance [n, 2, q].
        """
        inputs = as_inputs(x, self.input_shape).to(self.problem.network.device)
        with one_thread():
            return predict_in_blocks(
                self.problem,
                lambda part: self.algorithm.predict(self.problem, self.state.server, part, self.rng),
                inputs,
            ).numpy()

    def personalise(
        self,
        x: np.ndarray | Tensor,
        y: np.ndarray | Tensor,
        *,
        epochs: int | None = None,
        lr: float | None = None,
        client: int = -2,
    ) -> Personal:
        """A new client's own posterior, from its examples, found as the run's evaluation finds those of novel clients.

        `epochs` and `lr` default to the run's; `client` seeds its batches.
        """
        inputs = as_inputs(x, self.input_shape)
        labels = self.check_targets(y)
        if len(labels) != len(inputs) or not len(inputs):
            raise InputError(f"{len(inputs)} inputs and {len(labels)} targets: give one target per input, and at least one")
        share = Share.of(inputs, targets(labels), [np.arange(len(inputs))])
        classes = self.problem.federation.num_classes
        clients = Clients(ids=torch.tensor([client]), train=share, num_classes=classes, augment=self.augment)
        if len(inputs) == 1 and self.problem.network.has_batch_norm:
            raise InputError("a single example, and batch norm cannot train on one: give two at least, or predict as it is")
        plan = self._plan(epochs, lr)
        clients = clients.to(str(self.problem.network.device))
        with one_thread():
            memory = ClientStore().load(self.algorithm, self.problem, clients)
            posterior = self.algorithm.personalise(self.problem, self.state.server, clients, memory, plan, self.rng)
        check_personal(posterior.theta, [client])
        return Personal(posterior, self.input_shape)

    def check_targets(self, y: np.ndarray | Tensor) -> np.ndarray:
        """Targets as they were in training, or an error that says what they should be."""
        labels = np.asarray(y)
        classes = self.problem.federation.num_classes
        if not len(labels):
            return labels
        if classes is not None:
            whole = labels.ndim == 1 and labels.dtype.kind in "iub"
            if not whole or labels.min() < 0 or labels.max() >= classes:
                found = f"lie in {labels.min()}..{labels.max()}" if whole else f"are {labels.dtype} of shape {labels.shape}"
                raise InputError(f"labels {found}: give one whole number in 0..{classes - 1} per input, as in training")
        else:
            count = getattr(self.problem.likelihood, "num_targets", None)
            if count is not None and labels.shape[1:] not in ([(), (1,)] if count == 1 else [(count,)]):
                raise InputError(f"targets have shape {labels.shape}: give {count} per input, as in training")
            check_finite(labels, "targets")
            labels = labels.astype(np.float32)
        return labels

    def evaluate(
        self,
        clients: Clients,
        split: str = "test",
        *,
        epochs: int | None = None,
        lr: float | None = None,
        observer: Observer | None = None,
        ledger: Ledger | None = None,
    ) -> dict[str, Any]:
        """Global and personalised metrics on these clients' examples of a split, as means and per client.

        A client with the id of one that trained goes on with what that one remembers: give new clients ids of their own.
        `observer` is told of every prediction; a ledger keeps what is done, so that another process may go on.
        """
        if not isinstance(clients, Clients):
            raise InputError(f"clients is a {type(clients).__name__}: give fedhb.Clients")
        classes = self.problem.federation.num_classes
        shape, theirs = tuple(clients.train.x.shape[1:]), clients.num_classes
        if shape != tuple(self.input_shape) or (theirs is None) != (classes is None) or (theirs or 0) > (classes or 0):
            raise InputError(
                f"the clients have inputs of shape {shape} and {theirs or 'no'} classes: give some as in training, with "
                f"{tuple(self.input_shape)} and {classes or 'none'}"
            )
        if split not in SPLITS or not clients.has(split):
            raise InputError(f"split={split!r}: give one that the clients have, of {', '.join(SPLITS)}")
        clients, plan, server = clients.to(str(self.problem.network.device)), self._plan(epochs, lr), self.state.server
        seen: Any = {"observer": observer, "watch": self.watch, "ledger": ledger}
        with one_thread():
            return evaluate(self.problem, self.algorithm, server, clients, self.state.store, plan, self.rng, split, **seen)

    def _plan(self, epochs: int | None, lr: float | None) -> Plan:
        """How to personalise: as the run does, unless told otherwise."""
        given: dict[str, Any] = {key: value for key, value in (("epochs", epochs), ("lr", lr)) if value is not None}
        for key, value in given.items():
            if not 0 < value < float("inf") or (key == "epochs" and value != int(value)):
                raise InputError(f"{key}={value}: give a positive {'whole ' if key == 'epochs' else ''}number")
        if epochs is not None:
            given["epochs"] = int(epochs)
        return dataclasses.replace(self.personal_plan, **given)


def as_inputs(x: np.ndarray | Tensor, shape: tuple[int, ...]) -> Tensor:
    """Inputs as a tensor, after a check of shape and values."""
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        x = x if x.dtype == torch.uint8 else x.float()  # numpy lacks some of torch's types
    array = np.asarray(x)
    if array.shape[1:] != shape:
        raise InputError(f"inputs have shape {array.shape}: give [n, {', '.join(map(str, shape))}], as in training")
    check_finite(array, "inputs")
    array = np.ascontiguousarray(array) if array.dtype == np.uint8 else array.astype(np.float32)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread per process: on busy machines two are often slower than one, and sums then do not depend on the core count."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
