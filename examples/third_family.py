"""A third prior family in one file: Gaussian clients with one learned variance per layer. docs/adding_an_algorithm.md derives it.

    p(s_l) = IG(a_l, b_l),   a_l = n d_l / 2,   b_l = a_l c^2,      n = prior_clients, c = prior_scale, d_l = weights in layer l
    p(mu_l | s_l) = N(0, s_l I / lambda0),      p(theta_i | mu, s) = prod_l N(theta_il; mu_l, s_l I)
    q(phi) narrow around (mu, s) = (r, s),      q_i(theta_i) narrow around m_i

A layer is one tensor of the body. Clients minimise -log p(D_i | m_i) + sum_l ||m_il - r_l||^2 / (2 s_l). The server minimises

    L_0 = sum_l (a_l + 1 + d_l/2) log s_l + (b_l + lambda0 ||r_l||^2 / 2) / s_l                       -log p(mu, s)
        + N sum_l d_l/2 log s_l + T_l / (2 s_l),   T_l = mean_i ||m_il - r_l||^2                       -sum_i log p(m_i | mu, s)

in closed form, from count, sum_i (m_i - r) and the L numbers sum_i ||m_il - r_l||^2 alone:

    r = N / (N + lambda0) mean_i m_i
    s_l = (2 b_l + lambda0 ||r_l||^2 + N T_l) / (2 a_l + 2 + (N + 1) d_l)

Sent: d + L down (r, s), d up (m_i). Run it with `python examples/third_family.py`; it takes a few seconds. Learning rate and
kl_weight were chosen on a validation split of the training data (experiments/examples).
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

import fedhb
from fedhb.algorithms import Arrays, Hierarchical, Problem
from fedhb.algorithms.toolbox import average_shared, differences, shared_parts, summarise_shared
from fedhb.seeding import Randomness
from fedhb.training.proximal import Pull


@dataclass(frozen=True)
class LayerScales(Hierarchical):
    """Gaussian clients with a learned variance per layer. The fields are its settings; `update` and `kl_weight` are inherited."""

    name: ClassVar[str] = "layer-scales"
    num_samples: int = field(
        default=10,
        metadata={"help": "S, networks sampled for a global prediction; 0 predicts at r"},
    )
    lambda0: float = field(
        default=0.01, metadata={"help": "prior count on mu: r shrinks by N/(N+lambda0) a round"}
    )
    prior_scale: float = field(
        default=0.01,
        metadata={"help": "c: the deviation of a client's weights that the prior expects"},
    )
    prior_clients: float = field(
        default=1.0, metadata={"help": "n: the prior on s_l counts as much as this many clients"}
    )

    # L_0 = (r, s) ---------------------------------------------------------------------------------------------------------

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """r = the initial network, s = the variance that the prior expects; the head or buffers where they are shared."""
        r = problem.network.theta.clone()
        s = torch.full((len(layer_sizes(problem)),), self.prior_scale**2, dtype=r.dtype)
        return {"r": r, "s": s, **shared_parts(problem, self.update)}

    def centre(self, received: Arrays) -> Tensor:
        """Clients begin at r."""
        return received["r"]

    # The client's objective -----------------------------------------------------------------------------------------------

    def pull(self, problem: Problem, received: Arrays, sizes: Tensor) -> Pull:
        """mu = kl_weight / (s_l |D_i|) for every coordinate of layer l, towards r. `sizes` are the |D_i| [C]."""
        s = spread(problem, received["s"])  # [d]
        return Pull(self.kl_weight / (s * sizes.unsqueeze(1)), received["r"])

    def kl(self, problem: Problem, received: Arrays, m: Tensor) -> Tensor:
        """sum_l ||m_il - r_l||^2 / (2 s_l) for m [C, d] -> [C]; what does not depend on m is left out."""
        squares = by_layer(problem, (m.double() - received["r"].double()).square())  # [C, L]
        return (squares / (2 * received["s"].double())).sum(-1)

    # The server's objective, and its minimiser ----------------------------------------------------------------------------

    def global_kl(self, problem: Problem, server: Arrays) -> Tensor:
        """-log p(mu, s) at (r, s): q(phi) is so narrow that its entropy is a constant."""
        s, squares = server["s"].double(), by_layer(problem, server["r"].double().square())
        a, b = self.prior(problem)
        return (
            (a + 1 + layer_sizes(problem) / 2) * s.log() + (b + self.lambda0 * squares / 2) / s
        ).sum()

    def expected_log_prior(self, problem: Problem, server: Arrays, m: Tensor) -> Tensor:
        """log N(m_i; r, s) for m [C, d] -> [C]. Unlike `kl` it keeps log s, which the server minimises over."""
        return (
            -self.kl(problem, server, m)
            - (layer_sizes(problem) / 2 * server["s"].double().log()).sum()
        )

    def summarise(
        self, problem: Problem, received: Arrays, found: Arrays, rng: Randomness
    ) -> Arrays:
        """count, sum_i (m_i - r) [d] and sum_i ||m_il - r_l||^2 [L] of C clients; added up over chunks in any order."""
        m, r = found["m"], received["r"]
        ones = torch.ones_like(
            found["examples"]
        )  # every client counts the same, as in the objective
        squares = torch.stack(
            [by_layer(problem, (row.double() - r.double()).square()) for row in m]
        ).sum(0)
        return {
            "m": differences(m, r, ones),
            "squares": squares,
            **summarise_shared(found, received, ones),
        }

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """The minimiser of L_0, the cohort's means standing for those of all N clients."""
        N, d, old = problem.federation.num_clients, layer_sizes(problem), server["r"].double()
        change = summary["m"] / summary["count"]  # mean_i m_i - r
        r = N / (N + self.lambda0) * (old + change)
        # T_l around the new r from sums around the old one; rounding may leave a negative zero
        moved = r - old
        T = summary["squares"] / summary["count"] + by_layer(
            problem, moved.square() - 2 * moved * change
        )
        a, b = self.prior(problem)
        shrinkage = self.lambda0 * by_layer(problem, r.square())
        s = (2 * b + shrinkage + N * T.clamp_min(0.0)) / (2 * a + 2 + (N + 1) * d)
        dtype = server["r"].dtype
        return {"r": r.to(dtype), "s": s.to(dtype), **average_shared(server, summary)}

    # Global prediction ----------------------------------------------------------------------------------------------------

    def sample(
        self, problem: Problem, server: Arrays, count: int, generator: torch.Generator
    ) -> Tensor:
        """theta ~ N(r, s), [count, d]."""
        noise = torch.randn(count, problem.network.num_params, generator=generator).to(server["r"])
        return server["r"] + spread(problem, server["s"]).sqrt() * noise

    # For this family alone ------------------------------------------------------------------------------------------------

    def prior(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """a_l and b_l of the inverse-gamma prior, [L] each."""
        a = self.prior_clients * layer_sizes(problem) / 2
        return a, a * self.prior_scale**2

    def log_normaliser(self, problem: Problem, received: Arrays) -> Tensor:
        """1/2 sum_l d_l log s_l, which `kl` leaves out."""
        return (layer_sizes(problem) / 2 * received["s"].double().log()).sum()

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """What every family records of a round, and the learned deviations."""
        names = (slot.name for slot in problem.network.body_slots)
        return super().report(problem, server, summary) | {
            "deviations": dict(zip(names, server["s"].sqrt().tolist(), strict=True))
        }


def layer_sizes(problem: Problem) -> Tensor:
    """d_l, the number of weights of each layer [L]."""
    slots = problem.network.body_slots
    return torch.tensor(
        [slot.stop - slot.start for slot in slots],
        dtype=torch.float64,
        device=problem.network.device,
    )


def by_layer(problem: Problem, vector: Tensor) -> Tensor:
    """The sum over each layer: [..., d] -> [..., L]."""
    return torch.stack(
        [vector[..., slot.start : slot.stop].sum(-1) for slot in problem.network.body_slots], dim=-1
    )


def spread(problem: Problem, scales: Tensor) -> Tensor:
    """Each layer's number at every one of its coordinates: [L] -> [d]."""
    return scales.repeat_interleave(layer_sizes(problem).long())


def make_model() -> nn.Module:
    """Two hidden layers: a body of four tensors, so four variances, under a head that stays fixed while the federation trains."""
    torch.manual_seed(0)
    layers = OrderedDict(
        flatten=nn.Flatten(),
        hidden1=nn.Linear(64, 64),
        relu1=nn.ReLU(),
        hidden2=nn.Linear(64, 32),
        relu2=nn.ReLU(),
        head=nn.Linear(32, 10),
    )
    return nn.Sequential(layers)


def train(
    clients: fedhb.Clients,
    lr: float = 0.2,
    kl_weight: float = 1e-3,
    evaluate_on: str = "test",
    out: Path | None = None,
) -> fedhb.Run:
    """With kl_weight = 1 the variances shrink to the prior's share: see "What to watch" in docs/adding_an_algorithm.md."""
    options = {
        "rounds": 60,
        "fraction": 0.5,
        "local_epochs": 2,
        "batch_size": 20,
        "lr": lr,
        "schedule": "constant",
    }
    return fedhb.fit(
        make_model(),
        clients,
        LayerScales(kl_weight=kl_weight),
        **options,
        evaluate_on=evaluate_on,
        seed=0,
        out=out,
    )


def make_clients() -> fedhb.Clients:
    """Twenty clients with three shards of the digits each."""
    return fedhb.partition.shards(
        fedhb.data.load("digits"), num_clients=20, shards_per_client=3, seed=0
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "layer-scales"
        run = train(make_clients(), out=out)
        again = fedhb.load(
            out, model=make_model(), algorithm=run.algorithm
        )  # both are our own, so `load` is given both

    print(f"global accuracy {run.result['global']['accuracy']:.3f}", end=", ")
    print(f"personalised {run.result['personalised']['accuracy']:.3f}")
    print("learned deviation of the clients' weights, by layer:")
    for layer, deviation in run.records[-1]["deviations"].items():
        print(f"  {layer:15} {deviation:.4f}")
    x = fedhb.data.load("digits").test.x
    same = np.array_equal(run.predict(x), again.predict(x))
    print(f"the loaded run predicts the same: {same}")


if __name__ == "__main__":
    main()
