"""Mixture: one prototype is FedProx, several are EM; prototypes that coincide, die and start again; the gate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from problems import (
    RNG,
    aggregate,
    generator,
    labelled,
    mixture,
    mlp,
    normal,
    plan_of,
    problem_of,
    vector_problem,
)
from torch import Tensor, nn

import fedhb
from fedhb.algorithms import FedProx, Mixture, Problem
from fedhb.algorithms.prototypes import Nearness
from fedhb.algorithms.toolbox import num_bytes
from fedhb.clients.clients import Clients
from fedhb.network.vectors import Network

N, D, K = 9, 4, 3
SIGMA2 = 0.3


def server_problem() -> Problem:
    return vector_problem(D, num_clients=N, num_examples=50)


def scattered(count: int = N) -> Tensor:
    """m_i in three overlapping groups: responsibilities far from zero and one."""
    return normal(K, D, seed=1)[torch.arange(count) % K] + 0.5 * normal(count, D, seed=2)


def server_of(r: Tensor) -> dict[str, Tensor]:
    return {"r": r, "idle": torch.zeros(len(r), dtype=torch.int64)}


def c_by_hand(m: Tensor, r: Tensor, sigma2: float = SIGMA2) -> Tensor:
    """c(j|i) as printed: exponentials, nothing shifted; for distances near one only."""
    k = (-(m.unsqueeze(1) - r).square().sum(-1) / (2 * sigma2)).exp()
    return k / k.sum(1, keepdim=True)


# ---- one prototype


def test_one_prototype_is_fedprox_on_the_clients() -> None:
    clients = labelled(9, 6, 3)
    problem, plan = problem_of(mlp(4, 5, 3), clients), plan_of(epochs=3)
    algorithm = mixture(num_prototypes=1, sigma2=0.05)
    server = algorithm.start(problem, RNG)
    assert torch.equal(server["r"], problem.network.theta.unsqueeze(0))
    found, _ = algorithm.local_update(
        problem, algorithm.broadcast(server, [0, 1, 2]), clients, {}, plan, RNG
    )
    for c, size in enumerate(clients.sizes.tolist()):
        fedprox = FedProx(mu=1 / (0.05 * size), update="body")
        alone, _ = fedprox.local_update(
            problem, {"theta": server["r"][0]}, clients.select([c]), {}, plan, RNG
        )
        # The strength and the batched products are rounded in another order, at nine steps or fewer.
        torch.testing.assert_close(found["m"][c], alone["theta"][0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("chunk", [1, 2, None])
def test_one_prototype_is_a_shrunk_mean_on_the_server(chunk: int | None) -> None:
    problem, m = server_problem(), scattered()
    algorithm = mixture(num_prototypes=1, sigma2=SIGMA2)
    # A sum of nine numbers near one, taken from zero or from the old r.
    everyone = aggregate(algorithm, problem, server_of(normal(1, D)), m, chunk)["r"][0]
    torch.testing.assert_close(everyone, m.sum(0) / (N + SIGMA2), rtol=0, atol=1e-14)
    cohort = aggregate(algorithm, problem, server_of(normal(1, D)), m[:4], chunk)["r"][0]
    torch.testing.assert_close(cohort, m[:4].mean(0) / (SIGMA2 / N + 1), rtol=0, atol=1e-14)
    plain = mixture(num_prototypes=1, sigma2=SIGMA2, shrink=False)
    torch.testing.assert_close(
        aggregate(plain, problem, server_of(normal(1, D)), m, chunk)["r"][0],
        m.mean(0),
        rtol=0,
        atol=1e-14,
    )


def test_one_prototype_sends_no_gate() -> None:
    clients = labelled(9, 6)
    problem, plan = problem_of(mlp(4, 5, 3), clients), plan_of()
    d = 8 * problem.network.num_params  # bytes
    for count, down, up in ((1, d, d), (2, 3 * d, 2 * d), (3, 4 * d, 2 * d)):
        algorithm = mixture(num_prototypes=count)
        received = algorithm.broadcast(algorithm.start(problem, RNG), [0, 1])
        found, _ = algorithm.local_update(problem, received, clients, {}, plan, RNG)
        assert ("beta" in received) == ("beta" in found) == (count > 1)
        assert (num_bytes(received), num_bytes(found) // len(clients)) == (down, up)


# ---- the server: EM


@pytest.mark.parametrize("shrink", [True, False])
@pytest.mark.parametrize("cohort", [N, 5])
def test_em_lowers_the_objective_to_a_stationary_point(cohort: int, shrink: bool) -> None:
    problem, m = server_problem(), scattered(cohort)
    algorithm = mixture(num_prototypes=K, sigma2=SIGMA2, shrink=shrink)
    server = server_of(normal(K, D, seed=3))
    values = [algorithm.server_objective(problem, server, m).item()]
    for _ in range(200):
        server = aggregate(algorithm, problem, server, m)
        values.append(algorithm.server_objective(problem, server, m).item())
    falls = -np.diff(values)
    assert (
        falls >= -1e-13
    ).all()  # at the end the value only rounds: some units in the last place of numbers near ten
    assert falls[:5].min() > 1e-3
    r = server["r"].requires_grad_()
    (gradient,) = torch.autograd.grad(algorithm.server_objective(problem, {"r": r}, m), r)
    # Sums of N (m - r) / sigma2, which are near ten, to some roundings; EM has converged linearly by then.
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("cohort", [N, 5])
@pytest.mark.parametrize("chunk", [1, 2, None])
def test_the_m_step_minimises_jensens_bound(cohort: int, chunk: int | None) -> None:
    problem, m = server_problem(), scattered(cohort)
    algorithm = mixture(num_prototypes=K, sigma2=SIGMA2)
    before = normal(K, D, seed=3)
    c = c_by_hand(m, before)

    def bound(r: Tensor) -> Tensor:
        """1/2 sum_j ||r_j||^2 + N/N_f sum_ij c(j|i) (||m_i - r_j||^2 / (2 sigma2) + log c(j|i) K), eq:mix_server."""
        distances = (m.unsqueeze(1) - r).square().sum(-1)
        return (
            0.5 * r.square().sum()
            + N / cohort * (c * (distances / (2 * SIGMA2) + (c * K).log())).sum()
        )

    after = aggregate(algorithm, problem, server_of(before), m, chunk)["r"].requires_grad_()
    (gradient,) = torch.autograd.grad(bound(after), after)
    assert gradient.abs().max() < 1e-13  # sums of nine terms near one
    # It bounds the objective, and touches it where it was made.
    objective = algorithm.server_objective(problem, {"r": before}, m)
    assert bound(before).item() == pytest.approx(objective.item(), rel=1e-14)
    for seed in range(20):
        elsewhere = before + normal(K, D, seed=10 + seed)
        assert bound(elsewhere) > algorithm.server_objective(problem, {"r": elsewhere}, m)


def test_prototypes_have_no_order() -> None:
    problem, m, order = server_problem(), scattered(), torch.tensor([2, 0, 1])
    algorithm = mixture(num_prototypes=K, sigma2=SIGMA2)
    r = normal(K, D, seed=3)
    one, other = (
        aggregate(algorithm, problem, server_of(r[j]), m) for j in (torch.arange(K), order)
    )
    # Softmax and mean of three, summed in another order.
    torch.testing.assert_close(other["r"], one["r"][order], rtol=0, atol=1e-14)
    for function in (algorithm.kl, algorithm.expected_log_prior):
        torch.testing.assert_close(
            function(problem, {"r": r}, m),
            function(problem, {"r": r[order]}, m),
            rtol=1e-14,
            atol=0,
        )

    clients = labelled(9, 6, 3)
    problem, plan = problem_of(mlp(4, 5, 3), clients), plan_of(epochs=2)
    received = algorithm.broadcast(algorithm.start(problem, RNG), [0, 1, 2])
    shuffled = received | {"r": received["r"][order]}
    found, again = (
        algorithm.local_update(problem, given, clients, {}, plan, RNG)[0]["m"]
        for given in (received, shuffled)
    )
    torch.testing.assert_close(found, again, rtol=0, atol=1e-13)


def test_small_sigma2_assigns_each_client_to_its_nearest_prototype() -> None:
    problem, m = server_problem(), scattered()
    r = m[:K] + 0.1 * normal(K, D, seed=3)
    nearest = torch.cdist(m, r).argmin(1)
    assert sorted(nearest.bincount(minlength=K).tolist()) == [1, 3, 5]
    after = aggregate(mixture(num_prototypes=K, sigma2=1e-10), problem, server_of(r), m)["r"]
    kmeans = torch.stack([m[nearest == j].mean(0) for j in range(K)])
    torch.testing.assert_close(
        after, kmeans, rtol=0, atol=1e-9
    )  # what is left is the shrinkage, sigma2 over two clients


# ---- the clients


def test_the_pull_is_the_gradient_of_the_kl() -> None:
    problem, m = server_problem(), scattered(4).requires_grad_()
    algorithm = mixture(num_prototypes=K, sigma2=SIGMA2, kl_weight=0.3)
    received, sizes = {"r": normal(K, D, seed=3)}, torch.tensor([3, 10, 27, 5])
    (gradient,) = torch.autograd.grad(0.3 * algorithm.kl(problem, received, m).sum(), m)
    pull = algorithm.pull(problem, received, sizes)
    with torch.no_grad():
        by_pull = pull.mu * (m - pull.towards(m))
        by_hand = 0.3 / SIGMA2 * (m - c_by_hand(m, received["r"]) @ received["r"])
    # A softmax of three and sums of four numbers near one.
    torch.testing.assert_close(by_pull, gradient / sizes.unsqueeze(1), rtol=0, atol=1e-14)
    torch.testing.assert_close(gradient, by_hand, rtol=0, atol=1e-14)
    log_density = (
        algorithm.kl(problem, received, m)
        + torch.stack([-0.5 * (m - r_j).square().sum(1) / SIGMA2 for r_j in received["r"]])
        .exp()
        .sum(0)
        .log()
    )
    torch.testing.assert_close(
        log_density, torch.full_like(log_density, math.log(K)), rtol=1e-13, atol=0
    )


def test_nearness_ranks_by_distance() -> None:
    m, r = scattered(), normal(K, D, seed=3)
    distances = (m.unsqueeze(1) - r).square().sum(-1)
    nearness = Nearness(r, SIGMA2)
    shares, near = nearness.responsibilities(m), nearness.scores(m)
    for j in range(K):
        # Sums of four products of numbers near one.
        expected = -0.5 * (distances - distances[:, j : j + 1])
        torch.testing.assert_close(near - near[:, j : j + 1], expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(shares, c_by_hand(m, r), rtol=0, atol=1e-13)


def test_nearness_is_that_of_the_current_m() -> None:
    """What it remembers of the last m is used for that m alone: not once it has moved, nor for other rows of it."""
    m, r = scattered(), normal(K, D, seed=3)
    nearness = Nearness(r, SIGMA2)
    first = nearness.scores(m)
    assert nearness.scores(m[:]) is first
    for move in (lambda: m.add_(1.0), lambda: m[2].mul_(2.0), lambda: m[:, 1:].zero_()):
        move()
        assert torch.equal(nearness.scores(m), Nearness(r, SIGMA2).scores(m))
    for rows in (slice(0, 4), slice(1, 5), torch.tensor([3, 1]), torch.tensor([2, 0])):
        assert torch.equal(nearness.scores(m[rows]), Nearness(r, SIGMA2).scores(m[rows]))


def test_nearness_keeps_its_digits_in_float32() -> None:
    d, generator_ = 200_000, generator(0)
    body = 0.02 * torch.randn(d, generator=generator_, dtype=torch.float64) + 0.02
    r = (body + 1e-3 * torch.randn(2, d, generator=generator_, dtype=torch.float64)).float()
    m = (body + 2e-3 * torch.randn(1, d, generator=generator_, dtype=torch.float64)).float()
    exact = -0.5 * (m.double().unsqueeze(1) - r.double()).square().sum(-1)
    near = Nearness(r, SIGMA2).scores(m)
    expanded = m @ r.T - 0.5 * r.square().sum(1)
    gap = exact[0, 0] - exact[0, 1]
    error, naive = (abs(v[0, 0] - v[0, 1] - gap).item() for v in (near, expanded))
    # The products are of size 0.03 * 1e-3 each, 200 000 of them of either sign: sums near 1e-2 with seven digits. To expand
    # the squares sums 200 000 products of size 1e-3: near 100, with seven digits.
    assert error < 1e-6 < 1e-5 < naive


def test_far_prototypes_leave_everything_finite() -> None:
    problem, m = server_problem(), scattered(4)
    direction = normal(2, D, seed=6)
    r = (
        1e6
        * direction
        / direction.norm(dim=1, keepdim=True)
        * torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    )
    algorithm, received = mixture(num_prototypes=2, sigma2=0.1), {"r": r}
    m = m.requires_grad_()
    kl = algorithm.kl(problem, received, m)
    # The nearer prototype alone: its distance squared over 2 sigma2, 5e12.
    torch.testing.assert_close(
        kl, (m - r[0]).square().sum(1) / 0.2 + math.log(2), rtol=1e-14, atol=0
    )
    (gradient,) = torch.autograd.grad(kl.sum(), m)
    torch.testing.assert_close(gradient, (m - r[0]) / 0.1, rtol=1e-14, atol=0)
    with torch.no_grad():
        target = algorithm.pull(problem, received, torch.full((4,), 5)).towards(m)
        assert torch.equal(target, r[:1].expand(4, D))
        after = aggregate(algorithm, problem, server_of(r), m.detach())["r"]
    # The old r is a million away: its last digits are lost in the sum of differences (1e-10), and nothing else.
    torch.testing.assert_close(after[0], m.detach().mean(0) / (0.1 / N + 1), rtol=0, atol=1e-9)
    assert torch.equal(after[1], r[1])


# ---- prototypes that coincide, and that die


def two_groups(clients_each: int = 4, size: int = 24) -> Clients:
    """Two groups of clients that disagree: where one says class 0, the other says 1."""
    random = np.random.default_rng(0)
    pairs = []
    for k in range(2 * clients_each):
        x = random.normal(size=(size, 4))
        pairs.append((x, ((x[:, 0] > 0) ^ (k < clients_each)).astype(np.int64)))
    return Clients.from_arrays(pairs)


def test_equal_prototypes_stay_equal() -> None:
    clients = two_groups()
    problem, plan = problem_of(mlp(4, 6, 2), clients), plan_of(epochs=2, batch_size=8)
    algorithm = mixture(num_prototypes=2, noise=0.0)
    server = algorithm.start(problem, RNG)
    for _ in range(3):
        received = algorithm.broadcast(server, range(8))
        found, _ = algorithm.local_update(problem, received, clients, {}, plan, RNG)
        summary = algorithm.summarise(problem, received, found, RNG)
        server = algorithm.aggregate(problem, server, summary, RNG)
        assert torch.equal(server["r"][0], server["r"][1])
    assert not torch.equal(server["r"][0], problem.network.theta)


def test_the_default_start_separates_two_groups() -> None:
    clients, algorithm = two_groups(), Mixture(num_prototypes=2)
    options = {
        "fraction": 1.0,
        "local_epochs": 4,
        "batch_size": 8,
        "schedule": "constant",
        "progress": False,
    }
    run = fedhb.fit(mlp(4, 6, 2), clients, algorithm, rounds=12, **options)
    start, server = algorithm.start(run.problem, RNG)["r"], run.state.server
    assert (server["r"][0] - server["r"][1]).norm() > 100 * (start[0] - start[1]).norm()
    # Each group has a prototype of its own.
    found, _ = algorithm.local_update(
        run.problem, server, clients, {}, plan_of(epochs=4, batch_size=8), RNG
    )
    nearest = torch.cdist(found["m"], server["r"]).argmin(1).tolist()
    assert nearest in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4)


def test_a_dead_prototype_waits_and_starts_again_beside_the_most_used() -> None:
    problem, m = server_problem(), scattered()
    algorithm = mixture(num_prototypes=K, sigma2=0.01, patience=2, noise=1e-3)
    r = torch.stack([m[0], m[1], torch.full((D,), 50.0, dtype=torch.float64)])
    server = server_of(r)
    for waited in (1, 2):
        server = aggregate(algorithm, problem, server, m)
        assert torch.equal(server["r"][2], r[2])
        assert server["idle"].tolist() == [0, 0, waited]
    used = c_by_hand(m, server["r"][:2], sigma2=0.01).sum(0).argmax()
    server = aggregate(algorithm, problem, server, m)
    assert server["idle"].tolist() == [0, 0, 0]
    away = server["r"][2] - server["r"][used]
    assert 0 < away.norm() < 5e-3 and server["r"].isfinite().all()  # four numbers of deviation 1e-3
    assert not torch.equal(server["r"][used], r[used])  # the others took their step


def test_a_prototype_that_starts_again_has_the_buffers_of_the_one_beside_it() -> None:
    m, algorithm = scattered(), mixture(num_prototypes=2, sigma2=0.01, patience=0, noise=1e-3)
    r = torch.stack([m.mean(0), torch.full((D,), 50.0, dtype=torch.float64)])
    server = server_of(r) | {"buffers": torch.tensor([[1.0], [7.0]], dtype=torch.float64)}
    found = {
        "m": m,
        "buffers": torch.full((N, 1), 2.5, dtype=torch.float64),
        "examples": torch.full((N,), 5.0).double(),
    }
    summary = algorithm.summarise(
        server_problem(), algorithm.broadcast(server, range(N)), found, RNG
    )
    new = algorithm.aggregate(server_problem(), server, summary, RNG)
    assert (new["r"][1] - new["r"][0]).norm() < 1e-2
    torch.testing.assert_close(
        new["buffers"], torch.full((2, 1), 2.5, dtype=torch.float64), rtol=1e-14, atol=0
    )


# ---- the gate


def test_the_gate_learns_the_nearest_prototype_and_is_averaged_alike() -> None:
    """Alg. 7: a step on (x, j*), j* = argmin_j |m_i - r_j|, by hand; and 1/N_f sum_i beta_i, whatever the clients' sizes."""
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


