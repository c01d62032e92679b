"""Gathers, during an evaluation, the numbers that a report shows besides metrics.

These are small numbers: no example and no weight is kept.

`evaluation.json` of a run holds

    network       tensors by name and size
    clients       names, sizes, and how many training examples of each label every client has
    metrics       every metric of every client, before and after personalisation
    uncertainty   of both tasks: reliability, rejection, entropy on familiar and on unseen inputs
    posterior     what the algorithm says of its posterior (posterior.py)
    sketches      of the clients' weights after personalisation, less their mean (sketch.py)

Nothing here draws from the randomness of a run, so no number of its result depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhb.algorithms.contract import Algorithm, Arrays, Personalised, Problem
from fedhb.clients.clients import Clients, Share
from fedhb.evaluation.posterior import PosteriorDescription
from fedhb.evaluation.sketch import WIDTH, Sketch
from fedhb.evaluation.uncertainty import Judged, describe, entropies, judge, together
from fedhb.seeding import Randomness

FOREIGN = 50
"""Inputs of classes that a client never had, for each client."""
UNSEEN = 2000
"""Unseen inputs for the global prediction, at most."""
UNSEEN_AT_ONCE = 500
DIGITS = 5

SHUFFLED = "test inputs with their pixels in a random order"
MIXED = "test inputs with every feature from another example"
OTHERS = "classes that the client never held"


class Observer:
    """Is told of every prediction and every personal posterior of an evaluation."""

    def __init__(
        self,
        problem: Problem,
        algorithm: Algorithm,
        server: Arrays,
        seed: int,
        unseen: tuple[str, Tensor] | None = None,
    ):
        self.problem, self.algorithm, self.server, self.seed, self.unseen = (
            problem,
            algorithm,
            server,
            seed,
            unseen,
        )
        self._judged: dict[str, list[Judged]] = {"global": [], "personalised": [], "foreign": []}
        self._metrics: dict[str, dict[int, dict[str, float]]] = {"global": {}, "personalised": {}}

    def begin(self, clients: Clients, share: Share) -> None:
        """Prepare for the evaluation of these clients on this share of their examples."""
        self.clients, self.share = clients, share
        self.labels = count_labels(clients)
        self.sketch = Sketch(
            self.problem.network.num_params, self.seed, self.problem.network.device
        )
        self._sketches = torch.zeros(len(clients), WIDTH, dtype=torch.float64)
        self._shares: dict[int, list[float]] = {}
        self._posterior = PosteriorDescription(
            self.problem, self.algorithm, self.server, len(clients)
        )

    def predicted(
        self, task: str, k: int, prediction: Tensor, y: Tensor, metrics: dict[str, float]
    ) -> None:
        """Take in the prediction for the examples of the client at position k."""
        self._metrics[task][k] = metrics
        judged = judge(self.problem.likelihood, prediction, y)
        if judged is not None and len(y):
            self._judged[task].append(judged)

    def personalised(self, positions: Sequence[int], personal: Personalised) -> None:
        """Take in the personal posteriors of the clients at these positions."""
        several = personal.theta.shape[1] > 1
        theta = (
            (personal.weights.unsqueeze(-1) * personal.theta).sum(1)
            if several
            else personal.theta[:, 0]
        )
        self._sketches[list(positions)] = self.sketch(theta)
        self._posterior.see(positions, theta)
        for c, k in enumerate(positions):
            if several:
                self._shares[k] = personal.weights[c].tolist()
            x = self._foreign(k)
            if x is not None:
                judged = judge(
                    self.problem.likelihood, personal.client(c).predict(x.unsqueeze(0))[0]
                )
                self._judged["foreign"] += [judged] if judged is not None else []

    def _foreign(self, k: int) -> Tensor | None:
        """Return inputs of classes that the client at position k lacks; None where it has all."""
        if self.labels is None or (self.labels[k] > 0).all():
            return None
        rows = (self.labels[k] == 0)[self.share.y.cpu()].nonzero().flatten().numpy()
        if not len(rows):
            return None
        chosen = np.random.default_rng(
            [self.seed, 0xF04E, int(self.clients.ids[k]) & 0xFFFF]
        ).permutation(len(rows))[:FOREIGN]
        return self.share.x[torch.from_numpy(np.sort(rows[chosen]))]

    def summary(self, rng: Randomness) -> dict[str, Any]:
        """Return the content of evaluation.json."""
        network, clients = self.problem.network, self.clients
        parts = (("body", network.body_slots), ("head", network.head_slots))
        centred = self._sketches - self._sketches.mean(0)
        return rounded(
            {
                "format": 1,
                "network": {
                    "parameters": network.num_params,
                    "layers": [
                        {
                            "name": s.name,
                            "part": part,
                            "size": s.stop - s.start,
                            "shape": list(s.shape),
                        }
                        for part, slots in parts
                        for s in slots
                    ],
                },
                "clients": {
                    "client": list(clients.names) if clients.names else clients.ids.tolist(),
                    "sizes": clients.sizes.tolist(),
                    "labels": None if self.labels is None else self.labels.tolist(),
                },
                "metrics": {
                    task: {key: [each[k][key] for k in range(len(clients))] for key in each[0]}
                    for task, each in self._metrics.items()
                },
                "uncertainty": self._uncertainty(rng),
                "posterior": self._posterior.summary(self.share),
                "shares": [self._shares[k] for k in range(len(clients))] if self._shares else None,
                "sketches": centred.tolist(),
            }
        )

    def _uncertainty(self, rng: Randomness) -> dict[str, Any] | None:
        if not self._judged["global"]:
            return None
        familiar = {task: together(self._judged[task]) for task in ("global", "personalised")}
        tables = {task: describe(judged) for task, judged in familiar.items()}
        classes = self.problem.federation.num_classes
        most = math.log(classes) if classes else None
        name, x = self.unseen or shuffled(self.share, self.seed)
        inputs = x[:UNSEEN].to(self.problem.network.device).split(UNSEEN_AT_ONCE)
        prediction = torch.cat(
            [self.algorithm.predict(self.problem, self.server, part, rng) for part in inputs]
        )
        strange = judge(self.problem.likelihood, prediction)
        if strange is not None:
            tables["global"]["entropy"] = entropies(familiar["global"], strange, name, most)
        if self._judged["foreign"]:
            others = together(self._judged["foreign"])
            tables["personalised"]["entropy"] = entropies(
                familiar["personalised"], others, OTHERS, most
            )
        return tables


def count_labels(clients: Clients) -> Tensor | None:
    """Return every client's training examples by class [N, classes]; None for regression."""
    if clients.num_classes is None:
        return None
    share, classes = clients.train, clients.num_classes
    owner = torch.arange(len(clients)).repeat_interleave(share.sizes)
    return torch.bincount(
        owner * classes + share.y[share.rows].cpu(), minlength=len(clients) * classes
    ).view(-1, classes)


def shuffled(share: Share, seed: int) -> tuple[str, Tensor]:
    """Return inputs that look like none of these.

    The pixels of each are in a random order; in tables, features come from different examples.
    """
    rng = np.random.default_rng([seed, 0x5AFF])
    chosen = np.sort(rng.permutation(len(share.rows))[: UNSEEN // 2])
    x = share.x[share.rows[torch.from_numpy(chosen)]].cpu().numpy()
    flat = x.reshape(len(x), -1)
    table = x.ndim == 2
    mixed = rng.permuted(flat, axis=0 if table else 1)
    return (MIXED if table else SHUFFLED), torch.from_numpy(mixed.reshape(x.shape))


def rounded(value: Any) -> Any:
    """Return a value whose numbers have DIGITS significant digits; NaN and infinity are None."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value
