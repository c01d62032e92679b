"""Hierarchical Bayesian federated learning.

A federated problem goes in (a torch module, clients with data); out comes a global posterior that
predicts with calibrated uncertainty and personalises itself to a new client.

    import fedhb
    clients = fedhb.partition.shards(fedhb.data.load("digits"), num_clients=20, shards_per_client=3)
    model = fedhb.nets.mlp((1, 8, 8), 10)
    run = fedhb.fit(model, clients, fedhb.EmpiricalBayes(), rounds=30, fraction=0.5)
    probabilities = run.predict(x)
    mine = run.personalise(x_mine, y_mine)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "fit": "fedhb.runs.fit",
    "load": "fedhb.runs.load",
    "save_personal": "fedhb.runs.load",
    "Privacy": "fedhb.runs.settings",
    "Run": "fedhb.runs.run",
    "Personal": "fedhb.runs.run",
    "Clients": "fedhb.clients.clients",
    "EmpiricalBayes": "fedhb.algorithms",
    "NIW": "fedhb.algorithms",
    "Mixture": "fedhb.algorithms",
    "FedAvg": "fedhb.algorithms",
    "FedProx": "fedhb.algorithms",
    "FedBABU": "fedhb.algorithms",
    "FedPA": "fedhb.algorithms",
    "FedBE": "fedhb.algorithms",
    "FedEM": "fedhb.algorithms",
    "Ensemble": "fedhb.algorithms",
    "Centralised": "fedhb.algorithms",
    "LocalOnly": "fedhb.algorithms",
    "PFedBayes": "fedhb.algorithms",
    "FedPop": "fedhb.algorithms",
    "Callback": "fedhb.engine.loop",
    "InputError": "fedhb.errors",
    "Stopped": "fedhb.errors",
    "DivergedError": "fedhb.errors",
    "FailedRoundError": "fedhb.errors",
}
_MODULES = {
    "algorithms": "fedhb.algorithms",
    "data": "fedhb.data",
    "distributions": "fedhb.distributions",
    "likelihood": "fedhb.likelihood",
    "nets": "fedhb.network.nets",
    "network": "fedhb.network",
    "partition": "fedhb.clients.partition",
}

if TYPE_CHECKING:
    from fedhb import algorithms, data, distributions, likelihood, network
    from fedhb.algorithms import (
        NIW,
        Centralised,
        EmpiricalBayes,
        Ensemble,
        FedAvg,
        FedBABU,
        FedBE,
        FedEM,
        FedPA,
        FedPop,
        FedProx,
        LocalOnly,
        Mixture,
        PFedBayes,
    )
    from fedhb.clients import partition
    from fedhb.clients.clients import Clients
    from fedhb.engine.loop import Callback
    from fedhb.errors import DivergedError, FailedRoundError, InputError, Stopped
    from fedhb.network import nets
    from fedhb.runs.fit import fit
    from fedhb.runs.load import load, save_personal
    from fedhb.runs.run import Personal, Run
    from fedhb.runs.settings import Privacy


def __getattr__(name: str) -> Any:
    """Import on first use, so that `fedhb --help` does not wait for torch."""
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'fedhb' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, also before their first use."""
    return sorted({*globals(), *__all__})


__all__ = [
    "NIW",
    "Callback",
    "Centralised",
    "Clients",
    "DivergedError",
    "EmpiricalBayes",
    "Ensemble",
    "FailedRoundError",
    "FedAvg",
    "FedBABU",
    "FedBE",
    "FedEM",
    "FedPA",
    "FedPop",
    "FedProx",
    "InputError",
    "LocalOnly",
    "Mixture",
    "PFedBayes",
    "Personal",
    "Privacy",
    "Run",
    "Stopped",
    "__version__",
    "algorithms",
    "data",
    "distributions",
    "fit",
    "likelihood",
    "load",
    "nets",
    "network",
    "partition",
    "save_personal",
]