def test_a_round_records_how_many_prototypes_are_at_work() -> None:
    """exp of the entropy of the clients' shares, which sum to one, for any number of clients."""
    algorithm, m = mixture(num_prototypes=K, sigma2=1e-3), normal(K, D, seed=1)
    for clients, effective in (([0, 1, 2] * 2, 3.0), ([0, 1] * 4, 2.0), ([2] * 5, 1.0)):
        found = {"m": m[clients], "examples": torch.ones(len(clients), dtype=torch.float64)}
        found |= {
            key: torch.zeros(len(clients), dtype=torch.float64) for key in ("loss", "score", "kl")
        }
        problem, server = server_problem(), server_of(m)
        record = algorithm.report(problem, server, algorithm.summarise(problem, server, found, RNG))
        assert sum(record["responsibilities"]) == pytest.approx(1.0)
        assert record["effective_prototypes"] == pytest.approx(effective, rel=1e-6)


def test_prediction_mixes_probabilities_by_the_gate() -> None:
    module, x = mlp(4, 5, 3), normal(6, 4, seed=2)
    problem = problem_of(module, labelled(9, 6))
    algorithm = mixture(num_prototypes=2, noise=1.0)
    server = algorithm.start(problem, RNG) | {"beta": normal(problem.network.num_params, seed=4)}

    def outputs(body: Tensor, head: Tensor) -> Tensor:
        first, second = body[:20].view(5, 4), body[20:]
        return (
            torch.tanh(x @ first.T + second) @ head[: -(len(head) // 6)].view(-1, 5).T
            + head[-(len(head) // 6) :]
        )

    g = outputs(server["beta"], problem.network.gate(2).head).softmax(1)
    by_prototype = [outputs(r_j, problem.network.head).softmax(1) for r_j in server["r"]]
    expected = g[:, :1] * by_prototype[0] + g[:, 1:] * by_prototype[1]
    found = algorithm.predict(problem, server, x, RNG)
    # Products and sums of a few numbers near one.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(found.sum(1), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-14)
    assert (g[:, 0] - 0.5).abs().max() > 0.1 and (
        by_prototype[0] - by_prototype[1]
    ).abs().max() > 0.1
    alone = mixture(num_prototypes=1).predict(problem, {"r": server["r"][:1]}, x, RNG)
    torch.testing.assert_close(alone, by_prototype[0], rtol=0, atol=1e-14)


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
