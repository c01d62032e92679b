"""The objectives of a hierarchical family as functions: L_i, L_0 and the negative ELBO.

They are what the family's steps lower. Tests compare the steps with them, and records show them.
All are up to constants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Problem
from fedhb.algorithms.toolbox import start_weights
from fedhb.clients.clients import Clients
from fedhb.network.vectors import Weights

if TYPE_CHECKING:
    from fedhb.algorithms.hierarchical import Hierarchical


def expected_loss(
    family: Hierarchical, problem: Problem, received: Arrays, clients: Clients, m: Tensor
) -> Tensor:
    """Return -log p(D_i | m_i) over all training data of each client: m [C, d] -> [C]."""
    weights = start_weights(problem, family.centre(received), family.common(received), len(clients))
    losses = []
    for c in range(len(clients)):
        x, y = clients.train.examples(c)
        row = slice(c, c + 1)
        client = Weights(m[row], weights.head[row], weights.buffers[row])
        outputs = problem.network.outputs(client, x.unsqueeze(0))
        losses.append(problem.likelihood.loss(outputs, y.unsqueeze(0)).sum())
    return torch.stack(losses)


def client_objective(
    family: Hierarchical, problem: Problem, received: Arrays, clients: Clients, m: Tensor
) -> Tensor:
    """Return L_i of each client [C] (eq:elbo_1_indiv)."""
    loss = expected_loss(family, problem, received, clients, m)
    return loss + family.kl_weight * family.kl(problem, received, m)


def server_objective(family: Hierarchical, problem: Problem, server: Arrays, m: Tensor) -> Tensor:
    """Return L_0 (eq:elbo_2) for the m [N_f, d] of a cohort."""
    scale = problem.federation.num_clients / len(m)
    log_prior = family.expected_log_prior(problem, server, m).sum()
    return family.global_kl(problem, server) - scale * log_prior


def negative_elbo(
    family: Hierarchical, problem: Problem, server: Arrays, clients: Clients, m: Tensor
) -> Tensor:
    """Return L (eq:elbo); where `clients` are a cohort, its estimate with N / N_f."""
    scale = problem.federation.num_clients / len(clients)
    loss = expected_loss(family, problem, server, clients, m).sum()
    return scale * loss + family.kl_weight * server_objective(family, problem, server, m)


def of_round(
    family: Hierarchical, problem: Problem, server: Arrays, summary: Arrays
) -> dict[str, Any]:
    """Return what a round records: the negative ELBO from the clients' running losses, the mean KL,
    and the KL's share of the clients' objective."""
    count, loss = summary["count"].item(), summary["loss"].item()
    kl = family.kl_weight * family.total_kl(problem, server, summary)
    N = problem.federation.num_clients
    normaliser = float(family.log_normaliser(problem, server))
    global_kl = float(family.global_kl(problem, server))
    elbo = N / count * (loss + kl) + family.kl_weight * (N * normaliser + global_kl)
    share = kl / (loss + kl) if loss + kl else 0.0
    return {"negative_elbo": elbo, "kl": kl / count, "penalty_share": share}
