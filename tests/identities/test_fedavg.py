"""FedAvg and its relatives: where they are one algorithm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problems import TRAINING, batch_normed, labelled, mlp, same_bits
from torch import nn

import fedhb
from fedhb.algorithms import Arrays, FedAvg, FedBABU, FedProx


def trained(
    module: nn.Module, algorithm: Any, sizes: tuple[int, ...] = (9, 6, 4, 7, 8), **options: Any
) -> Arrays:
    """The server's state after three rounds."""
    return fedhb.fit(module, labelled(*sizes), algorithm, **TRAINING, **options).state.server


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("update", ["full", "body"])
@pytest.mark.parametrize("make", [lambda: mlp(4, 5, 3), lambda: mlp(4, 5, 3).float(), batch_normed])
def test_fedavg_fedprox_without_a_pull_and_fedbabu_are_one(
    make, update: str, weighted: bool
) -> None:
    module = make()
    fedavg = trained(module, FedAvg(update=update, weighted=weighted))
    assert ("head" in fedavg) == (update == "full") and ("buffers" in fedavg) == (
        make is batch_normed
    )
    assert same_bits(fedavg, trained(module, FedProx(update=update, weighted=weighted, mu=0.0)))
    assert same_bits(fedavg, trained(module, FedBABU(update=update, weighted=weighted)))
    # The sizes differ, and so do the algorithms otherwise.
    assert not same_bits(fedavg, trained(module, FedAvg(update=update, weighted=not weighted)))
    assert not same_bits(fedavg, trained(module, FedProx(update=update, weighted=weighted, mu=0.1)))


def test_fedbabu_without_a_head_is_fedavg() -> None:
    # Eight examples each: weights of eight instead of one change no bit of the mean.
    sizes = (8, 8, 8, 8, 8)
    fedbabu = trained(mlp(4, 5, 3), FedBABU(), sizes, head="")
    fedavg = trained(mlp(4, 5, 3), FedAvg(), sizes)
    assert fedbabu.keys() == {"theta"} and fedavg.keys() == {"theta", "head"}
    assert torch.equal(fedbabu["theta"], torch.cat([fedavg["theta"], fedavg["head"]]))
