"""FedBABU (Oh et al., "FedBABU: Towards Enhanced Representation for Federated Image Classification", ICLR 2022).

FedAvg of the body alone: the head is random, common and fixed while the federation trains, and is trained in personalisation
together with the body. Clients count equally, as in the authors' code. Sent: d down, d up, d being the body.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fedhb.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class FedBABU(FedAvg):
    """FedAvg of the body under a fixed random head."""

    name: ClassVar[str] = "fedbabu"
    update: str = field(default="body", metadata={"help": "what is trained: body, or full (body and head)"})
    weighted: bool = field(default=False, metadata={"help": "average by the clients' number of examples, else equally"})
