"""The multi-layer perceptron."""

from __future__ import annotations

from fedhb.network import nets
from fedhb.network.vectors import Network


def test_mlp_knows_the_client_axis():
    network = Network(nets.mlp((1, 28, 28), 10))
    assert (
        network.batches_clients
        and network.num_params == 784 * 256 + 256
        and len(network.head) == 2570
    )
