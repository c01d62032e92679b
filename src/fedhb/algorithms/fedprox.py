"""FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020).

FedAvg whose clients minimise F_i(theta_i) + mu/2 ||theta_i - theta||^2, theta being what they
received. The penalty is a proximal step (training/proximal.py), so any mu is stable.
Sent: d down, d up.
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
class FedProx(FedAvg):
    """FedAvg with a proximal term."""

    name: ClassVar[str] = "fedprox"
    release: ClassVar[Release | None] = Release()
    training: ClassVar[Mapping[str, float]] = {
        "lr": 0.05,
        "momentum": 0.9,
        "personal_lr": 0.001,
        "personal_epochs": 15,
    }
    mu: float = setting(0.01, "strength of the pull towards the received weights", least=0.0)

    def pull(self, problem: Problem, received: Arrays, key: str) -> Pull | None:
        """Return mu/2 ||w - w_received||^2 on what is sent; a head that is not sent has none."""
        if key not in received:
            return None
        network = problem.network
        mu = torch.full((1, 1), self.mu, dtype=network.dtype, device=network.device)
        return Pull(mu, received[key])
