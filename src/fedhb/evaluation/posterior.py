"""What the global posterior says of the clients, as plain numbers: where they differ, and who resembles whom.

spread           root mean square deviation of the clients' weights from their mean, by tensor: any algorithm
NIW              the prior's standard deviation of a weight, by tensor: sqrt(u_l), or sqrt of the mean of V0 / n0
Mixture          c(j|i) of every client, g_j on its test examples and on those of every class, distances between the
                 prototypes, and the accuracy of each prototype alone, by class
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedhb import distributions
from fedhb.algorithms import NIW, Mixture
from fedhb.algorithms.contract import Algorithm, Arrays, Problem
from fedhb.algorithms.empirical_bayes.variances import layer_sizes, means
from fedhb.clients.clients import Clients, Share

EXAMPLES = 4096
"""Test examples that go through the gate and the prototypes, at most about so many in all."""


class Own:
    """Sums over the clients' weights, seen chunk by chunk: O(d), and K numbers a client for a mixture."""

    def __init__(self, problem: Problem, algorithm: Algorithm, server: Arrays, count: int):
        self.problem, self.algorithm, self.server, self.count = problem, algorithm, server, count
        # differences to where the network began: their squares do not cancel
        self._origin = problem.network.theta
        self._sum = torch.zeros_like(self._origin, dtype=torch.float64)
        self._squares = torch.zeros_like(self._sum)
        self._c: dict[int, list[float]] = {}

    def see(self, positions: Sequence[int], theta: Tensor) -> None:
        """The weights [C, d] of the clients at these positions."""
        for one in theta:
            gap = (one - self._origin).double()
            self._sum += gap
            self._squares.addcmul_(gap, gap)
        if isinstance(self.algorithm, Mixture):
            c = distributions.responsibilities(theta, self.server["r"], self.algorithm.sigma2)
            self._c |= {k: row.tolist() for k, row in zip(positions, c, strict=True)}

    def summary(self, clients: Clients, share: Share, labels: Tensor | None) -> dict[str, Any]:
        """What evaluation.json holds of the posterior."""
        layers = layer_sizes(self.problem.network, False)
        variance = (self._squares / self.count - (self._sum / self.count).square()).clamp_min_(0.0)
        found: dict[str, Any] = {"spread": means(variance, layers).sqrt().tolist()}
        if isinstance(self.algorithm, NIW):
            found["prior_deviation"] = prior_deviation(self.algorithm, self.problem, self.server)
        if isinstance(self.algorithm, Mixture):
            found |= self._mixture(self.algorithm, clients, share)
        return found

    def _mixture(self, algorithm: Mixture, clients: Clients, share: Share) -> dict[str, Any]:
        problem, server, K = self.problem, self.server, len(self.server["r"])
        r = server["r"].double()
        found: dict[str, Any] = {
            "responsibilities": [self._c[k] for k in range(self.count)],
            "distances": torch.cdist(r, r).tolist(),
        }
        classes = problem.federation.num_classes
        gate, right, labels = [], [], []
        prototypes = algorithm.prototypes(problem, server)
        for k in range(
            self.count
        ):  # a client at a time: batch norm may take its statistics from the batch
            x, y = share.examples(k, max(2, EXAMPLES // self.count))
            gate.append(algorithm.gate(problem, server, x).double().cpu())
            outputs = problem.network.outputs(prototypes, x.expand(K, *x.shape))
            right.append(problem.likelihood.score(outputs, y.expand(K, *y.shape)).double().cpu())
            labels.append(y.cpu())
        found["gate"] = [g.mean(1).tolist() for g in gate]
        if classes is not None:
            y = torch.cat(labels)
            found |= {
                "gate_by_class": averaged(torch.cat(gate, 1), y, classes).tolist(),
                "prototype_accuracy": averaged(torch.cat(right, 1), y, classes).tolist(),
            }
        return found


def averaged(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """The mean of values [K, n] over each of `count` groups [K, count]; nan where a group is empty."""
    sums = torch.zeros(len(values), count, dtype=values.dtype).index_add_(1, groups, values)
    return sums / torch.bincount(groups, minlength=count)


def prior_deviation(algorithm: NIW, problem: Problem, server: Arrays) -> list[float]:
    """The standard deviation of a client's weight around m0 under q(phi), for each tensor of the body (of the head too)."""
    n0 = algorithm.posterior(problem, server).n0
    if algorithm.dof == "per_layer":
        return (server["V0"].double() / n0).sqrt().tolist()
    return means(server["V0"].double() / n0, layer_sizes(problem.network, False)).sqrt().tolist()
