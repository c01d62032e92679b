"""The gate g(x; beta) of the Mixture: which prototype an input belongs to (Alg. 7, appeq:gating).

The gate is a second copy of the network's body under a fixed random linear head of K units. Clients
train beta on their inputs with the label j* = argmin_j ||m_i - r_j||, which is the same for all
inputs of a client; the server averages beta.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedhb.algorithms.contract import Arrays, Problem
from fedhb.algorithms.toolbox import differences, repeat, step
from fedhb.likelihood import Categorical
from fedhb.network.vectors import Weights
from fedhb.training.batches import Batch
from fedhb.training.plan import Plan
from fedhb.training.sgd import Sgd

PARTS = ("beta", "beta_buffers")
"""The arrays of a gate: its body, and the buffers of batch norm where there are some."""


def start_gate(problem: Problem) -> Arrays:
    """Return the gate before the first round: the network's body and buffers."""
    network = problem.network
    arrays = {"beta": network.theta.clone()}
    if len(network.buffers):
        arrays["beta_buffers"] = network.buffers.clone()
    return arrays


def gate_weights(problem: Problem, received: Arrays, count: int) -> Weights:
    """Return the gate's weights for `count` clients: beta under its fixed random head."""
    network = problem.network.gate(len(received["r"]))
    buffers = received.get("beta_buffers", network.buffers)
    return Weights(
        repeat(received["beta"], count), repeat(network.head, count), repeat(buffers, count)
    )


class GateTraining:
    """SGD on the gates of C clients, with the minibatches of their networks."""

    def __init__(self, problem: Problem, received: Arrays, clients: int, plan: Plan):
        K = len(received["r"])
        self.likelihood = Categorical(K)
        self.solver = Sgd(
            problem.network.gate(K),
            gate_weights(problem, received, clients),
            replace(plan, train_head=False),
        )

    def step(self, batch: Batch, j_star: Tensor) -> None:
        """Take a step on (x, j*), with the label j* [A] of each active client."""
        labels = j_star.unsqueeze(1).expand(batch.y.shape[:2])
        self.solver.step(batch, self.likelihood, y=labels)

    def answers(self, received: Arrays) -> Arrays:
        """Return beta_i, and the gate's buffers where there are some."""
        weights = self.solver.weights
        arrays = {"beta": weights.theta, "beta_buffers": weights.buffers}
        return {key: arrays[key] for key in PARTS if key in received}


def summarise_gate(answers: Arrays, received: Arrays, weight: Tensor) -> Arrays:
    """Return sum_i (beta_i - beta)."""
    return {
        key: differences(answers[key], received[key], weight) for key in PARTS if key in received
    }


def aggregate_gate(server: Arrays, summary: Arrays) -> Arrays:
    """Return the mean of beta_i."""
    return {
        key: step(server[key], summary[key] / summary["count"]) for key in PARTS if key in summary
    }


def gate_probabilities(problem: Problem, server: Arrays, x: Tensor) -> Tensor:
    """Return g_j(x) for inputs x [n, ...], [K, n]."""
    K, network = len(server["r"]), problem.network
    if K == 1:
        return torch.ones(1, len(x), dtype=network.dtype, device=network.device)
    outputs = network.gate(K).outputs(gate_weights(problem, server, 1), x.unsqueeze(0))
    return outputs[0].softmax(-1).T
