"""The clients' step ends at the exact minimiser of loss and penalty."""

from __future__ import annotations

import pytest
import torch
from problems import RNG, examples, linear, normal, plan_of, regression

from fedhb.likelihood import GaussianRegression
from fedhb.network.vectors import Network, Weights
from fedhb.training.proximal import Penalty, Pull
from fedhb.training.sgd import train

MOMENTUM, LR = 0.9, 0.1


@pytest.mark.parametrize("kind", ["common", "own", "mean"])
@pytest.mark.parametrize("sizes", [(6, 5, 3), (3, 6, 5)])
@pytest.mark.parametrize("momentum", [0.0, MOMENTUM])
def test_training_solves_each_clients_penalised_regression(
    momentum: float, sizes: tuple[int, ...], kind: str
) -> None:
    clients = regression(*sizes, inputs=3)
    mu = (
        torch.tensor([[0.2], [1.0], [5.0]], dtype=torch.float64) * normal(3, seed=1).exp()
    )  # per client and coordinate
    own = normal(3, 3, seed=2)
    aim = own[:1].expand(3, 3) if kind == "common" else own
    follow = 0.3 if kind == "mean" else 0.0  # of m, at the current m
    # the target own[0] + follow m, as a mean of own[0] and the unit vectors with the shares 1 and
    # m_k
    target = own[0] if kind == "common" else own
    shares = None
    if kind == "mean":
        aim, target = (
            own[:1].expand(3, 3),
            torch.cat([own[:1], follow * torch.eye(3, dtype=torch.float64)]),
        )

        def shares(m):
            return torch.cat([torch.ones_like(m[:, :1]), m], dim=1)

    network = Network(linear(3))
    start = Weights(
        torch.zeros(3, 3, dtype=torch.float64), *torch.zeros(2, 3, 0, dtype=torch.float64)
    )
    # full batches; the slowest direction converges as sqrt(0.9)^700 = 1e-16, without momentum more
    # slowly
    plan = plan_of(epochs=700 if momentum else 2000, batch_size=6, momentum=momentum)
    found, _ = train(
        network,
        GaussianRegression(noise=1.0),
        start,
        clients,
        plan,
        RNG,
        Penalty(Pull(mu, target, shares)),
    )
    for c in range(3):
        x, y = examples(clients, c)
        exact = torch.linalg.solve(
            x.T @ x / len(x) + (1 - follow) * mu[c].diag(), x.T @ y / len(x) + mu[c] * aim[c]
        )
        torch.testing.assert_close(
            found.theta[c], exact, rtol=0, atol=1e-13
        )  # sums of six products, numbers near one
