"""A third prior family in one file: Gaussian clients with one learned variance per layer.

docs/adding_an_algorithm.md derives it.

    p(s_l) = IG(a_l, b_l),  a_l = n d_l / 2,  b_l = a_l c^2,    n = prior_clients, c = prior_scale,
                                                                d_l = weights in layer l
    p(mu_l | s_l) = N(0, s_l I / lambda0),   p(theta_i | mu, s) = prod_l N(theta_il; mu_l, s_l I)
    q(phi) narrow around (mu, s) = (r, s),   q_i(theta_i) narrow around m_i

A layer is one tensor of the body. Clients minimise -log p(D_i | m_i) + sum_l ||m_il - r_l||^2 /
(2 s_l). The server minimises

    L_0 = sum_l (a_l + 1 + d_l/2) log s_l + (b_l + lambda0 ||r_l||^2 / 2) / s_l      -log p(mu, s)
        + N sum_l d_l/2 log s_l + T_l / (2 s_l)                       -sum_i log p(m_i | mu, s)

with T_l = mean_i ||m_il - r_l||^2, in closed form, from count, sum_i (m_i - r) and the L numbers
sum_i ||m_il - r_l||^2 alone:

    r = N / (N + lambda0) mean_i m_i
    s_l = (2 b_l + lambda0 ||r_l||^2 + N T_l) / (2 a_l + 2 + (N + 1) d_l)

Before round 1 a phase asks all clients how far they would go without a prior: its mean is the first
s. Sent: d + L down (r, s), d up (m_i). Run it with `python examples/third_family.py`; it takes a
few seconds. Learning rate and kl_weight were chosen on a validation split of the training data
(experiments/examples).

The library needs to know nothing of this file. It reads what the class declares, so filters
(defence), differential privacy, resuming, Flower and reports work:

    fedhb train --algorithm third_family:LayerScales --defence default
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

import fedhb
from fedhb.algorithms import Hierarchical
from fedhb.algorithms.contract import (
    Arrays,
    Kind,
    Measurements,
    Phase,
    Problem,
    Release,
    StepsBase,
    Vector,
)
from fedhb.algorithms.toolbox import (
    SHARED_ANSWERS,
    average_shared,
    differences,
    shared_parts,
    start_weights,
    summarise_shared,
)
from fedhb.clients import Clients
from fedhb.seeding import Randomness
from fedhb.settings_fields import setting
from fedhb.training.plan import Plan
from fedhb.training.proximal import Pull
from fedhb.training.sgd import train as train_clients


@dataclass(frozen=True)
class FirstScales(StepsBase):
    """The phase before round 1: the first s_l is how far clients go without a prior."""

    answer: ClassVar[Mapping[str, Kind]] = {"moved": Measurements()}
    release: ClassVar[Release | None] = Release()

    def local_update(
        self,
        problem: Problem,
        received: Arrays,
        clients: Clients,
        memory: Arrays,
        plan: Plan,
        rng: Randomness,
    ) -> tuple[Arrays, Arrays]:
        """Train from r without a prior; answer ||m_il - r_l||^2 / d_l of each layer [C, L]."""
        start = start_weights(problem, received["r"], received, len(clients))
        weights, _ = train_clients(problem.network, problem.likelihood, start, clients, plan, rng)
        squares = (weights.theta.double() - received["r"].double()).square()
        return {"moved": by_layer(problem, squares) / layer_sizes(problem)}, memory

    def summarise(
        self, problem: Problem, received: Arrays, answers: Arrays, rng: Randomness
    ) -> Arrays:
        """Return the number of clients and the sum of their answers [L]."""
        count = torch.tensor(float(len(answers["moved"])), dtype=torch.float64)
        return {"count": count, "moved": answers["moved"].sum(0)}

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Return the state with s_l = the clients' mean; noise must not make it negative."""
        s = (summary["moved"] / summary["count"]).clamp_min(1e-12)
        return server | {"s": s.to(server["s"].dtype)}

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """Record the deviations that the phase found."""
        s = summary["moved"] / summary["count"]
        return {"deviations": named(problem, s.sqrt())}


