"""Flags of the command line for a small run."""

from __future__ import annotations

SMALL = [
    "--num-clients",
    "10",
    "--shards-per-client",
    "3",
    "--fraction",
    "0.5",
    "--rounds",
    "4",
    "--checkpoint-every",
    "2",
]
SMALL += ["--set", "model.hidden=16", "--batch-size", "20", "--personal-epochs", "1"]
