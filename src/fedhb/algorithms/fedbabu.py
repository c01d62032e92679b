"""FedBABU (Oh et al., "FedBABU: Towards Enhanced Representation for Federated Image
Classification", ICLR 2022).

FedAvg of the body alone. The head is random, common and fixed while the federation trains;
personalisation trains it together with the body. Clients count equally, as in the authors' code.
Sent: d down, d up, d being the body.

`weight_decay` is not FedBABU's: it is the control that separates the shrinkage of the printed NIW
from NIW.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedhb.algorithms.contract import Arrays, Problem, Release
from fedhb.algorithms.fedavg import FedAvg
from fedhb.settings_fields import setting
from fedhb.training.proximal import Pull


@dataclass(frozen=True)
class FedBABU(FedAvg):
    """FedAvg of the body under a fixed random head."""

    name: ClassVar[str] = "fedbabu"
    release: ClassVar[Release | None] = Release()
    training: ClassVar[Mapping[str, float]] = {
        "lr": 0.1,
        "momentum": 0.9,
        "personal_lr": 0.001,
        "personal_epochs": 15,
    }
    update: str = setting(
        "body", "what is trained: body, or full (body and head)", choices=("body", "full")
    )
    weighted: bool = setting(False, "average by the clients' number of examples, else equally")
    weight_decay: float = setting(
        0.0, "strength of the pull of the sent weights towards zero", least=0.0
    )

    def pull(self, problem: Problem, received: Arrays, key: str) -> Pull | None:
        """Return weight_decay/2 ||w||^2 on what is sent."""
        if not self.weight_decay or key not in received:
            return None
        network = problem.network
        mu = torch.full((1, 1), self.weight_decay, dtype=network.dtype, device=network.device)
        return Pull(mu, torch.zeros_like(received[key]))
