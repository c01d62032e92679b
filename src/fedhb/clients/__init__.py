"""The clients, which hold the examples, and how a data set is divided among them."""

from fedhb.clients.clients import Clients, Share

__all__ = ["Clients", "Share"]
