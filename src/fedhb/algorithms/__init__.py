"""The algorithms, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedhb.algorithms.centralised import Centralised
from fedhb.algorithms.contract import Algorithm, Arrays, Federation, Personalised, Problem
from fedhb.algorithms.empirical_bayes.model import EmpiricalBayes
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
from fedhb.settings_fields import bounded, convert, did_you_mean
from fedhb.training.plan import Plan
from fedhb.user_code import imported

ALGORITHMS: dict[str, type[Any]] = {
    cls.name: cls
    for cls in (
        EmpiricalBayes,
        NIW,
        Mixture,
        FedAvg,
        FedProx,
        FedBABU,
        PFedBayes,
        FedPA,
        FedBE,
        FedEM,
        FedPop,
        Ensemble,
        Centralised,
        LocalOnly,
    )
}


def build(name: str, options: Mapping[str, Any] | None = None) -> Algorithm:
    """Return an algorithm by its name, with its own settings.

    An algorithm of the user's own is named pkg.mod:Class.
    """
    cls, values = class_of(name), {}
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key, value in (options or {}).items():
        if key not in fields:
            raise InputError(
                f"{name} has no setting {key!r}{did_you_mean(key, fields)}: it has "
                f"{', '.join(fields)}"
            )
        values[key] = convert(f"{name}.{key}", value, fields[key].default)
    return check(cls(**values))


def class_of(name: str) -> type[Any]:
    """Return the class of an algorithm by its name, or by pkg.mod:Class."""
    if ":" in name:
        cls: type[Any] = imported("algorithm", name, "Class")
        return cls
    if name not in ALGORITHMS:
        raise InputError(
            f"unknown algorithm {name!r}{did_you_mean(name, ALGORITHMS)}: choose from "
            f"{', '.join(ALGORITHMS)}, or give pkg.mod:Class"
        )
    return ALGORITHMS[name]


def check(algorithm: Any) -> Any:
    """Return the algorithm, after a check that it is one and that its settings are in bounds.

    numpy's numbers become Python's among its settings, because files hold those.
    """
    is_class = isinstance(algorithm, type)
    parts = ("__dataclass_fields__", "local_update")
    if is_class or not all(hasattr(algorithm, part) for part in parts):
        given = f"the class {algorithm.__name__}" if is_class else repr(algorithm)
        raise InputError(
            f"algorithm={given}: give an instance of an algorithm's class, such as fedhb.NIW()"
        )
    values = {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)}
    scalars = {key: value.item() for key, value in values.items() if isinstance(value, np.generic)}
    if scalars:
        algorithm = dataclasses.replace(algorithm, **scalars)
    for field in dataclasses.fields(algorithm):
        bounded(f"{algorithm.name}.{field.name}", getattr(algorithm, field.name), field)
    return algorithm


__all__ = [
    "ALGORITHMS",
    "NIW",
    "Algorithm",
    "Arrays",
    "Centralised",
    "EmpiricalBayes",
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
