"""problem.json: all that a stored run needs besides arrays. It may come from elsewhere, so nothing in it is believed unchecked.

Reading it runs no code of its choosing: a network by name is one of ours, and a factory of the user's own is imported only where
the user names it again. What it declares is bounded before anything is allocated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedhb import algorithms
from fedhb.algorithms import Algorithm, Federation, Plan
from fedhb.algorithms.contract import Arrays
from fedhb.clients.scaling import Scaling
from fedhb.runs.folder import RunFolder
from fedhb.errors import InputError, reason
from fedhb.likelihood import Categorical, GaussianRegression, Likelihood
from fedhb.network.factory import make_model, own_weights
from fedhb.network.vectors import Network
from fedhb.runs.run import Run, one_thread
from fedhb.runs.settings import MOST

NAME = "problem.json"
LIKELIHOODS: dict[str, type[Any]] = {"categorical": Categorical, "gaussian": GaussianRegression}

MOST_INPUTS = 2**28
"""Numbers of one example: they decide what is allocated."""

_NONSENSE = (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError, RuntimeError)


@dataclass(frozen=True)
class Stored:
    """A run's description. `model` is how its network is made again, None for a module of the user's own;
    `files` are the hashes of arrays that no checkpoint vouches for, `probe` is what the initial network gave for zeros."""

    model: Mapping[str, Any] | None
    head: str | None
    batch_norm: str
    input_shape: tuple[int, ...]
    scaling: Scaling
    likelihood: Mapping[str, Any]
    federation: Federation
    algorithm: Mapping[str, Any]
    personal_plan: Plan
    seed: int
    augment: str | None
    files: Mapping[str, str]
    probe: Sequence[float] | None = None

    @classmethod
    def read(cls, folder: RunFolder) -> Stored:
        """The description in this folder."""
        record = folder.read_json(NAME, required=True)
        try:
            return cls._parse(record)
        except _NONSENSE as error:
            raise InputError(
                f"{folder.path / NAME} makes no sense ({error}): restore it, or train again in another folder"
            ) from None

    @classmethod
    def _parse(cls, record: Mapping[str, Any]) -> Stored:
        shape, federation, plan, model = (record[key] for key in ("input_shape", "federation", "personal_plan", "model"))
        _check("input_shape", isinstance(shape, list) and all(_whole(n, 1) for n in shape) and math.prod(shape) <= MOST_INPUTS)
        classes = federation["num_classes"]
        _check("federation", _whole(federation["num_clients"], 1) and _whole(federation["num_examples"], 1))
        _check("num_classes", classes is None or _whole(classes, 1))
        _check("epochs", _whole(plan["epochs"], 1) and _whole(plan["batch_size"], 1))
        _check("lr", 0 < plan["lr"] < math.inf and 0 <= plan["momentum"] < 1 and plan["train_head"] in (True, False))
        _check("head", record["head"] is None or isinstance(record["head"], str))
        _check("batch_norm", record["batch_norm"] in ("running", "batch"))
        _check("seed", _whole(record["seed"], 0))
        _check("model", model is None or (isinstance(model["name"], str) and isinstance(model["options"], dict)))
        _check("num_outputs", model is None or _whole(model["num_outputs"], 1))
        settings = record["algorithm"]["settings"]
        _check("algorithm", isinstance(record["algorithm"]["name"], str) and isinstance(settings, dict))
        mean, std = (torch.tensor(record["scaling"][key], dtype=torch.float32) for key in ("mean", "std"))
        _check("scaling", bool(torch.isfinite(mean).all() and torch.isfinite(std).all() and (std > 0).all()))
        augment = record.get("augment")  # which runs did not keep at first
        _check("augment", augment is None or (augment == "crop-flip" and len(shape) == 3))
        found = record.get("probe")  # which runs did not keep at first
        _check("probe", found is None or (isinstance(found, list) and all(isinstance(v, float) for v in found)))
        files = record.get("files", {})
        _check("files", isinstance(files, dict) and all(isinstance(digest, str) for digest in files.values()))
        return cls(
            model=model,
            head=record["head"],
            batch_norm=record["batch_norm"],
            input_shape=tuple(shape),
            scaling=Scaling(mean, std),
            likelihood={"kind": str(record["likelihood"]["kind"]), "settings": dict(record["likelihood"]["settings"])},
            federation=Federation(federation["num_clients"], federation["num_examples"], classes),
            algorithm={"name": record["algorithm"]["name"], "class": record["algorithm"].get("class"), "settings": settings},
            probe=record.get("probe"),
            personal_plan=Plan(**plan),
            seed=record["seed"],
            augment=augment,
            files=files,
        )

    def make_model(self, folder: RunFolder, named: str | None, constants: Arrays) -> nn.Module:
        """The run's network from its name. A factory of the user's own is code: it runs only where the user names it."""
        if self.model is None:
            raise InputError(f"{folder.path} was trained with a module of your own: give it, load(path, model=...)")
        name, outputs, options = self.model["name"], self.model["num_outputs"], self.model["options"]
        if named is not None and named != name:
            raise InputError(
                f"{folder.path} was trained with model {name!r}, not with {named!r}: give the one it was trained with"
            )
        if ":" in name and named is None:
            raise InputError(
                f"{folder.path} was trained with {name!r}, which is code of your own: to run it, name it again, "
                f"load(path, model={name!r}) or --model {name}"
            )
        if ":" not in name:
            with torch.device("meta"):  # nothing is allocated: what is declared must be what is stored
                declared = sum(p.numel() for p in make_model(name, self.input_shape, outputs, options).parameters())
            stored = sum(constants[key].numel() for key in constants)
            if declared > stored:
                raise InputError(f"{folder.path / NAME} declares {declared} weights, but {stored} are stored: restore it")
        return make_model(name, self.input_shape, outputs, options)

    def recognise(self, folder: RunFolder, network: Network) -> None:
        """Refuse a module that has as many weights as the one that was trained, and does something else with them."""
        if self.probe is None:
            return
        found = probe(network, self.input_shape)
        if found is not None and (len(found) != len(self.probe) or not np.allclose(found, self.probe, rtol=1e-3, atol=1e-4)):
            raise InputError(
                f"{folder.path} was trained with another module, which gave {self.probe[:2]} where this one gives {found[:2]}: "
                "give the one that was trained"
            )

    def make_algorithm(self, folder: RunFolder, given: Algorithm | None) -> Algorithm:
        """The run's algorithm with its settings."""
        name = self.algorithm["name"]
        if given is not None:
            if given.name != name:
                raise InputError(
                    f"{folder.path} was trained with {name!r}, not with {given.name!r}: give the algorithm it was trained with"
                )
            here, there = json.loads(json.dumps(asdict(given))), self.algorithm["settings"]  # type: ignore[call-overload]
            for key in here.keys() & there.keys():  # others have come or gone with a version of its code
                if here[key] != there[key]:
                    raise InputError(
                        f"{folder.path} was trained with {name}.{key}={there[key]!r}, not with {here[key]!r}: give the settings "
                        "it was trained with"
                    )
            return given
        kind, known = self.algorithm.get("class"), algorithms.ALGORITHMS.get(name)
        if known is None or (kind is not None and kind != f"{known.__module__}.{known.__qualname__}"):
            raise InputError(
                f"{folder.path} was trained with {kind or repr(name)}, which is your own: give it, load(path, algorithm=...)"
            )
        made: Algorithm = algorithms.build(name, self.algorithm["settings"])
        return made

    def make_likelihood(self, folder: RunFolder, given: Likelihood | None) -> Likelihood:
        """The run's likelihood."""
        if given is not None:
            return given
        if self.likelihood["kind"] not in LIKELIHOODS:
            raise InputError(f"{folder.path} was trained with a likelihood of your own: give it, load(path, likelihood=...)")
        try:
            made: Likelihood = LIKELIHOODS[self.likelihood["kind"]](**self.likelihood["settings"])
            return made
        except _NONSENSE as error:
            raise InputError(f"{folder.path / NAME}: no such likelihood ({error}): restore it") from None


