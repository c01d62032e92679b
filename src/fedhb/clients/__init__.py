"""Who holds the examples: clients, and how a data set is divided among them."""

from fedhb.clients.clients import Clients, Share

__all__ = ["Clients", "Share"]
