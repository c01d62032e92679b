"""Clients around a common mean m0: what the families NIW and EmpiricalBayes share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedhb import distributions
from fedhb.algorithms.contract import Arrays, Kind, Problem, Vector
from fedhb.algorithms.hierarchical import Hierarchical
from fedhb.algorithms.toolbox import SHARED_ANSWERS, blocks, differences, summarise_shared
from fedhb.seeding import Randomness
from fedhb.settings_fields import setting


@dataclass(frozen=True)
class Gaussian(Hierarchical):
    """p(theta_i | phi) = N(theta_i; mu, diagonal), and a q(phi) with the mean m0 of mu."""

    answer: ClassVar[Mapping[str, Kind]] = {"m": Vector("m0"), **SHARED_ANSWERS}
    p_do: float = setting(
        0.999, "probability that the clients' dropout KEEPS a column", least=0.0, most=1.0
    )

    @abstractmethod
    def posterior(self, problem: Problem, server: Arrays) -> distributions.NormalInverseWishart:
        """Return q(phi)."""

    @abstractmethod
    def prior_precision(self, problem: Problem, received: Arrays) -> Tensor:
        """Return the prior precision of a client's weights [d]."""

    def centre(self, received: Arrays) -> Tensor:
        """Return m0."""
        return received["m0"]

    def kl(self, problem: Problem, received: Arrays, m: Tensor) -> Tensor:
        """Return 1/2 sum_k precision_k (m_i - m0)_k^2, [C]."""
        precision = self.prior_precision(problem, received).to(m.dtype)
        kl = m.new_zeros(len(m), dtype=torch.float64)
        for part in blocks(*m.shape):
            squares = (m[:, part] - received["m0"][part]).square_()
            kl += torch.mv(squares, precision[part]).double()
        return 0.5 * kl

    def reports(self, problem: Problem, received: Arrays, m: Tensor) -> Arrays:
        """Report nothing: the sum of the KL terms follows from the summed squares."""
        return {}

    def summarise(
        self, problem: Problem, received: Arrays, answers: Arrays, rng: Randomness
    ) -> Arrays:
        """Return count, sum_i (m_i - m0) and sum_i (m_i - m0)^2."""
        ones = torch.ones_like(answers["examples"])
        squares = torch.empty_like(received["m0"])
        m = differences(answers["m"], received["m0"], ones, squares)
        return {"squares": squares, "m": m, **summarise_shared(answers, received, ones)}

    def sample(
        self, problem: Problem, server: Arrays, count: int, generator: torch.Generator
    ) -> Tensor:
        """Draw theta ~ t_{n0-dim+1}(m0, (l0+1) V0 / (l0 (n0-dim+1)))."""
        return self.posterior(problem, server).predictive().sample(count, generator)
