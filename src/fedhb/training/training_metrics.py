"""The loss and score of clients on their own data while they train: what a round reports beside its vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from fedhb.likelihood import Likelihood

KEPT = 2**20
"""Outputs that are kept before they are looked at: many batches together cost as many operations as one."""


class Watch:
    """The loss and score of C clients, summed over the examples that they have seen."""

    def __init__(self, count: int, device: torch.device):
        self._totals = torch.zeros(
            3, count, dtype=torch.float64, device=device
        )  # loss, score, examples
        self._kept: dict[
            tuple[tuple[int, ...], bool], tuple[Likelihood, list[tuple[Tensor, ...]]]
        ] = {}
        self._size = 0

    def see(
        self,
        likelihood: Likelihood,
        clients: slice | Tensor,
        outputs: Tensor,
        y: Tensor,
        valid: Tensor | None,
    ) -> None:
        """Outputs [A, B, out] for targets y [A, B, ...] of these clients; `valid` [A, B] is 0 for padding."""
        who = tuple(
            range(clients.start, clients.stop) if isinstance(clients, slice) else clients.tolist()
        )
        batch = (outputs, y) if valid is None else (outputs, y, valid)
        self._kept.setdefault((who, valid is None), (likelihood, []))[1].append(batch)
        self._size += outputs.numel()
        if self._size > KEPT:
            self._look()

    def report(self) -> dict[str, Tensor]:
        """Mean loss and score of each client [C]."""
        self._look()
        loss, score, examples = self._totals
        return {"loss": loss / examples, "score": score / examples}

    @torch.no_grad()
    def _look(self) -> None:
        """Add what is kept to the totals."""
        for (who, _), (likelihood, batches) in self._kept.items():
            outputs, y, *rest = (torch.cat(parts, 1) for parts in zip(*batches, strict=True))
            seen = torch.stack(
                [
                    likelihood.loss(outputs, y),
                    likelihood.score(outputs, y),
                    torch.ones_like(outputs[..., 0]),
                ]
            )
            for valid in rest:
                seen = seen * valid
            self._totals[:, list(who)] += seen.sum(2, dtype=torch.float64)
        self._kept, self._size = {}, 0
