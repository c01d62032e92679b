"""The Normal-Inverse-Wishart model (Alg. 4 to 6), by the printed formulas.

    p(phi) = N(mu; 0, Sigma / lambda0) IW(Sigma; Sigma_0, nu_0)                     eq:niw_prior_phi
             Sigma_0 = prior_scale^2 I,  nu_0 = dim + 2
    p(theta_i | phi) = N(theta_i; mu, Sigma)                                      eq:niw_prior_theta
    q(phi) = NIW(m0, V0, l0, n0),  V0 diagonal                                         eq:niw_q_phi
             l0 = |D| + lambda0,  n0 = |D| + nu_0
    q_i(theta_i) = prod over columns of p_do N(m_i, eps^2 I) + (1 - p_do) N(0, eps^2 I)   eq:spiky2

Clients minimise (eq:niw_elbo_1_indiv)

    -log p(D_i | m_i thinned by dropout)
        + kl_weight p_do/2 (n0 + dim + 1) (m_i - m0)' V0^-1 (m_i - m0)

and the server has a closed form (eq:niw_server_m0_V0) from count, sum_i (m_i - m0) and
sum_i (m_i - m0)^2 alone:

    m0 = p_do N / (N + lambda0) mean_i m_i
    V0 = n0 / (N + dim + 2) ( prior_scale^2 + N eps^2 + lambda0 m0^2
                              + N mean_i [ p_do (m_i - m0)^2 + (1 - p_do) m0^2 ] )

`dim` is d for one d-dimensional NIW (as printed), and 1 for d independent ones. A cohort's mean
stands for the mean over all N clients. `precision="mean"` has n0 in place of n0 + dim + 1. The
printed kl_weight and lambda0 are 1 (`as_printed`); docs/deviations.md says why the defaults differ.
Sent: 2d down (m0, V0), d up (m_i).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedhb import distributions
from fedhb.algorithms.contract import Arrays, Problem, Release
from fedhb.algorithms.gaussian import Gaussian
from fedhb.algorithms.toolbox import average_shared, blocks, shared_parts
from fedhb.network.vectors import tensor_means, tensor_sizes
from fedhb.seeding import Randomness
from fedhb.settings_fields import setting
from fedhb.training.proximal import Pull

FLAT = 1e-12
"""Stands for lambda0 = 0 in KL(q(phi) || p(phi)): a flat prior on mu has an infinite constant."""


@dataclass(frozen=True)
class NIW(Gaussian):
    """The paper's Normal-Inverse-Wishart model."""

    name: ClassVar[str] = "niw"
    release: ClassVar[Release | None] = Release(
        bound=lambda clip: math.sqrt(clip**2 + clip**4), clip_answers=True
    )
    training: ClassVar[Mapping[str, float]] = {  # FedBABU's, whose body update this is
        "lr": 0.1,
        "momentum": 0.9,
        "personal_lr": 0.001,
        "personal_epochs": 15,
    }
    update: str = setting(
        "body", "what is trained: body, or full (body and head)", choices=("body", "full")
    )
    kl_weight: float = setting(
        1e-4, "multiplies the KL terms; 1 (printed) is the ELBO itself", least=0.0
    )
    num_samples: int = setting(1, "networks sampled for a prediction; 0 predicts at m0", least=0)
    eps: float = setting(1e-4, "width of the spikes of the clients' posteriors", least=0.0)
    lambda0: float = setting(
        0.0, "prior count on mu, which shrinks m0 in every round; 1 is printed", least=0.0
    )
    prior_scale: float = setting(
        1.0, "scale of the prior: Sigma_0 = prior_scale^2 I", positive=True
    )
    dof: Literal["full", "per_coordinate"] = setting(
        "full",
        "one NIW of dimension d, or d of dimension 1: full or per_coordinate",
        choices=("full", "per_coordinate"),
    )
    precision: Literal["mode", "mean"] = setting(
        "mode",
        "the clients' prior: at the mode of q(phi), or in the mean",
        choices=("mode", "mean"),
    )

    @classmethod
    def as_printed(cls) -> dict[str, Any]:
        """Return every printed constant, as keywords of `fit`."""
        niw = cls(update="body", kl_weight=1.0, num_samples=1, p_do=0.999, eps=1e-4, lambda0=1.0)
        return {"algorithm": niw, **PRINTED_TRAINING}

    # q(phi) and p(phi) ------------------------------------------------------------------------

    def dim(self, problem: Problem) -> int:
        """Return the dimension of a Normal-Inverse-Wishart distribution."""
        return problem.network.num_params if self.dof == "full" else 1

    def n0(self, problem: Problem) -> float:
        """Return n0 = |D| + nu_0."""
        return problem.federation.num_examples + self.dim(problem) + 2.0

    def posterior(self, problem: Problem, server: Arrays) -> distributions.NormalInverseWishart:
        """Return q(phi)."""
        l0 = problem.federation.num_examples + self.lambda0
        return distributions.NormalInverseWishart(
            server["m0"], server["V0"], l0=l0, n0=self.n0(problem), dof=self.dof
        )

    def prior(self, problem: Problem) -> distributions.NormalInverseWishart:
        """Return p(phi)."""
        zero = problem.network.theta.new_zeros(()).expand(problem.network.num_params)
        V0 = torch.full_like(zero, self.prior_scale**2)
        l0, n0 = max(self.lambda0, FLAT), self.dim(problem) + 2.0
        return distributions.NormalInverseWishart(zero, V0, l0=l0, n0=n0, dof=self.dof)

    # Alg. 4: block-coordinate descent -----------------------------------------------------------

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """Return m0 = the initial network, and V0 by the server's formula without scatter."""
        m0 = problem.network.theta.clone()
        V0 = self.scale_matrix(problem, m0.double(), torch.zeros_like(m0, dtype=torch.float64))
        shared = shared_parts(problem, self.update, shortens=self.lambda0 > 0)
        return {"m0": m0, "V0": V0.to(m0.dtype), **shared}

    def prior_precision(self, problem: Problem, received: Arrays) -> Tensor:
        """Return p_do (n0 + dim + 1) / V0 at the mode of q(phi), or p_do n0 / V0 in the mean."""
        q = self.posterior(problem, received)
        more = q.dim + 1 if self.precision == "mode" else 0
        return self.p_do * (q.n0 + more) / q.V0

    def pull(self, problem: Problem, received: Arrays, sizes: Tensor) -> Pull:
        """Return mu = kl_weight p_do (n0 + dim + 1) / (V0 |D_i|), towards m0."""
        sizes = sizes[:1] if (sizes == sizes[0]).all() else sizes  # equal clients share one row
        precision = self.prior_precision(problem, received)
        return Pull(self.kl_weight * precision / sizes.unsqueeze(1), received["m0"])

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Return the closed form (eq:niw_server_m0_V0)."""
        N, count = problem.federation.num_clients, summary["count"].item()
        kept = self.p_do * (N / (N + self.lambda0))
        new = {key: torch.empty_like(server[key]) for key in ("m0", "V0")}
        for part in blocks(8, len(new["m0"])):  # several vectors at a time
            reference, sums = server["m0"][part].double(), summary["m"][part]
            new["m0"][part] = m0 = torch.div(sums, summary["count"]).add_(reference).mul_(kept)
            # mean_i (m_i - m0)^2 from differences to the old m0; rounding may leave a negative zero
            moved = m0 - reference
            scatter = torch.add(moved, sums, alpha=-2.0 / count).mul_(moved)
            scatter.add_(summary["squares"][part], alpha=1.0 / count).clamp_min_(0.0)
            new["V0"][part] = self.scale_matrix(problem, m0, scatter)
        return new | average_shared(server, summary)

    def scale_matrix(self, problem: Problem, m0: Tensor, scatter: Tensor) -> Tensor:
        """Return the diagonal V0 [d] for the new m0 and scatter = mean_i (m_i - m0)^2 [d].

        The printed rho is p_do (m_i - m0)^2 + (1 - p_do) m0^2 on the diagonal, never negative.
        """
        N = problem.federation.num_clients
        scale = self.n0(problem) / (N + self.dim(problem) + 2.0)
        V0 = (scale * N * self.p_do) * scatter
        V0.addcmul_(m0, m0, value=scale * (self.lambda0 + N * (1.0 - self.p_do)))
        return V0.add_(scale * (self.prior_scale**2 + N * self.eps**2))

    # The terms of the objectives ----------------------------------------------------------------

    def total_kl(self, problem: Problem, received: Arrays, summary: Arrays) -> float:
        """Return p_do/2 (n0 + dim + 1) sum_k V0_k^-1 sum_i (m_i - m0)_k^2."""
        return 0.5 * float(self.prior_precision(problem, received).double() @ summary["squares"])

    def log_normaliser(self, problem: Problem, received: Arrays) -> Tensor:
        """Return 1/2 sum_k (log Sigma*_k + (eps^2 + (1 - p_do) m0_k^2) / Sigma*_k)."""
        precision = self.prior_precision(problem, received) / self.p_do
        # spikes at zero are as far from m0 whatever m_i is
        spikes = self.eps**2 + (1.0 - self.p_do) * received["m0"].square()
        spread = distributions.total(precision * spikes)
        return 0.5 * (spread - distributions.total(precision.log_()))

    def global_kl(self, problem: Problem, server: Arrays) -> Tensor:
        """Return KL(q(phi) || p(phi))."""
        return distributions.niw_kl(self.posterior(problem, server), self.prior(problem))

    def expected_log_prior(self, problem: Problem, server: Arrays, m: Tensor) -> Tensor:
        """Return E log N(theta_i; mu, Sigma) over q(phi) and q_i (appeq:niw_expected)."""
        mean, variance = distributions.spiky_moments(m, self.p_do, self.eps)
        return distributions.expected_log_gaussian(self.posterior(problem, server), mean, variance)

    def describe(self, problem: Problem, server: Arrays) -> dict[str, Any]:
        """Return the deviation sqrt(V0 / n0) of a client's weight around m0, by tensor."""
        sizes = tensor_sizes(problem.network, with_head=False)
        variance = tensor_means(server["V0"].double() / self.n0(problem), sizes)
        return {"prior_deviation": variance.sqrt().tolist()}


PRINTED_TRAINING = {
    "lr": 0.1,
    "momentum": 0.9,
    "batch_size": 50,
    "personal_lr": 1e-3,
    "personal_epochs": 5,
}
"""The printed settings of the clients' SGD (personal_lr is not printed: FedBABU's code has it)."""