@dataclass(frozen=True)
class LayerScales(Hierarchical):
    """Gaussian clients with a learned variance per layer."""

    name: ClassVar[str] = "layer-scales"
    answer: ClassVar[Mapping[str, Kind]] = {"m": Vector("r"), **SHARED_ANSWERS}
    release: ClassVar[Release | None] = Release(withheld=("squares",))
    phases: ClassVar[Sequence[Phase]] = (Phase("first scales", FirstScales()),)
    update: str = setting(
        "body", "what is trained: body, or full (body and head)", choices=("body", "full")
    )
    num_samples: int = setting(10, "networks sampled for a prediction; 0 predicts at r", least=0)
    lambda0: float = setting(0.01, "prior count on mu: r shrinks by N/(N+lambda0) a round")
    prior_scale: float = setting(0.01, "deviation of a client's weights that the prior expects")
    prior_clients: float = setting(1.0, "the prior on s_l counts as much as this many clients")

    # L_0 = (r, s) -------------------------------------------------------------------------------

    def start(self, problem: Problem, rng: Randomness) -> Arrays:
        """Return r = the initial network, s = what the prior expects, and what is shared."""
        r = problem.network.theta.clone()
        s = torch.full((len(layer_sizes(problem)),), self.prior_scale**2, dtype=r.dtype)
        return {"r": r, "s": s, **shared_parts(problem, self.update)}

    def centre(self, received: Arrays) -> Tensor:
        """Return r, where clients begin."""
        return received["r"]

    # The client's objective ---------------------------------------------------------------------

    def pull(self, problem: Problem, received: Arrays, sizes: Tensor) -> Pull:
        """Return mu = kl_weight / (s_l |D_i|) of each weight of layer l, towards r."""
        s = per_weight(problem, received["s"])  # [d]
        return Pull(self.kl_weight / (s * sizes.unsqueeze(1)), received["r"])

    def kl(self, problem: Problem, received: Arrays, m: Tensor) -> Tensor:
        """Return sum_l ||m_il - r_l||^2 / (2 s_l) for m [C, d] -> [C]."""
        squares = by_layer(problem, (m.double() - received["r"].double()).square())  # [C, L]
        return (squares / (2 * received["s"].double())).sum(-1)

    # The server's objective, and its minimiser ---------------------------------------------------

    def global_kl(self, problem: Problem, server: Arrays) -> Tensor:
        """Return -log p(mu, s) at (r, s): q(phi) is so narrow that its entropy is a constant."""
        s, squares = server["s"].double(), by_layer(problem, server["r"].double().square())
        a, b = self.prior(problem)
        scales = (a + 1 + layer_sizes(problem) / 2) * s.log()
        return (scales + (b + self.lambda0 * squares / 2) / s).sum()

    def expected_log_prior(self, problem: Problem, server: Arrays, m: Tensor) -> Tensor:
        """Return log N(m_i; r, s) for m [C, d] -> [C]; the server minimises over its log s."""
        log_s = (layer_sizes(problem) / 2 * server["s"].double().log()).sum()
        return -self.kl(problem, server, m) - log_s

    def summarise(
        self, problem: Problem, received: Arrays, answers: Arrays, rng: Randomness
    ) -> Arrays:
        """Return count, sum_i (m_i - r) [d] and sum_i ||m_il - r_l||^2 [L] of C clients."""
        m, r = answers["m"], received["r"]
        ones = torch.ones_like(answers["examples"])  # clients count equally, as in the objective
        squares = [by_layer(problem, (row.double() - r.double()).square()) for row in m]
        return {
            "m": differences(m, r, ones),
            "squares": torch.stack(squares).sum(0),
            **summarise_shared(answers, received, ones),
        }

    def aggregate(
        self, problem: Problem, server: Arrays, summary: Arrays, rng: Randomness
    ) -> Arrays:
        """Return the minimiser of L_0; the cohort's means stand for those of all N clients."""
        N, d, old = problem.federation.num_clients, layer_sizes(problem), server["r"].double()
        change = summary["m"] / summary["count"]  # mean_i m_i - r
        r = N / (N + self.lambda0) * (old + change)
        # T_l around the new r from sums around the old one; rounding may leave a negative zero
        moved = r - old
        correction = by_layer(problem, moved.square() - 2 * moved * change)
        T = (summary["squares"] / summary["count"] + correction).clamp_min(0.0)
        a, b = self.prior(problem)
        shrinkage = self.lambda0 * by_layer(problem, r.square())
        s = (2 * b + shrinkage + N * T) / (2 * a + 2 + (N + 1) * d)
        dtype = server["r"].dtype
        return {"r": r.to(dtype), "s": s.to(dtype), **average_shared(server, summary)}

    # Global prediction ---------------------------------------------------------------------------

    def sample(
        self, problem: Problem, server: Arrays, count: int, generator: torch.Generator
    ) -> Tensor:
        """Draw theta ~ N(r, s), [count, d]."""
        noise = torch.randn(count, problem.network.num_params, generator=generator).to(server["r"])
        return server["r"] + per_weight(problem, server["s"]).sqrt() * noise

    # For this family alone, and for records and reports ------------------------------------------

    def prior(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Return a_l and b_l of the inverse-gamma prior, [L] each."""
        a = self.prior_clients * layer_sizes(problem) / 2
        return a, a * self.prior_scale**2

    def log_normaliser(self, problem: Problem, received: Arrays) -> Tensor:
        """Return 1/2 sum_l d_l log s_l, which `kl` leaves out."""
        return (layer_sizes(problem) / 2 * received["s"].double().log()).sum()

    def report(self, problem: Problem, server: Arrays, summary: Arrays) -> dict[str, Any]:
        """Record what every family records, and the learned deviations."""
        deviations = named(problem, server["s"].sqrt())
        return super().report(problem, server, summary) | {"deviations": deviations}

    def describe(self, problem: Problem, server: Arrays) -> dict[str, Any]:
        """Describe the learned deviation of a client's weight around r, by tensor."""
        return {"prior_deviation": server["s"].double().sqrt().tolist()}


def layer_sizes(problem: Problem) -> Tensor:
    """Return d_l, the number of weights of each layer [L]."""
    sizes = [slot.stop - slot.start for slot in problem.network.body_slots]
    return torch.tensor(sizes, dtype=torch.float64, device=problem.network.device)


def by_layer(problem: Problem, vector: Tensor) -> Tensor:
    """Return the sum over each layer: [..., d] -> [..., L]."""
    slots = problem.network.body_slots
    return torch.stack([vector[..., slot.start : slot.stop].sum(-1) for slot in slots], dim=-1)


def per_weight(problem: Problem, scales: Tensor) -> Tensor:
    """Return each layer's number at every one of its weights: [L] -> [d]."""
    return scales.repeat_interleave(layer_sizes(problem).long())


def named(problem: Problem, values: Tensor) -> dict[str, float]:
    """Return a number for each layer by the layer's name."""
    names = (slot.name for slot in problem.network.body_slots)
    return dict(zip(names, values.tolist(), strict=True))


def make_model() -> nn.Module:
    """Return two hidden layers, four tensors with four variances, under a head that stays fixed."""
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
    """Train it. With kl_weight = 1 the variances shrink to the prior's share.

    See "What to watch" in docs/adding_an_algorithm.md.
    """
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
    """Return twenty clients with three shards of the digits each."""
    return fedhb.partition.shards(
        fedhb.data.load("digits"), num_clients=20, shards_per_client=3, seed=0
    )


def main() -> None:
    """Train, print what was learned, load the run again and compare."""
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
