"""The contract of an algorithm: the steps that the engines call, and what the algorithm declares.

An algorithm is a frozen dataclass. Its fields are its hyper-parameters, its methods the steps of
its pseudocode. It knows nothing of engines, files, devices or logging. All state is arrays:

    server     what the server keeps                       received   what it sends to clients
    memory     what a client keeps for its next round      answers    what clients send, [C, ...]
    summary    sums over the clients of a round, from which the server finds its new state

Generic code knows no algorithm's arrays by name. It reads the declaration: `answer` says what each
array of an answer is, `release` what a private run may give away, `phases` what happens before and
after the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from fedhb.clients.clients import Clients, Share
from fedhb.likelihood import Likelihood
from fedhb.network.vectors import Network, Weights
from fedhb.seeding import Randomness
from fedhb.settings_fields import setting
from fedhb.training.plan import Plan

Arrays = dict[str, Tensor]


# What every step is given ---------------------------------------------------------------------


@dataclass(frozen=True)
class Federation:
    """The server's knowledge of its clients.

    Attributes:
        num_clients: N.
        num_examples: |D|, the training examples of all clients together.
        num_classes: the number of classes, None for regression.
        server_inputs: unlabelled inputs that the server holds, or None.
    """

    num_clients: int
    num_examples: int
    num_classes: int | None = None
    server_inputs: Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """A network, a likelihood and a federation."""

    network: Network
    likelihood: Likelihood
    federation: Federation


# What an algorithm declares -------------------------------------------------------------------


@dataclass(frozen=True)
class Vector:
    """A vector of weights. Filters look at its difference to `relative_to`.

    Attributes:
        relative_to: the array that was sent down and that the vector belongs to; None where no
            array of this shape was sent: filters then take the median answer.
    """

    relative_to: str | None = None


@dataclass(frozen=True)
class Shares:
    """Non-negative numbers that sum to one, such as a client's weights of several networks."""


@dataclass(frozen=True)
class NonNegative:
    """Non-negative numbers, such as weights that a client draws."""


@dataclass(frozen=True)
class Measurements:
    """A few non-negative numbers, zero from a client that has not measured them in this round."""


@dataclass(frozen=True)
class Reported:
    """A number for the records, such as the mean loss. The model never depends on it."""


@dataclass(frozen=True)
class NumExamples:
    """The client's number of examples, |D_i|."""


@dataclass(frozen=True)
class ClientId:
    """The client's own id."""


Kind = Vector | Shares | NonNegative | Measurements | Reported | NumExamples | ClientId

REPORTS: Mapping[str, Kind] = {
    "loss": Reported(),
    "score": Reported(),
    "kl": Reported(),
    "examples": NumExamples(),
}
"""The arrays of every answer beside its vectors: mean loss and score on the client's own data,
the KL term of its objective where there is one, and its number of examples."""


@dataclass(frozen=True)
class Release:
    """How a private run releases an algorithm's sums (answers/privacy.py).

    Attributes:
        bound: the longest contribution of a client to the sums, for a clip C.
        withheld: sums that are not released. The algorithm gets zeros instead.
        clip_answers: whether a client's vectors are clipped to C before they are summarised; for
            sums of squares, which a clipped sum would make too large.
        repair: corrects sums that noise of this deviation has made invalid.
    """

    bound: Callable[[float], float] = field(default=lambda clip: clip)
    withheld: tuple[str, ...] = ()
    clip_answers: bool = False
    repair: Callable[[Arrays, float], Arrays] = field(default=lambda summary, deviation: summary)


def declared_release(algorithm: Any) -> Release | None:
    """Return the release that the algorithm's own class declares.

    A subclass does not inherit it, because its sums may be others.
    """
    release: Release | None = vars(type(algorithm)).get("release")
    return release


