"""The gate: what it learns, its average, its head, and its probabilities."""

from __future__ import annotations

import pytest
import torch
from problems import RNG, batch_normed, labelled, mixture, mlp, normal, plan_of, problem_of
from torch import Tensor, nn

from fedhb.algorithms import gate
from fedhb.network.vectors import Network


def test_the_gate_learns_the_nearest_prototype_and_is_averaged_alike() -> None:
    """Alg. 7: a step on (x, j*), j* = argmin_j |m_i - r_j|, by hand; and 1/N_f sum_i beta_i,
    whatever the clients' sizes.
    """
    clients = labelled(9, 2)
    problem, lr = problem_of(mlp(4, 5, 3), clients), 0.1
    algorithm = mixture(num_prototypes=3, sigma2=1e6)  # hardly a pull
    theta = problem.network.theta
    server = algorithm.start(problem, RNG) | {"r": torch.stack([theta, theta + 0.1, theta + 10.0])}
    received = algorithm.broadcast(server, [0, 1])
    found, _ = algorithm.local_update(
        problem, received, clients, {}, plan_of(batch_size=9, lr=lr), RNG
    )
    distances = (found["m"].unsqueeze(1) - server["r"]).square().sum(-1)
    assert distances.argmin(1).tolist() == [1, 1] and distances.argmax(1).tolist() == [
        2,
        2,
    ]  # the centre is at theta + 3.4
    network = problem.network.gate(3)
    for c in range(2):
        x, _ = clients.train.examples(c)

        def loss(beta: Tensor, x: Tensor = x) -> Tensor:
            hidden = torch.tanh(x.double() @ beta[:20].view(5, 4).T + beta[20:25])
            logits = hidden @ network.head[:15].view(3, 5).T + network.head[15:]
            return nn.functional.cross_entropy(logits, torch.full((len(x),), 1))

        expected = server["beta"] - lr * torch.func.grad(loss)(server["beta"])
        torch.testing.assert_close(found["beta"][c], expected, rtol=0, atol=1e-12)
    new = algorithm.aggregate(
        problem, server, algorithm.summarise(problem, received, found, RNG), RNG
    )
    torch.testing.assert_close(new["beta"], found["beta"].mean(0), rtol=0, atol=1e-12)


def test_the_gates_head_is_the_same_everywhere() -> None:
    module = mlp(4, 5, 3)
    torch.manual_seed(1)
    first = Network(module).gate(2)
    torch.manual_seed(2)
    second = Network(module).gate(2)
    assert torch.equal(first.head, second.head) and len(first.head) == 2 * 5 + 2
    assert torch.equal(first.theta, Network(module).theta)
    assert not torch.equal(first.head, Network(mlp(4, 5, 3, seed=1)).gate(2).head)
    bound = 5**-0.5
    assert (
        first.head.abs().max() < bound and first.head.std() > 0.2 * bound
    )  # torch's range for a linear layer
    assert (
        isinstance(module[-1], nn.Linear) and module[-1].out_features == 3
    )  # the module itself is as it was


def test_one_prototype_has_no_gate_to_ask() -> None:
    problem, x = problem_of(mlp(4, 5, 3), labelled(9)), normal(6, 4, seed=2)
    shares = gate.gate_probabilities(problem, {"r": problem.network.theta.unsqueeze(0)}, x)
    assert torch.equal(shares, torch.ones(1, 6, dtype=torch.float64))


def test_probabilities_are_the_softmax_of_the_gates_outputs() -> None:
    problem, x = problem_of(mlp(4, 5, 3), labelled(9)), normal(6, 4, seed=2)
    server = mixture(num_prototypes=3).start(problem, RNG)
    server |= {"beta": normal(problem.network.num_params, seed=4)}
    shares = gate.gate_probabilities(problem, server, x)
    weights = gate.gate_weights(problem, server, 2)
    outputs = problem.network.gate(3).outputs(weights, x.expand(2, 6, 4))
    assert shares.shape == (3, 6) and torch.equal(weights.theta[1], server["beta"])
    for row in outputs:
        torch.testing.assert_close(shares, row.softmax(-1).T, rtol=0, atol=1e-14)


@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), batch_normed])
def test_sums_and_means_are_of_the_body_and_of_the_buffers_where_there_are_some(make) -> None:
    problem = problem_of(make(), labelled(9))
    server, kept = gate.start_gate(problem), gate.start_gate(problem)
    assert server.keys() == set(gate.PARTS[: 1 + (make is batch_normed)])
    answers = {key: value + normal(3, len(value), seed=5) for key, value in server.items()}
    ones = torch.ones(3, dtype=torch.float64)
    summary = gate.summarise_gate(answers, server, ones) | {"count": torch.tensor(3.0)}
    new = gate.aggregate_gate(server, summary)
    assert new.keys() == server.keys()
    for key, value in new.items():
        torch.testing.assert_close(value, answers[key].mean(0), rtol=0, atol=1e-12)
        assert torch.equal(server[key], kept[key])
