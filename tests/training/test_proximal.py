"""The prior's pull as a proximal step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems import RNG, initial, linear, plan_of

from fedhb.clients.clients import Clients
from fedhb.likelihood import GaussianRegression
from fedhb.network.vectors import Network
from fedhb.training.proximal import Penalty, Pull
from fedhb.training.sgd import train

MOMENTUM, LR = 0.9, 0.1


MINIMUM, TARGET = 1.0, -0.5  # the loss 1/2 (m - MINIMUM)^2, pulled to TARGET


def minimiser(mu: float) -> float:
    """Of 1/2 (m - MINIMUM)^2 + mu/2 (m - TARGET)^2."""
    return (MINIMUM + mu * TARGET) / (1 + mu)


def proximal(
    mu: float, steps: int = 1000, dtype: torch.dtype = torch.float64, momentum: float = MOMENTUM
) -> float:
    """Where the library's steps lead from zero: one weight, one example (x = 1, y = MINIMUM), noise
    one.

    After 1000 steps, sqrt(0.9)^1000 = 1e-23 of the way is left.
    """
    clients = Clients.from_arrays([(np.ones((1, 1)), np.full(1, MINIMUM))])
    network = Network(linear(1).to(dtype))
    pull = Pull(torch.full((1, 1), mu, dtype=dtype), torch.full((1,), TARGET, dtype=dtype))
    plan = plan_of(epochs=steps, lr=LR, momentum=momentum)
    start = initial(network, 1)
    start.theta.zero_()
    return train(network, GaussianRegression(noise=1.0), start, clients, plan, RNG, Penalty(pull))[
        0
    ].theta.item()


def by_hand(mu: float, steps: int, *, correct: bool = True, momentum: float = MOMENTUM) -> float:
    """The four lines of proximal.py, or the first three, without the correction of the velocity."""
    m = v = 0.0
    for _ in range(steps):
        v = momentum * v + (m - MINIMUM)
        free = m - LR * v
        m = (free + LR * mu * TARGET) / (1 + LR * mu)
        v += (free - m) / LR if correct else 0.0
    return m


def explicit(mu: float, steps: int) -> float:
    """Plain momentum on the gradient of loss plus penalty."""
    m = v = 0.0
    for _ in range(steps):
        v = MOMENTUM * v + (m - MINIMUM) + mu * (m - TARGET)
        m = m - LR * v
    return m


@pytest.mark.parametrize("mu", [0.0, 0.3, 1.0, 30.0])
def test_momentum_ends_at_the_minimiser_of_loss_plus_penalty(mu: float) -> None:
    # The fixed point is computed with a few roundings of numbers near one.
    assert proximal(mu) == pytest.approx(minimiser(mu), abs=1e-14)


@pytest.mark.parametrize("mu", [0.0, 1.0, 1e5])
@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("momentum", [0.0, MOMENTUM])
def test_the_step_is_the_documented_one(mu: float, steps: int, momentum: float) -> None:
    assert proximal(mu, steps, momentum=momentum) == pytest.approx(
        by_hand(mu, steps, momentum=momentum), abs=1e-14
    )  # seven steps of numbers near one


def test_without_the_correction_the_penalty_is_too_weak() -> None:
    wrong = by_hand(mu=1.0, steps=1000, correct=False)
    assert wrong == pytest.approx(minimiser(mu=1.0 - MOMENTUM), abs=1e-14)
    assert abs(wrong - minimiser(mu=1.0)) > 0.5  # what the test above would have seen


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_a_stiff_pull_is_stable(dtype: torch.dtype, rounding: float) -> None:
    # The minimiser is 1.5e-5 from the target: float32 resolves it too.
    assert proximal(mu=1e5, dtype=dtype) == pytest.approx(minimiser(mu=1e5), abs=rounding)
    assert (
        abs(explicit(mu=1e5, steps=20)) > 1e60
    )  # an explicit step is stable below mu = 2 (1 + momentum) / lr = 38
