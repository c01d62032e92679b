"""The algorithms, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedhb.algorithms.base import Algorithm, Arrays, Federation, Personalised, Plan, Problem
from fedhb.algorithms.centralised import Centralised
from fedhb.algorithms.ensemble import Ensemble
from fedhb.algorithms.fedavg import FedAvg
from fedhb.algorithms.fedbabu import FedBABU
from fedhb.algorithms.fedbe import FedBE
from fedhb.algorithms.fedem import FedEM
from fedhb.algorithms.fedpa import FedPA
from fedhb.algorithms.fedpop import FedPop
from fedhb.algorithms.fedprox import FedProx
from fedhb.algorithms.hierarchical import Hierarchical
from fedhb.algorithms.local_only import LocalOnly
from fedhb.algorithms.mixture import Mixture
from fedhb.algorithms.niw import NIW
from fedhb.algorithms.pfedbayes import PFedBayes
from fedhb.errors import InputError
from fedhb.values import convert, did_you_mean

ALGORITHMS: dict[str, type[Any]] = {
    cls.name: cls
    for cls in (NIW, Mixture, FedAvg, FedProx, FedBABU, PFedBayes, FedPA, FedBE, FedEM, FedPop, Ensemble, Centralised, LocalOnly)
}

MOST_COUNT = 10_000
"""The largest whole number among an algorithm's settings: they decide what is allocated, when a run is loaded too."""


def build(name: str, options: Mapping[str, Any] | None = None) -> Algorithm:
    """An algorithm by name with its own settings. Unknown names and settings are errors."""
    if name not in ALGORITHMS:
        raise InputError(f"unknown algorithm {name!r}{did_you_mean(name, ALGORITHMS)}: choose from {', '.join(ALGORITHMS)}")
    cls, values = ALGORITHMS[name], {}
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key, value in (options or {}).items():
        if key not in fields:
            raise InputError(f"{name} has no setting {key!r}{did_you_mean(key, fields)}: it has {', '.join(fields)}")
        values[key] = convert(f"{name}.{key}", value, fields[key].default)
    return check(cls(**values))


def check(algorithm: Any) -> Any:
    """The algorithm itself, after a check of what it is and of the settings that are words or have bounds."""
    if isinstance(algorithm, type) or not all(hasattr(algorithm, part) for part in ("__dataclass_fields__", "local_update")):
        what = f"the class {algorithm.__name__}" if isinstance(algorithm, type) else repr(algorithm)
        raise InputError(f"algorithm={what}: give an instance of an algorithm's class, such as fedhb.NIW()")
    choices = {
        "update": ("body", "full"),
        "begin": ("global", "last", "nearest") if algorithm.name == "mixture" else ("global", "last"),
        "dof": ("full", "per_coordinate", "per_layer"),
        "precision": ("mode", "mean"),
        "mode": ("preset", "ensemble"),
        "shuffle": ("client", "pooled"),
        "posterior": ("gaussian", "dirichlet"),
    }
    bounds = {
        "p_do": (0.0, 1.0),
        "kl_weight": (0.0, None),
        "lambda0": (0.0, None),
        "mu": (0.0, None),
        "noise": (0.0, None),
        "num_samples": (0, None),
        "rho": (0.0, None),
        "zeta": (0.0, None),
        "rho0": (-30.0, 5.0),
        "warm_up": (0, None),
        "burn_in": (0.0, 1.0),
        "server_momentum": (0.0, 1.0),
        "spread": (0.0, None),
        "distill_epochs": (0, None),
        "swa_start": (0.0, 1.0),
        "average": (0.0, 1.0),
        "weight_decay": (0.0, None),
    }
    positive = "prior_scale sigma2 num_prototypes num_learners num_models pi_steps local_samples server_lr num_components alpha"
    positive_names = (*positive.split(), "temperature", "server_batch_size", "head_epochs", "num_heads")
    for field in dataclasses.fields(algorithm):
        key, value = f"{algorithm.name}.{field.name}", getattr(algorithm, field.name)
        if type(value) is int and abs(value) > MOST_COUNT:
            raise InputError(f"{key}={value}: give a number of at most {MOST_COUNT}")
        if field.name in choices and value not in choices[field.name]:
            raise InputError(f"{key}={value!r}: choose {' or '.join(choices[field.name])}")
        low, high = bounds.get(field.name, (None, None))
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            raise InputError(
                f"{key}={value}: give a number of at least {low}" + (f" and at most {high}" if high is not None else "")
            )
        if field.name in positive_names and not value > 0:
            raise InputError(f"{key}={value}: give a positive number")
    return algorithm


__all__ = [
    "ALGORITHMS",
    "MOST_COUNT",
    "NIW",
    "Algorithm",
    "Arrays",
    "Centralised",
    "Ensemble",
    "FedAvg",
    "FedBABU",
    "FedBE",
    "FedEM",
    "FedPA",
    "FedPop",
    "FedProx",
    "Federation",
    "Hierarchical",
    "LocalOnly",
    "Mixture",
    "PFedBayes",
    "Personalised",
    "Plan",
    "Problem",
    "build",
    "check",
]
