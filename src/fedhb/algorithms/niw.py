"""The Normal-Inverse-Wishart model (Alg. 4 to 6 of the paper).

    p(phi) = N(mu; 0, Sigma / lambda0) IW(Sigma; Sigma_0, nu_0),  Sigma_0 = prior_scale^2 I,  nu_0 = dim + 2  eq:niw_prior_phi
    p(theta_i | phi) = N(theta_i; mu, Sigma)                                                                 eq:niw_prior_theta
    q(phi) = NIW(m0, V0, l0, n0),   V0 diagonal,  l0 = |D| + lambda0,  n0 = |D| + nu_0                       eq:niw_q_phi
    q_i(theta_i) = prod over columns of p_do N(m_i, eps^2 I) + (1 - p_do) N(0, eps^2 I)                      eq:spiky2

Clients minimise -log p(D_i | thinned m_i) + p_do/2 (n0 + dim + 1) (m_i - m0)' V0^-1 (m_i - m0)               eq:niw_elbo_1_indiv
and the server has a closed form (eq:niw_server_m0_V0), from count, sum_i (m_i - m0) and sum_i (m_i - m0)^2 alone:

    m0 = p_do N / (N + lambda0) mean_i m_i
    V0 = n0 / (N + dim + 2) ( prior_scale^2 + N eps^2 + lambda0 m0^2 + N mean_i [ p_do (m_i - m0)^2 + (1 - p_do) m0^2 ] )

`dim` is d for one d-dimensional NIW (dof="full", as printed) and 1 for d independent ones (dof="per_coordinate"). With
dof="per_layer" the weights of a tensor share one variance V0/n0, which is learned from the scatter of the m_i and the curvature
of the clients' losses (evidence.py), also for the head (update="full"), and the server goes as far as they have (relaxation.py).
Sent: 2d down (m0, V0), d up (m_i); per layer d down and d up, and a few numbers for each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedhb import distributions
from fedhb.algorithms.bounded import Bounded
from fedhb.algorithms.contract import Arrays, Personalised, Problem
from fedhb.algorithms.empirical_bayes.few_examples import in_as_many_steps
from fedhb.algorithms.empirical_bayes.server_step import FACTOR, LAST, begin, lengths, relaxed
from fedhb.algorithms.empirical_bayes.variances import (
    KEPT,
    PERSONAL,
    layer_sizes,
    learn,
    means,
    measure,
    occam,
    scatter,
    spread,
    unlearned,
)
from fedhb.algorithms.hierarchical import Hierarchical
from fedhb.algorithms.toolbox import (
    average_shared,
    blocks,
    differences,
    shared_parts,
    summarise_shared,
)
from fedhb.clients.clients import Clients
from fedhb.likelihood import check_sample
from fedhb.seeding import Randomness
from fedhb.settings_fields import setting
from fedhb.training.plan import Plan
from fedhb.training.proximal import Pull

TINY = 1e-12  # stands for lambda0 = 0 in the KL of q(phi), whose constant is infinite for a flat prior on mu


@dataclass(frozen=True)
class NIW(Bounded, Hierarchical):
    """Gaussian clients under a Normal-Inverse-Wishart posterior."""

    name: ClassVar[str] = "niw"
    private: ClassVar[bool] = True
    training: ClassVar[Mapping[str, float]] = {
        "lr": 0.05,
        "momentum": 0.9,
        "personal_lr": 0.003,
        "personal_epochs": 15,
    }
    update: str = setting(
        "full", "what is trained: body, or full (body and head)", choices=("body", "full")
    )
    num_samples: int = setting(
        0, "S, networks sampled for a global prediction; 0 predicts at m0", least=0
    )
    p_do: float = setting(
        0.999, "probability that a column is KEPT by the clients' dropout", least=0.0, most=1.0
    )
    eps: float = setting(1e-4, "width of the clients' spikes; not per layer", least=0.0)
    lambda0: float = setting(
        0.0, "prior count on mu, a pull to zero; 1 (printed) for batch_norm=batch", least=0.0
    )
    relax: bool = setting(True, "per layer: a longer server's step while successive steps agree")
    along: bool = setting(True, "with relax: a step as if mu had gone along with the clients")
    same_steps: bool = setting(
        True, "per layer: with few examples personalise for more epochs (few.py)"
    )
    prior_scale: float = setting(
        1.0, "Sigma_0 = prior_scale^2 I; per layer what u is before it is learned", positive=True
    )
    dof: Literal["full", "per_coordinate", "per_layer"] = setting(
        "per_layer",
        "one NIW of dimension d, d of 1, or one a tensor: full, per_coordinate or per_layer",
        choices=("full", "per_coordinate", "per_layer"),
    )
    precision: str = setting(
        "mode",
        "of the prior, at q(phi)'s mode or in the mean; not per layer",
        choices=("mode", "mean"),
    )

    def _dim(self, problem: Problem) -> int:
        return problem.network.num_params if self.dof == "full" else 1

    def posterior(self, problem: Problem, server: Arrays) -> distributions.NIW:
        """q(phi)."""
        V0, dof = server["V0"], self.dof
        if (
            dof == "per_layer"
        ):  # with so many weights a layer, a variance of its own for each of equal ones is the same thing
            V0, dof = self._per_weight(problem, V0)[0], "per_coordinate"
        l0 = problem.federation.num_examples + self.lambda0
        return distributions.NIW(server["m0"], V0, l0=l0, n0=self._n0(problem), dof=dof)

    def _n0(self, problem: Problem) -> float:
        return problem.federation.num_examples + self._dim(problem) + 2.0

    def _layers(self, problem: Problem) -> list[int]:
        return layer_sizes(problem.network, self.update == "full")

    def _per_weight(self, problem: Problem, values: Tensor) -> tuple[Tensor, Tensor]:
        """One value per layer [L] as one per weight of the body [d] and of the head [h]."""
        every = spread(values, self._layers(problem))
        return every[: problem.network.num_params], every[problem.network.num_params :]

    def prior(self, problem: Problem) -> distributions.NIW:
        """p(phi)."""
        zero = problem.network.theta.new_zeros(()).expand(problem.network.num_params)
        l0, n0 = max(self.lambda0, TINY), self._dim(problem) + 2.0
        kind: distributions.Dof = "full" if self.dof == "full" else "per_coordinate"
        return distributions.NIW(
            zero, torch.full_like(zero, self.prior_scale**2), l0=l0, n0=n0, dof=kind
        )

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """m0 = the initial network; V0 by the server's formula without scatter, and per layer n0 prior_scale^2, a weak pull."""
        m0, shared = (
            problem.network.theta.clone(),
            shared_parts(problem, self.update, shortens=self.lambda0 > 0),
        )
        if self.dof == "per_layer":
            check_sample(problem.likelihood)
            shared |= (
                begin([m0, *([shared["head"]] if "head" in shared else [])]) if self.relax else {}
            )
            V0 = m0.new_full((len(self._layers(problem)),), self._n0(problem) * self.prior_scale**2)
            return {"m0": m0, **unlearned(V0), **shared}
        V0 = self._scale(problem, m0.double(), torch.zeros_like(m0, dtype=torch.float64))
        return {"m0": m0, "V0": V0.to(m0.dtype), **shared}

    def broadcast(self, server: Arrays, ids: Sequence[int]) -> Arrays:
        """m0 and V0, and what is shared beside them."""
        return {key: value for key, value in server.items() if key not in (*KEPT, LAST, FACTOR)}

    def centre(self, received: Arrays) -> Tensor:
        """m0."""
        return received["m0"]

    def _precision(self, problem: Problem, received: Arrays) -> Tensor:
        """The prior precision of a client's weights [d]: p_do (n0 + dim + 1) / V0 at the mode, p_do n0 / V0 in the mean."""
        if self.dof == "per_layer":
            return 1.0 / self._per_weight(problem, self._variance(problem, received))[0]
        q = self.posterior(problem, received)
        return self.p_do * (q.n0 + (q.dim + 1 if self.precision == "mode" else 0)) / q.V0

    def pull(self, problem: Problem, received: Arrays, sizes: Tensor) -> Pull:
        """mu = kl_weight p_do (n0 + dim + 1) / (V0 |D_i|) per coordinate, or kl_weight / (u |D_i|) per layer, towards m0."""
        sizes = sizes[:1] if (sizes == sizes[0]).all() else sizes  # equal clients share one row
        layers = layer_sizes(problem.network, False) if self.dof == "per_layer" else []
        precision = (
            1.0 / self._variance(problem, received)[: len(layers)]
            if layers
            else self._precision(problem, received)
        )
        return Pull(self.kl_weight * precision / sizes.unsqueeze(1), received["m0"], layers=layers)

    def head_pull(self, problem: Problem, received: Arrays, sizes: Tensor) -> Pull | None:
        """The same for the head, which has a prior per layer where the federation trains it."""
        if self.dof != "per_layer" or "head" not in received:
            return None
        layers = self._layers(problem)[len(problem.network.body_slots) :]
        precision = 1.0 / self._variance(problem, received)[-len(layers) :]
        return Pull(
            self.kl_weight * precision / sizes.unsqueeze(1), received["head"], layers=layers
        )

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """Alg. 4, step 3; per layer, some clients' curvature at what they found too."""
        found, memory = super().local_update(problem, received, clients, memory, plan, rng)
        if self.dof == "per_layer":
            held = (
                self.kl_weight / self._variance(problem, received)
                if self.begin == "global"
                else None
            )
            found["curvature"] = measure(
                problem, found, self.beginning(problem, received, clients), clients, plan, rng, held
            )
        return found, memory

    def kl(self, problem: Problem, received: Arrays, m: Tensor) -> Tensor:
        """p_do/2 (n0 + dim + 1) (m_i - m0)' V0^-1 (m_i - m0)."""
        precision, found = (
            self._precision(problem, received).to(m.dtype),
            m.new_zeros(len(m), dtype=torch.float64),
        )
        for part in blocks(*m.shape):
            found += torch.mv(
                (m[:, part] - received["m0"][part]).square_(), precision[part]
            ).double()
        return 0.5 * found

    def reports(self, problem: Problem, received: Arrays, m: Tensor) -> Arrays:
        """Nothing: the sum of the KL terms follows from the summed squares."""
        return {}

    def total_kl(self, problem: Problem, received: Arrays, summary: Arrays) -> float:
        """p_do/2 (n0 + dim + 1) sum_k V0_k^-1 sum_i (m_i - m0)_k^2, or 1/2 sum_l |m_il - m0_l|^2 / u_l, of the head too."""
        if self.dof == "per_layer":
            sizes = torch.tensor(self._layers(problem), device=summary["m"].device)
            return 0.5 * float(
                (scatter(summary, sizes.tolist()) * sizes / self._variance(problem, received)).sum()
            )
        return 0.5 * float(self._precision(problem, received).double() @ summary["squares"])

    def log_normaliser(self, problem: Problem, received: Arrays) -> Tensor:
        """1/2 sum_k (log Sigma*_k + (eps^2 + (1 - p_do) m0_k^2) / Sigma*_k); per layer q_i's, 1/2 sum_l d_l log(1 + u_l h_l)."""
        if self.dof == "per_layer":
            return occam(
                self._variance(problem, received), received["evidence"], self._layers(problem)
            )
        precision = self._precision(problem, received) / self.p_do
        wide = (
            self.eps**2 + (1.0 - self.p_do) * received["m0"].square()
        )  # spikes at zero are as far from m0 whatever m_i is
        return 0.5 * (distributions.total(precision * wide) - distributions.total(precision.log_()))

    def summarise(
        self, problem: Problem, received: Arrays, found: Arrays, rng: Randomness
    ) -> Arrays:
        """count, sum_i (m_i - m0), sum_i (m_i - m0)^2."""
        ones, sums = (
            torch.ones_like(found["examples"]),
            {"squares": torch.empty_like(received["m0"])},
        )
        sums["m"] = differences(found["m"], received["m0"], ones, sums["squares"])
        if self.dof == "per_layer":
            sums["curvature"] = found["curvature"].double().sum(0)
            if "head" in received:
                sums["head_squares"] = torch.empty_like(received["head"])
                differences(found["head"], received["head"], ones, sums["head_squares"])
        return sums | summarise_shared(found, received, ones)

    def _scale(self, problem: Problem, m0: Tensor, scatter: Tensor) -> Tensor:
        """V0 [d] for the new m0 and mean_i (m_i - m0)^2 [d]: diag rho = p_do (m_i - m0)^2 + (1 - p_do) m0^2 is never negative."""
        N, dim = problem.federation.num_clients, self._dim(problem)
        scale = self._n0(problem) / (N + dim + 2.0)
        V0 = (scale * N * self.p_do) * scatter
        V0.addcmul_(m0, m0, value=scale * (self.lambda0 + N * (1.0 - self.p_do)))
        return V0.add_(scale * (self.prior_scale**2 + N * self.eps**2))

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """eq:niw_server_m0_V0, the cohort's means standing for those of all N clients."""
        N, n, layered = (
            problem.federation.num_clients,
            summary["count"].item(),
            self.dof == "per_layer",
        )
        along = (
            layered and self.relax and self.along and self.begin == "global"
        )  # from m0 on; elsewhere the way is not D's
        kept = (1.0 if layered else self.p_do) * (
            1.0 if along else N / (N + self.lambda0)
        )  # N(m_i, v_i) has no spike at zero
        new = {key: torch.empty_like(server[key]) for key in ("m0", "V0")} | average_shared(
            server, summary
        )
        for part in blocks(8, len(new["m0"])):  # several vectors at a time
            reference, sums = server["m0"][part].double(), summary["m"][part]
            new["m0"][part] = m0 = torch.div(sums, summary["count"]).add_(reference).mul_(kept)
            if not layered:
                moved = m0 - reference
                # mean (m_i - m0)^2 from differences to the reference; what is left of rounding may be a negative zero
                around = (
                    torch.add(moved, sums, alpha=-2.0 / n)
                    .mul_(moved)
                    .add_(summary["squares"][part], alpha=1.0 / n)
                )
                new["V0"][part] = self._scale(problem, m0, around.clamp_min_(0.0))
        if layered:
            counts, precision = (
                self._layers(problem),
                self.kl_weight / self._variance(problem, server),
            )
            new |= learn(
                server,
                summary,
                counts,
                self._n0(problem),
                problem.federation.num_examples / N,
                self.prior_scale**2,
            )
            if self.relax:
                longer = (
                    lengths(server, summary, counts, precision, self.lambda0 / (N + self.lambda0))
                    if along
                    else None
                )
                new |= relaxed(server, new, [key for key in ("m0", "head") if key in new], longer)
        return new

    def _variance(self, problem: Problem, received: Arrays) -> Tensor:
        """u [L], the prior's variance per layer."""
        return received["V0"].double() / self._n0(problem)

    def personalise(
        self,
        problem: Problem,
        server: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> Personalised:
        """Alg. 6; per layer, under the variance that is the better estimate (evidence.py), and with few examples too (few.py)."""
        own, fit = server | {"V0": server.get(PERSONAL, server["V0"])}, super().personalise
        if self.dof == "per_layer" and self.same_steps and self.kl_weight > 0:
            fit = partial(in_as_many_steps, fit)
        return fit(problem, own, clients, memory, plan, rng)

    def sample(
        self, problem: Problem, server: Arrays, count: int, generator: torch.Generator
    ) -> Tensor:
        """theta ~ t_{n0-dim+1}(m0, (l0+1) V0 / (l0 (n0-dim+1)))."""
        return self.posterior(problem, server).predictive().sample(count, generator)

    def global_kl(self, problem: Problem, server: Arrays) -> Tensor:
        """KL(q(phi) || p(phi)); per layer u is a point, and what is left is the prior of mu."""
        if self.dof == "per_layer":
            body = layer_sizes(problem.network, False)
            lengths = means(server["m0"].square(), body).double() * torch.tensor(
                body, device=server["m0"].device
            )
            return (
                0.5 * self.lambda0 * (lengths / self._variance(problem, server)[: len(body)]).sum()
            )
        return distributions.niw_kl(self.posterior(problem, server), self.prior(problem))

    def expected_log_prior(self, problem: Problem, server: Arrays, m: Tensor) -> Tensor:
        """E log N(theta_i; mu, Sigma) over q(phi) and q_i (appeq:niw_expected).

        Per layer, less what q_i costs beside it: -1/2 sum_l [ |m_il - m0_l|^2 / u_l + d_l log(1 + u_l h_l) ] over the body."""
        if self.dof == "per_layer":
            counts, u = layer_sizes(problem.network, False), self._variance(problem, server)
            return -self.kl(problem, server, m) - occam(
                u[: len(counts)], server["evidence"][:, : len(counts)], counts
            )
        mean, variance = distributions.spiky_moments(m, self.p_do, self.eps)
        return distributions.expected_log_gaussian(self.posterior(problem, server), mean, variance)
