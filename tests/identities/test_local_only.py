"""Local training alone finds each client's own optimum."""

from __future__ import annotations

import torch
from problems import RNG, examples, linear, plan_of, problem_of, regression

from fedhb.algorithms.local_only import LocalOnly
from fedhb.likelihood import GaussianRegression
from fedhb.seeding import Randomness


def test_every_client_reaches_its_own_least_squares() -> None:
    clients, d = regression(8, 5, 12, 6, inputs=3, spread=1.0), 3
    problem = problem_of(linear(d), clients, GaussianRegression(noise=0.5))
    own = [
        torch.linalg.lstsq(x, y.unsqueeze(1)).solution[:, 0]
        for x, y in (examples(clients, c) for c in range(4))
    ]
    algorithm, plan = LocalOnly(), plan_of(epochs=200, batch_size=12, lr=0.1, momentum=0.0)
    server, memory = algorithm.start(problem, RNG), algorithm.remember(problem, clients)
    for number in (1, 2):
        rng = Randomness(0, number)
        received = algorithm.broadcast(server, clients.ids.tolist())
        found, memory = algorithm.local_update(problem, received, clients, memory, plan, rng)
        server = algorithm.aggregate(
            problem, server, algorithm.summarise(problem, received, found, rng), rng
        )
    # Full gradients: each of 400 steps contracts by the largest |1 - lr (eigenvalue)| < 0.93, and
    # 0.93^400 = 2e-13.
    A = [x.T @ x / 0.25 / len(x) for x, _ in (examples(clients, c) for c in range(4))]
    assert (1 - plan.lr * torch.linalg.eigvalsh(torch.stack(A))).abs().max() < 0.93
    torch.testing.assert_close(memory["theta"], torch.stack(own), rtol=0, atol=1e-11)
    personal = algorithm.personalise(problem, server, clients, memory, plan, RNG)
    torch.testing.assert_close(personal.theta[:, 0], torch.stack(own), rtol=0, atol=1e-11)
