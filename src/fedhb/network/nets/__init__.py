"""Networks for the paper's data sets: torch modules whose head is a linear layer named `head`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from fedhb.errors import InputError
from fedhb.network.nets.convnet import convnet
from fedhb.network.nets.mlp import mlp
from fedhb.network.nets.mobilenet import mobilenet

NETS: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "convnet": convnet, "mobilenet": mobilenet}

DEFAULT = {
    "emnist": "convnet",
    "cifar-100": "mobilenet",
    "cifar-100-coarse": "mobilenet",
    "cifar-100-c": "mobilenet",
}
"""The paper's backbone for each data set; all others have an MLP."""


def check_name(name: str) -> None:
    """Refuse a name that no network has."""
    if name not in NETS:
        raise InputError(
            f"unknown model {name!r}: choose from {', '.join(NETS)}, or give pkg.mod:factory for a "
            "network of your own"
        )


def build(name: str, input_shape: Sequence[int], num_outputs: int, **options: float) -> nn.Module:
    """Make a network by name, for inputs of this shape (without the batch axis)."""
    check_name(name)
    return NETS[name](tuple(input_shape), num_outputs, **options)


__all__ = ["DEFAULT", "NETS", "build", "check_name", "convnet", "mlp", "mobilenet"]
