"""EmpiricalBayes by hand: two rounds of unequal clients of whom, in the second, only some measure
their curvature.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from problems import labelled, mlp, plan_of
from torch import Tensor

from fedhb.algorithms import EmpiricalBayes, Federation, Problem
from fedhb.algorithms.empirical_bayes import curvature
from fedhb.algorithms.empirical_bayes.few_steps import FEW
from fedhb.algorithms.empirical_bayes.server_step import FACTOR, LAST, factor
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network, Weights
from fedhb.seeding import Randomness

D = torch.tensor([24, 6, 18, 3])
"""The weights of mlp(4, 6, 3), tensor by tensor."""
SIZES = torch.tensor([9, 6, 4, 17, 8, 5, 12, 7, 6, 10, 11, 4, 9, 8, 30, 6]).double()
LR, MOMENTUM, EPOCHS, BATCH = 0.1, 0.5, 2, 16


def root(s: Tensor, h: Tensor, ratio: Tensor | float = 1.0) -> Tensor:
    """The positive root of h u^2 - s r h u - s = 0."""
    return (s * ratio + torch.sqrt((s * ratio) ** 2 + 4 * s / h)) / 2


def traces(measured: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """tr(H) [L] in the mean of those who measured, and the number of directions, tr(H)^2 / tr(H^2)
    between 1 and d.
    """
    tr_H, tr_HH = (torch.stack(rows).mean(0) for rows in zip(*measured, strict=True))
    return tr_H, (tr_H**2 / tr_HH).clamp_min(1.0).minimum(D.double())


def mean_time() -> float:
    """How far a gradient of 1 of the summed loss takes clients, in their mean."""
    times = []
    for n in SIZES.tolist():
        place = velocity = 0.0
        for _ in range(EPOCHS * -(-int(n) // BATCH)):
            velocity = MOMENTUM * velocity + 1.0 / n
            place += LR * velocity
        times.append(place)
    return sum(times) / len(times)


def way(x: Tensor, t: float) -> Tensor:
    """(1 - e^{-t x}) / x."""
    return torch.where(x > 0, (1 - torch.exp(-t * x)) / x.clamp_min(1e-300), t)


def ways(pull: float, n: int) -> tuple[float, float]:
    """How far a client with n examples goes with slopes of 1, held at its beginning, and the
    variance with examples' of 1.
    """
    sizes = [BATCH] * (n // BATCH) + ([n % BATCH] if n % BATCH else [])

    def end(slopes: list[float]) -> float:
        place = velocity = 0.0
        for slope in slopes:
            velocity = MOMENTUM * velocity + slope
            free = place + LR * velocity
            place = free / (1 + LR * pull / n)
            velocity -= (free - place) / LR
        return place

    total, T = end([1.0] * EPOCHS * len(sizes)), len(sizes)
    variance = 0.0
    for epoch in range(EPOCHS):
        own = [end([float(k == epoch * T + b) for k in range(EPOCHS * T)]) for b in range(T)]
        variance += sum(w**2 / size for w, size in zip(own, sizes, strict=True)) - sum(own) ** 2 / n
    return total, variance + total**2 / n


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize(("kl_weight", "lambda0"), [(1.0, 0.0), (0.3, 0.0), (1.0, 1.0), (0.3, 2.0)])
def test_two_rounds(kl_weight: float, lambda0: float, classes: int) -> None:
    """Clients with one class each differ more than their few steps show, and their gradients tell
    by how much.
    """
    network, clients = Network(mlp(4, 6, 3)), labelled(*SIZES.int().tolist())
    if classes == 1:
        own = torch.repeat_interleave(torch.arange(len(SIZES)) % 3, SIZES.long())
        clients = replace(clients, train=replace(clients.train, y=own))
    N, total = len(SIZES), int(SIZES.sum())
    problem = Problem(network, Categorical(3), Federation(N, total, 3))
    algorithm = EmpiricalBayes(p_do=1.0, kl_weight=kl_weight, lambda0=lambda0)
    plan = plan_of(epochs=EPOCHS, batch_size=BATCH, lr=LR, momentum=MOMENTUM, train_head=True)
    server, n0 = algorithm.start(problem, Randomness(1, 0)), total + 3.0
    u, scatter = torch.ones(4).double(), torch.zeros(4).double()
    around, noise, mean_size = torch.zeros(4).double(), torch.zeros(4).double(), total / N
    measured: list[tuple[Tensor, Tensor]] = []
    for number in (1, 2):
        rng, received = Randomness(1, number), algorithm.broadcast(server, range(N))
        pulls = [
            algorithm.pull(problem, received, SIZES),
            algorithm.head_pull(problem, received, SIZES),
        ]
        for pull, own in zip(pulls, (u[:2], u[2:]), strict=True):
            assert pull is not None
            torch.testing.assert_close(
                pull.mu.double(), kl_weight / own / SIZES.unsqueeze(1), rtol=1e-6, atol=0.0
            )

        found, _ = algorithm.local_update(problem, received, clients, {}, plan, rng)
        new = algorithm.aggregate(
            problem, server, algorithm.summarise(problem, received, found, rng), rng
        )
        m0, m = torch.cat([server["m0"], server["head"]]), torch.cat([found["m"], found["head"]], 1)

        # the step, by what was known when the round began: of curvature nothing in the first
        tr_H, k = traces(measured) if measured else (torch.zeros(4).double(), D.double())
        c = (
            kl_weight / u * lambda0 / (N + lambda0) * torch.tensor([1.0, 1.0, 0.0, 0.0])
        )  # the head is not in mu
        least = (way(tr_H / k + c, mean_time()) / way(tr_H / k + kl_weight / u, mean_time())).clamp(
            1.0, 2.0
        )
        g = m.mean(0) - m0
        omega = factor(g, server[LAST], server[FACTOR].item())
        longer = least.clamp_min(omega).repeat_interleave(D)
        left = torch.exp(-mean_time() * c).repeat_interleave(D)
        torch.testing.assert_close(
            torch.cat([new["m0"], new["head"]]), left * m0 + longer * g, rtol=1e-6, atol=1e-9
        )
        torch.testing.assert_close(new[LAST], g)
        assert new[FACTOR].item() == pytest.approx(omega)

        # the prior, by what is known after it
        scatter += torch.stack(
            [part.square().mean(1).sum() for part in (m - m0).split(D.tolist(), 1)]
        )
        for c in range(N):
            generator = rng(c, "curvature")
            if number == 1 or float(torch.rand((), generator=generator)) < curvature.SHARE:
                own_weights = Weights(m[c : c + 1, :30], m[c : c + 1, 30:], torch.zeros(1, 0))
                x, _ = clients.train.examples(c)
                drawn = curvature.curvature(problem, own_weights, x, plan, generator)
                measured.append((D * drawn[:4], D**2 * drawn[4:]))
        tr_H, k = traces(measured)
        s, h = scatter / (N * number), tr_H / D
        for layer, part in enumerate((m - m0).double().split(D.tolist(), 1)):
            W, R = (
                torch.tensor([ways(kl_weight / u[layer].item(), int(n)) for n in SIZES]).double().T
            )
            r = W.square().sum() / W.sum() ** 2
            around[layer] += (
                (part.square().sum() - r * part.sum(0).square().sum()) / (1 - r) / W.square().mean()
            )
            noise[layer] += R.sum() / W.square().mean()
        # per example, tr(H) / |D_i| is k lambda
        slope = tr_H / mean_size
        told = ((around - slope * noise) / (slope * slope / k * N * number)).clamp_max(1.0)
        u = root(s, h)
        assert (told > root(s, h, D / k)).sum() >= (
            2 if classes == 1 else 0
        ) and EPOCHS * math.ceil(SIZES.max() / BATCH) < FEW
        torch.testing.assert_close(new["V0"].double(), n0 * u, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(
            new["personal_V0"].double(), n0 * root(s, h, D / k).maximum(told), rtol=1e-5, atol=0.0
        )
        server = new | {
            LAST: -new[LAST]
        }  # a last step with which the next does not agree: omega is 1
    assert N < len(measured) < 2 * N  # some did in the second round, and some did not
    assert least.unique().numel() > 1 and least.min() > omega  # or the step has shown nothing
