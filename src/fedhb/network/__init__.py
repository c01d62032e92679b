"""A torch module as vectors, for C clients at once."""

from fedhb.network.vectors import Network, Weights

__all__ = ["Network", "Weights"]