def problem_record(run: Run, head: str | None, batch_norm: str, rebuild: Mapping[str, Any] | None) -> dict[str, Any]:
    """What problem.json holds of a run."""
    likelihood: Any = run.problem.likelihood
    kind = next((name for name, cls in LIKELIHOODS.items() if type(likelihood) is cls), "own")
    federation, scaling, algorithm = run.problem.federation, run.problem.network.scaling, run.algorithm
    record = {
        "model": dict(rebuild) if rebuild else None,
        "head": head,
        "batch_norm": batch_norm,
        "input_shape": list(run.input_shape),
        "scaling": {"mean": scaling.mean.tolist(), "std": scaling.std.tolist()},
        "likelihood": {"kind": kind, "settings": asdict(likelihood) if kind != "own" else {}},
        "federation": {
            "num_clients": federation.num_clients,
            "num_examples": federation.num_examples,
            "num_classes": federation.num_classes,
        },
        "algorithm": {
            "name": algorithm.name,
            "class": class_of(algorithm),
            "settings": asdict(algorithm),  # type: ignore[call-overload]
        },
        "probe": probe(run.problem.network, run.input_shape),
        "personal_plan": asdict(run.personal_plan),
        "seed": run.seed,
        "augment": run.augment,
    }
    try:
        Stored._parse(json.loads(json.dumps(record)))
    except _NONSENSE as error:
        raise InputError(
            f"a run with these settings could not be loaded again ({error}): change them, or leave out --out"
        ) from None
    return record


def class_of(algorithm: Any) -> str:
    """What an algorithm is, whatever it is called."""
    kind = type(algorithm)
    return f"{kind.__module__}.{kind.__qualname__}"


def probe(network: Network, shape: Sequence[int]) -> list[float] | None:
    """The network's first outputs for zeros, by which a module is known again; None of one that gives others every time."""
    try:
        with one_thread():
            first, second = (
                network.outputs(own_weights(network), torch.zeros(1, 2, *shape, device=network.device)) for _ in range(2)
            )
    except Exception:  # of a module of the user's own, which may not take zeros
        return None
    found = first[0, 0].double().cpu()
    return found.tolist() if torch.equal(first, second) and bool(torch.isfinite(found).all()) else None


def try_out(folder: RunFolder, arrays: Sequence[Arrays], predict: Callable[[Tensor], Tensor], shape: Sequence[int]) -> None:
    """Refuse stored arrays that are not finite, or that two inputs of zeros cannot be predicted with."""
    for key, value in ((key, value) for part in arrays for key, value in part.items()):
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise InputError(f"{folder.path}: the stored {key!r} holds NaN or infinity: restore it, or train again")
    try:
        with one_thread():
            found = predict(torch.zeros(2, *shape))
    except InputError:
        raise
    except _NONSENSE as error:
        raise InputError(
            f"{folder.path}: its arrays do not fit its network ({reason(error)}): restore it, or train again"
        ) from None
    if not torch.isfinite(found).all():
        raise InputError(f"{folder.path}: it predicts NaN or infinity: restore it, or train again")


def _check(what: str, right: bool) -> None:
    if not right:
        raise ValueError(f"its {what!r}")


def _whole(value: Any, least: int, most: int = MOST) -> bool:
    return type(value) is int and least <= value <= most