class Steps(Protocol):
    """The steps of a round or of a phase. C clients are a leading axis wherever clients appear."""

    answer: ClassVar[Mapping[str, Kind]]
    """The arrays of an answer by name. Those of one run may be fewer: a head that is not trained is
    not sent."""
    each: ClassVar[tuple[str, ...]]
    """The arrays of `broadcast` that differ between clients: they have a leading axis [C, ...]."""
    known: ClassVar[tuple[str, ...]]
    """The arrays of `broadcast` that need no sending, because client and server know them."""
    pools: ClassVar[bool]
    """Whether the cohort is one client with everybody's data (centralised training)."""
    sends: ClassVar[bool]
    """Whether anything travels between server and clients."""
    release: ClassVar[Release | None]
    """How private runs release the sums; None where they cannot; not inherited."""

    def broadcast(self, server: Arrays, ids: Sequence[int]) -> Arrays:
        """Return what the server sends to these clients."""
        ...

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """Train C clients (Alg. 1, step 3); return their answers [C, ...] and new memories."""
        ...

    def summarise(
        self, problem: Problem, received: Arrays, answers: Arrays, rng: Randomness
    ) -> Arrays:
        """Return additive statistics of C answers; those of several chunks add up in float64."""
        ...

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Return the server's new state, from sums over the round's clients (Alg. 1, step 5)."""
        ...

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """Return what the records say beside loss and score; `server` is the state before."""
        ...


@dataclass(frozen=True)
class Phase:
    """A short exchange before the first round or after the last.

    The engines, checkpoints, Flower, filters, privacy and byte counts treat it like rounds: each of
    its `times` asks a cohort once. The server's state and the clients' memories are the
    algorithm's own.

    Attributes:
        name: what records and messages call it.
        steps: what is sent down, what clients answer, and what the server makes of it.
        when: "before" or "after" the rounds.
        times: how often clients are asked.
        fraction: the share of the clients that is asked each time.
    """

    name: str
    steps: Steps
    when: Literal["before", "after"] = "before"
    times: int = 1
    fraction: float = 1.0


class Algorithm(Steps, Protocol):
    """The steps of an algorithm, and what it declares."""

    name: ClassVar[str]
    keeps: ClassVar[str]
    """The part of a model that clients keep, and predict with before they personalise; or ""."""
    training: ClassVar[Mapping[str, float]]
    """lr, momentum, personal_lr and personal_epochs of a run that is given none; not inherited."""

    @property
    def update(self) -> str:
        """The part of the network that is trained: body, or full (body and head)."""
        ...

    @property
    def phases(self) -> Sequence[Phase]:
        """The exchanges before and after the rounds."""
        ...

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """Return L_0 before the first round: the server's state."""
        ...

    def remember(self, problem: Problem, clients: Clients) -> Arrays:
        """Return the memory [C, ...] of clients that never took part."""
        ...

    def predict(
        self,
        problem: Problem,
        server: Arrays,
        x: Tensor,
        rng: Randomness,
        memory: Arrays | None = None,
    ) -> Tensor:
        """Return the global prediction for inputs x [n, ...]."""
        ...

    def personalise(
        self,
        problem: Problem,
        server: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> Personalised:
        """Return the personal posteriors v(theta) of C clients, from their own data."""
        ...

    def describe(self, problem: Problem, server: Arrays) -> dict[str, Any]:
        """Return what a report shows of the posterior: names, and plain numbers or lists."""
        ...

    def describe_personal(
        self, problem: Problem, server: Arrays, theta: Tensor
    ) -> Mapping[str, Tensor]:
        """Return what a report shows of each client, [C, ...], at its personal theta [C, d]."""
        ...

    def describe_examples(
        self, problem: Problem, server: Arrays, share: Share, most: int
    ) -> dict[str, Any]:
        """Return what a report shows of the clients' examples, of at most `most` of each client."""
        ...


# What algorithms inherit ----------------------------------------------------------------------


@dataclass(frozen=True)
class StepsBase:
    """The declarations and steps that most rounds and phases leave as they are."""

    answer: ClassVar[Mapping[str, Kind]] = {}
    each: ClassVar[tuple[str, ...]] = ()
    known: ClassVar[tuple[str, ...]] = ()
    pools: ClassVar[bool] = False
    sends: ClassVar[bool] = True
    release: ClassVar[Release | None] = None

    def broadcast(self, server: Arrays, ids: Sequence[int]) -> Arrays:
        """Send the whole state."""
        return server

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """Record nothing more."""
        return {}


@dataclass(frozen=True)
class AlgorithmBase(StepsBase):
    """The declarations and steps that most algorithms leave as they are."""

    name: ClassVar[str] = ""
    keeps: ClassVar[str] = ""
    training: ClassVar[Mapping[str, float]] = {}
    phases: ClassVar[Sequence[Phase]] = ()
    update: str = setting(
        "full", "what is trained: body, or full (body and head)", choices=("body", "full")
    )

    def remember(self, problem: Problem, clients: Clients) -> Arrays:
        """Remember nothing."""
        return {}

    def describe(self, problem: Problem, server: Arrays) -> dict[str, Any]:
        """Describe nothing."""
        return {}

    def describe_personal(
        self, problem: Problem, server: Arrays, theta: Tensor
    ) -> Mapping[str, Tensor]:
        """Describe nothing."""
        return {}

    def describe_examples(
        self, problem: Problem, server: Arrays, share: Share, most: int
    ) -> dict[str, Any]:
        """Describe nothing."""
        return {}


# The result of personalisation ----------------------------------------------------------------


@dataclass(frozen=True)
class Personalised:
    """The personal posteriors of C clients, each a weighted set of M networks.

    Attributes:
        problem: the network and likelihood to predict with.
        theta: [C, M, d].
        head: [C, M, h].
        buffers: [C, M, b].
        weights: [C, M], each row sums to one.
    """

    problem: Problem
    theta: Tensor
    head: Tensor
    buffers: Tensor
    weights: Tensor

    @classmethod
    def point(cls, problem: Problem, weights: Weights) -> Personalised:
        """Return posteriors of one network per client."""
        ones = torch.ones_like(weights.theta[:, :1])
        theta, head, buffers = weights.theta, weights.head, weights.buffers
        return cls(problem, theta.unsqueeze(1), head.unsqueeze(1), buffers.unsqueeze(1), ones)

    def client(self, c: int) -> Personalised:
        """Return the posterior of one of the clients."""
        rows = slice(c, c + 1)
        return Personalised(
            self.problem, self.theta[rows], self.head[rows], self.buffers[rows], self.weights[rows]
        )

    def predict(self, x: Tensor) -> Tensor:
        """Return predictions [C, n, ...] for inputs x [C, n, ...]."""
        predictions = []
        for j in range(self.theta.shape[1]):
            weights = Weights(self.theta[:, j], self.head[:, j], self.buffers[:, j])
            outputs = self.problem.network.outputs(weights, x)
            predictions.append(self.problem.likelihood.predictive(outputs))
        shares = self.weights.T.unsqueeze(-1).expand(-1, *x.shape[:2])  # [M, C, n]
        return self.problem.likelihood.average(torch.stack(predictions), shares)

    def arrays(self) -> Arrays:
        """Return what a file keeps of it."""
        return {
            "theta": self.theta,
            "head": self.head,
            "buffers": self.buffers,
            "weights": self.weights,
        }
