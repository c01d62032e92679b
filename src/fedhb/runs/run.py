"""A trained federation: it predicts, personalises itself, and evaluates itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhb.algorithms import Algorithm, Personalised, Plan, Problem
from fedhb.answers.admission import check_personal
from fedhb.clients.clients import SPLITS, Clients, Share, check_finite, targets
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.loop import State
from fedhb.errors import InputError
from fedhb.evaluation.evaluate import Evaluation, predict_in_blocks
from fedhb.seeding import Randomness


@dataclass(frozen=True, repr=False)
class Personal:
    """A personalised model: the posterior of one client."""

    posterior: Personalised
    input_shape: tuple[int, ...]

    def __repr__(self) -> str:
        return f"<a personal model of inputs {' x '.join(map(str, self.input_shape))}>"

    def predict(self, x: np.ndarray | Tensor) -> np.ndarray:
        """Return the predictions for inputs in the units they were trained in.

        Returns:
            Class probabilities [n, classes]; for regression mean and variance [n, 2, q].
        """
        problem = self.posterior.problem
        inputs = as_inputs(x, self.input_shape).to(problem.network.device)
        with one_thread():
            return predict_in_blocks(
                problem, lambda part: self.posterior.predict(part.unsqueeze(0))[0], inputs
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
        result: the content of result.json.
        records: one per round, as in rounds.jsonl.
        augment: how its clients vary their inputs in training, as in `Clients`.
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

    def __repr__(self) -> str:
        federation = self.problem.federation
        return (
            f"<{self.algorithm.name} after {self.state.done} rounds with "
            f"{federation.num_clients} clients, seed {self.seed}>"
        )

    @property
    def rng(self) -> Randomness:
        """The randomness of everything after training."""
        return Randomness(self.seed, self.state.done + 1)

    def predict(self, x: np.ndarray | Tensor) -> np.ndarray:
        """Return the posterior predictive p(y | x, D_1..N) for inputs in the units of training.

        Returns:
            Class probabilities [n, classes]; for regression mean and variance [n, 2, q].
        """
        inputs = as_inputs(x, self.input_shape).to(self.problem.network.device)
        with one_thread():
            return predict_in_blocks(
                self.problem,
                lambda part: self.algorithm.predict(
                    self.problem, self.state.server, part, self.rng
                ),
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
        """Return a new client's posterior, found from its examples as in the run's evaluation.

        Args:
            x, y: the client's examples.
            epochs, lr: default to those of the run.
            client: a number that seeds its batches.
        """
        inputs = as_inputs(x, self.input_shape)
        labels = self.check_targets(y)
        if len(labels) != len(inputs) or not len(inputs):
            raise InputError(
                f"{len(inputs)} inputs and {len(labels)} targets: give one target per input, and "
                "at least one"
            )
        if len(inputs) == 1 and self.problem.network.has_batch_norm:
            raise InputError(
                "a single example, and batch norm cannot train on one: give two at least, or "
                "predict as it is"
            )
        share = Share.of(inputs, targets(labels), [np.arange(len(inputs))])
        clients = Clients(
            ids=torch.tensor([client]),
            train=share,
            num_classes=self.problem.federation.num_classes,
            augment=self.augment,
        ).to(str(self.problem.network.device))
        plan = self._plan(epochs, lr)
        with one_thread():
            memory = ClientStore().load(self.algorithm, self.problem, clients)
            posterior = self.algorithm.personalise(
                self.problem, self.state.server, clients, memory, plan, self.rng
            )
        check_personal(posterior.theta, [client])
        return Personal(posterior, self.input_shape)

    def check_targets(self, y: np.ndarray | Tensor) -> np.ndarray:
        """Return targets as in training; refuse others with words that say how they should be."""
        labels, classes = np.asarray(y), self.problem.federation.num_classes
        if not len(labels):
            return labels
        if classes is not None:
            whole = labels.ndim == 1 and labels.dtype.kind in "iub"
            if not whole or labels.min() < 0 or labels.max() >= classes:
                wrong = f"are {labels.dtype} of shape {labels.shape}"
                wrong = f"lie in {labels.min()}..{labels.max()}" if whole else wrong
                raise InputError(
                    f"labels {wrong}: give one whole number in 0..{classes - 1} per input, as in "
                    "training"
                )
            return labels
        count = getattr(self.problem.likelihood, "num_targets", None)
        shapes = [(), (1,)] if count == 1 else [(count,)]
        if count is not None and labels.shape[1:] not in shapes:
            raise InputError(
                f"targets have shape {labels.shape}: give {count} per input, as in training"
            )
        check_finite(labels, "targets")
        return labels.astype(np.float32)

    def evaluate(
        self,
        clients: Clients,
        split: str = "test",
        *,
        epochs: int | None = None,
        lr: float | None = None,
    ) -> dict[str, Any]:
        """Return global and personalised metrics on these clients' examples of a split.

        They are means over clients, and the main metric of every client. A client with the id of
        one that trained goes on with the memory of that one: give new clients ids of their own.

        Args:
            clients: whose examples are predicted.
            split: "train", "validation" or "test".
            epochs, lr: of personalisation; they default to those of the run.
        """
        if not isinstance(clients, Clients):
            raise InputError(f"clients is a {type(clients).__name__}: give fedhb.Clients")
        classes, given = self.problem.federation.num_classes, clients.num_classes
        shape, expected = tuple(clients.train.x.shape[1:]), tuple(self.input_shape)
        kinds = (given is None) == (classes is None)
        if shape != expected or not kinds or (given or 0) > (classes or 0):
            raise InputError(
                f"the clients have inputs of shape {shape} and {given or 'no'} classes: give some "
                f"as in training, with {expected} and {classes or 'none'}"
            )
        if split not in SPLITS or not clients.has(split):
            raise InputError(
                f"split={split!r}: give one that the clients have, of {', '.join(SPLITS)}"
            )
        evaluation = dataclasses.replace(self.evaluation(split), plan=self._plan(epochs, lr))
        with one_thread():
            return evaluation.results(clients.to(str(self.problem.network.device)))

    def evaluation(self, split: str) -> Evaluation:
        """Return the evaluation of this run on a split."""
        return Evaluation(
            self.problem, self.algorithm, self.state, self.personal_plan, self.rng, split
        )

    def _plan(self, epochs: int | None, lr: float | None) -> Plan:
        """Return how to personalise: as the run does, unless values are given."""
        plan = self.personal_plan
        if epochs is not None:
            if not 0 < epochs < float("inf") or epochs != int(epochs):
                raise InputError(f"epochs={epochs}: give a positive whole number")
            plan = dataclasses.replace(plan, epochs=int(epochs))
        if lr is not None:
            if not 0 < lr < float("inf"):
                raise InputError(f"lr={lr}: give a positive number")
            plan = dataclasses.replace(plan, lr=lr)
        return plan


def as_inputs(x: np.ndarray | Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return inputs as a tensor, after a check of shape and values."""
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        x = x if x.dtype == torch.uint8 else x.float()  # numpy lacks some of torch's types
    array = np.asarray(x)
    if array.shape[1:] != shape:
        raise InputError(
            f"inputs have shape {array.shape}: give [n, {', '.join(map(str, shape))}], as in "
            "training"
        )
    check_finite(array, "inputs")
    if array.dtype == np.uint8:
        array = np.ascontiguousarray(array)
    else:
        array = array.astype(np.float32)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread in this process while this lasts.

    On busy machines two are often slower than one, and sums then do not depend on the number of
    cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
