"""The loss and score of clients on their own data while they train, which every answer reports.

    loss_c = mean over the last epoch's examples b of loss(f(x_b; m), y_b)

at the m with which each minibatch was evaluated. No further pass over the data is made. Outputs are
kept and looked at in large groups: many batches together cost as many operations as one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedhb.likelihood import Likelihood

OUTPUTS_KEPT = 2**20
"""The numbers of outputs that are kept before they are looked at."""


class TrainingMetrics:
    """The loss and score of C clients, summed over the examples that they have seen."""

    def __init__(self, count: int, device: torch.device):
        # loss, score, examples
        self._totals = torch.zeros(3, count, dtype=torch.float64, device=device)
        # by the clients of a batch, and whether it has padding
        self._batches: dict[
            tuple[tuple[int, ...], bool], tuple[Likelihood, list[tuple[Tensor, ...]]]
        ] = {}
        self._size = 0

    def add(
        self,
        likelihood: Likelihood,
        clients: slice | Tensor,
        outputs: Tensor,
        y: Tensor,
        valid: Tensor | None,
    ) -> None:
        """Add outputs [A, B, out] of these clients for targets y [A, B, ...].

        `valid` [A, B] is 0 for padding; None where there is none.
        """
        if isinstance(clients, slice):
            positions = tuple(range(clients.start, clients.stop))
        else:
            positions = tuple(clients.tolist())
        batch = (outputs, y) if valid is None else (outputs, y, valid)
        self._batches.setdefault((positions, valid is None), (likelihood, []))[1].append(batch)
        self._size += outputs.numel()
        if self._size > OUTPUTS_KEPT:
            self._sum_up()

    def report(self) -> dict[str, Tensor]:
        """Return the mean loss and score of each client [C]."""
        self._sum_up()
        loss, score, examples = self._totals
        return {"loss": loss / examples, "score": score / examples}

    @torch.no_grad()
    def _sum_up(self) -> None:
        """Add what is kept to the totals."""
        for (positions, _), (likelihood, batches) in self._batches.items():
            outputs, y, *rest = (torch.cat(parts, 1) for parts in zip(*batches, strict=True))
            loss, score = likelihood.loss(outputs, y), likelihood.score(outputs, y)
            values = torch.stack([loss, score, torch.ones_like(outputs[..., 0])])
            for valid in rest:
                values = values * valid
            self._totals[:, list(positions)] += values.sum(2, dtype=torch.float64)
        self._batches, self._size = {}, 0
