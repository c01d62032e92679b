"""The federated algorithm as block-coordinate descent (alg:bfl), and bounds on its error.

A round draws a cohort u of N_f clients, takes M steps on the block x_u, then M_S = M N_f / N steps
on the server's block x_0:

    x_u^{t+1} = x_u^t - (1 / eta_t) grad_u f_t(x^t),   eta_t = L + sqrt(t)
    xbar^T = 1/T sum_{t=1..T} x^t

With kappa = (N + N_f) / N_f, ||x^t - x*|| <= D and ||grad f_t(x^t)|| <= R the paper claims
(eq:convergence)

    E f(xbar^T) - f(x*) <= kappa / T { (sqrt(T) + L) D^2 / 2 + R^2 sqrt(T) }.

Its proof draws the block of every step anew, independently of x^t ("long-term view": {0} with
probability M_S / (M + M_S), else a fresh cohort). `selection="independent"` does that;
`selection="rounds"` is the algorithm as printed. docs/theory.md derives `bound_for_rounds`, which
holds for the latter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedhb.errors import InputError
from fedhb_paper.convex_federations import Array, ConvexFederation

SELECTIONS = ("rounds", "independent")


@dataclass(frozen=True)
class Blocks:
    """The selection of blocks: N, N_f, M, and whether in rounds or independently."""

    num_clients: int
    cohort: int
    client_steps: int
    selection: str = "rounds"

    def __post_init__(self) -> None:
        if self.selection not in SELECTIONS:
            raise InputError(f"selection={self.selection!r}: choose {' or '.join(SELECTIONS)}")
        if not 1 <= self.cohort <= self.num_clients:
            raise InputError(f"cohort={self.cohort}: choose 1 to num_clients={self.num_clients}")
        if self.client_steps * self.cohort % self.num_clients:
            raise InputError(
                f"M_S = {self.client_steps} * {self.cohort} / {self.num_clients} server steps is "
                "no whole number: choose client_steps as a multiple of num_clients / cohort"
            )

    @property
    def server_steps(self) -> int:
        """The steps on the server's block in a round, M_S."""
        return self.client_steps * self.cohort // self.num_clients

    @property
    def round_length(self) -> int:
        """The steps of a round, M + M_S."""
        return self.client_steps + self.server_steps

    @property
    def kappa(self) -> float:
        """(N + N_f) / N_f: each block is selected once in kappa steps on average."""
        return (self.num_clients + self.cohort) / self.cohort

    def draw(self, rng: np.random.Generator) -> Iterator[Array]:
        """Yield the rows of x that each step moves."""
        server = np.zeros(1, dtype=int)
        while self.selection == "rounds":
            cohort = self._cohort(rng)
            for _ in range(self.client_steps):
                yield cohort
            for _ in range(self.server_steps):
                yield server
        while True:
            yield server if rng.random() * self.kappa < 1.0 else self._cohort(rng)

    def _cohort(self, rng: np.random.Generator) -> Array:
        return 1 + rng.permutation(self.num_clients)[: self.cohort]


@dataclass(frozen=True)
class Path:
    """The path of a run of the algorithm.

    Attributes:
        steps: the recorded T.
        gap: f(xbar^T) - f(x*) at each.
        last: f(x^T) - f(x*) at each.
        distance: the largest ||x^t - x*||.
        gradient: the largest ||grad f_t(x^t)||.
    """

    steps: list[int]
    gap: list[float]
    last: list[float]
    distance: float
    gradient: float


def printed_rule(smoothness: float) -> Callable[[int], float]:
    """Return the rule eta_t = L + sqrt(t)."""
    return lambda t: smoothness + math.sqrt(t)


def descend(
    problem: ConvexFederation,
    blocks: Blocks,
    record: list[int],
    rule: Callable[[int], float],
    rng: np.random.Generator,
    tell: Callable[[float, str], Any] = lambda share, text: None,
) -> Path:
    """Run the algorithm for max(record) steps, and record its path after those in `record`."""
    best = problem.minimiser()
    lowest, minibatches = problem.value(best), problem.num_batches > 1
    x, total, select = problem.start(), problem.start(), blocks.draw(rng)
    distance, gradient = float(np.linalg.norm(x - best)), 0.0
    path = Path([], [], [], 0.0, 0.0)
    wanted, end = set(record), max(record)
    # a broken step rule diverges, which its caller wants to see
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(end):
            block = next(select)
            batch = (
                rng.integers(problem.num_batches, size=problem.num_clients) if minibatches else None
            )
            slope = problem.gradient(x, batch)
            gradient = max(gradient, math.sqrt(float(np.vdot(slope, slope))))
            x[block] -= slope[block] / rule(t)
            total += x  # x is x^{t+1} now
            error = x - best
            distance = max(distance, math.sqrt(float(np.vdot(error, error))))
            if t + 1 in wanted:
                path.steps.append(t + 1)
                path.gap.append(problem.value(total / (t + 1)) - lowest)
                path.last.append(problem.value(x) - lowest)
                tell((t + 1) / end, f"step {t + 1} of {end}, gap {path.gap[-1]:.2e}")
    return Path(path.steps, path.gap, path.last, distance, gradient)


def grid(end: int, period: int, count: int) -> list[int]:
    """Return about `count` log-spaced step numbers from `period` to `end`.

    All of them are multiples of `period`: ends of rounds.
    """
    rounds = np.geomspace(1, max(end // period, 1), count).round().astype(int)
    return sorted({int(r) * period for r in rounds})


def printed_bound(T: int, kappa: float, L: float, D: float, R: float) -> float:
    """Return the right side of eq:convergence."""
    root = math.sqrt(T)
    return kappa * ((root + L) / 2 * D**2 + R**2 * root) / T


def bound_for_rounds(T: int, kappa: float, L: float, D: float, R: float, K: int) -> float:
    """Return a bound that holds for rounds of K = M + M_S steps (docs/theory.md), for any T.

    Beside the printed terms (with R^2 / (2 L) more for the step t = 0) it has the drift of x within
    a round, (K - 1) / (2 T) { kappa (L D + R) R + R^2 } (2 sqrt(T) + K / L), and R D / T for each
    step of an unfinished round and for the shift by one between t = 0 .. T-1 and t = 1 .. T.
    """
    root, whole = math.sqrt(T), T // K * K
    if whole == 0:
        return R * D
    steps = kappa * ((root + L) / 2 * D**2 + R**2 * (root + 0.5 / L))
    drift = (K - 1) / 2 * (kappa * (L * D + R) * R + R**2) * (2 * root + K / L)
    return (steps + drift + (T - whole + 1) * R * D) / T


def sublevel_constants(problem: ConvexFederation) -> tuple[float, float]:
    """Return D and R of Assumption 3 before any step is taken, for f_t = f and eta_t >= L.

    Steps on blocks then never raise f. So f(x^t) - f* <= gap = f(x^0) - f*, hence
    ||grad f|| <= sqrt(2 L gap); and where f is quadratic, with smallest curvature l, this set has
    the diameter 2 sqrt(2 gap / l).
    """
    if problem.num_batches > 1 or problem.loss != "gaussian":
        raise InputError("constants known beforehand need full batches and a quadratic objective")
    best = problem.minimiser()
    gap = problem.value(problem.start()) - problem.value(best)
    curvature = float(np.linalg.eigvalsh(problem.hessian(best))[0])
    return 2 * math.sqrt(2 * gap / curvature), math.sqrt(2 * problem.smoothness() * gap)


def slope(x: list[float], y: list[float]) -> float:
    """Return the least-squares slope of log y in log x."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
