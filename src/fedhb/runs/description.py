"""problem.json: everything that a stored run needs besides arrays.

The file may come from elsewhere, so nothing in it is believed unchecked. Reading it runs no code of
its choosing: a network by name is one of fedhb's, and a factory of the user's own is imported only
where the user names it again. What it declares is bounded before anything is allocated.
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
from fedhb.errors import InputError, reason
from fedhb.likelihood import Categorical, GaussianRegression, Likelihood
from fedhb.network.factory import make_model, own_weights
from fedhb.network.vectors import Network
from fedhb.runs.folder import PROBLEM, RunFolder
from fedhb.runs.run import Run, one_thread
from fedhb.runs.settings import MOST_WHOLE

LIKELIHOODS: dict[str, type[Any]] = {"categorical": Categorical, "gaussian": GaussianRegression}

MOST_INPUTS = 2**28
"""The most numbers of one example: they decide how much is allocated."""

_NONSENSE = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    IndexError,
    RuntimeError,
)


@dataclass(frozen=True)
class Description:
    """A stored run.

    Attributes:
        model: how its network is made again; None for a module of the user's own.
        head, batch_norm: of the network.
        input_shape: of one example.
        scaling: of the inputs.
        likelihood: its kind and its settings.
        federation: the sizes of the federation.
        algorithm: its name, its settings, and whether it is the user's own.
        personal_plan: how it personalises.
        seed: of the run.
        augment: how its clients vary their inputs.
        probe: what the initial network returned for zeros.
        files: hashes of the arrays of a personal model; empty for a run.
    """

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
    probe: Sequence[float] | None
    files: Mapping[str, str]

    @classmethod
    def read(cls, folder: RunFolder) -> Description:
        """Return the description in this folder."""
        record = folder.read_json(PROBLEM, required=True)
        try:
            return cls.parse(record)
        except _NONSENSE as error:
            raise InputError(
                f"{folder.path / PROBLEM} makes no sense ({error}): restore it, or train again in "
                "another folder"
            ) from None

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Description:
        """Return the description that problem.json holds; one of _NONSENSE where it makes none."""
        shape, plan, model = (record[key] for key in ("input_shape", "personal_plan", "model"))
        federation, algorithm = record["federation"], record["algorithm"]
        sizes = isinstance(shape, list) and all(_whole(n, 1) for n in shape)
        _check("input_shape", sizes and math.prod(shape) <= MOST_INPUTS)
        classes = federation["num_classes"]
        counts = federation["num_clients"], federation["num_examples"]
        _check("federation", all(_whole(count, 1) for count in counts))
        _check("num_classes", classes is None or _whole(classes, 1))
        _check("epochs", _whole(plan["epochs"], 1) and _whole(plan["batch_size"], 1))
        _check("lr", 0 < plan["lr"] < math.inf and 0 <= plan["momentum"] < 1)
        _check("train_head", plan["train_head"] in (True, False))
        _check("head", record["head"] is None or isinstance(record["head"], str))
        _check("batch_norm", record["batch_norm"] in ("running", "batch"))
        _check("seed", _whole(record["seed"], 0))
        if model is not None:
            _check("model", isinstance(model["name"], str) and isinstance(model["options"], dict))
            _check("num_outputs", _whole(model["num_outputs"], 1))
        name, settings = algorithm["name"], algorithm["settings"]
        _check("algorithm", isinstance(name, str) and isinstance(settings, dict))
        _check("own", algorithm["own"] in (True, False))
        scaling = Scaling(
            *(torch.tensor(record["scaling"][key], dtype=torch.float32) for key in ("mean", "std"))
        )
        finite = torch.isfinite(scaling.mean).all() and torch.isfinite(scaling.std).all()
        _check("scaling", bool(finite and (scaling.std > 0).all()))
        augment, probed, files = record["augment"], record["probe"], record["files"]
        _check("augment", augment is None or (augment == "crop-flip" and len(shape) == 3))
        numbers = isinstance(probed, list) and all(isinstance(value, float) for value in probed)
        _check("probe", probed is None or numbers)
        hashes = isinstance(files, dict) and all(isinstance(v, str) for v in files.values())
        _check("files", hashes)
        return cls(
            model=model,
            head=record["head"],
            batch_norm=record["batch_norm"],
            input_shape=tuple(shape),
            scaling=scaling,
            likelihood={
                "kind": str(record["likelihood"]["kind"]),
                "settings": dict(record["likelihood"]["settings"]),
            },
            federation=Federation(*counts, classes),
            algorithm=algorithm,
            personal_plan=Plan(**plan),
            seed=record["seed"],
            augment=augment,
            probe=probed,
            files=files,
        )

    def make_model(self, folder: RunFolder, named: str | None, constants: Arrays) -> nn.Module:
        """Return the run's network.

        Args:
            folder: of the run.
            named: the factory that the user names. One of the user's own is code: it runs only
                where the user names it.
            constants: the stored network, which bounds what is allocated.
        """
        if self.model is None:
            raise InputError(
                f"{folder.path} was trained with a module of your own: give it, "
                "load(path, model=...)"
            )
        name, outputs, options = (self.model[key] for key in ("name", "num_outputs", "options"))
        if named is not None and named != name:
            raise InputError(
                f"{folder.path} was trained with model {name!r}, not with {named!r}: give the one "
                "it was trained with"
            )
        if ":" in name and named is None:
            raise InputError(
                f"{folder.path} was trained with {name!r}, which is code of your own: to run it, "
                f"name it again, load(path, model={name!r}) or --model {name}"
            )
        if ":" not in name:
            with torch.device("meta"):  # allocates nothing: compare what is declared and stored
                module = make_model(name, self.input_shape, outputs, options)
            declared = sum(weights.numel() for weights in module.parameters())
            stored = sum(value.numel() for value in constants.values())
            if declared > stored:
                raise InputError(
                    f"{folder.path / PROBLEM} declares {declared} weights, but {stored} are "
                    "stored: restore it"
                )
        return make_model(name, self.input_shape, outputs, options)

    def recognise(self, folder: RunFolder, network: Network) -> None:
        """Refuse a module with as many weights as the trained one that computes something else."""
        outputs = probe(network, self.input_shape) if self.probe is not None else None
        if self.probe is None or outputs is None:
            return
        if len(outputs) != len(self.probe) or not np.allclose(
            outputs, self.probe, rtol=1e-3, atol=1e-4
        ):
            raise InputError(
                f"{folder.path} was trained with another module, which gave {self.probe[:2]} "
                f"where this one gives {outputs[:2]}: give the one that was trained"
            )

    def make_algorithm(self, folder: RunFolder, given: Algorithm | None) -> Algorithm:
        """Return the run's algorithm with its settings; one of the user's own must be given."""
        name, settings = self.algorithm["name"], self.algorithm["settings"]
        if given is None:
            if self.algorithm["own"] or name not in algorithms.ALGORITHMS:
                raise InputError(
                    f"{folder.path} was trained with {name!r}, which is your own: give it, "
                    "load(path, algorithm=...)"
                )
            return algorithms.build(name, settings)
        if given.name != name:
            raise InputError(
                f"{folder.path} was trained with {name!r}, not with {given.name!r}: give the "
                "algorithm it was trained with"
            )
        values = json.loads(json.dumps(asdict(given)))  # type: ignore[call-overload]
        for key in values.keys() & settings.keys():  # others come and go with versions of its code
            if values[key] != settings[key]:
                raise InputError(
                    f"{folder.path} was trained with {name}.{key}={settings[key]!r}, not with "
                    f"{values[key]!r}: give the settings it was trained with"
                )
        return given

    def make_likelihood(self, folder: RunFolder, given: Likelihood | None) -> Likelihood:
        """Return the run's likelihood; one of the user's own must be given."""
        if given is not None:
            return given
        if self.likelihood["kind"] not in LIKELIHOODS:
            raise InputError(
                f"{folder.path} was trained with a likelihood of your own: give it, "
                "load(path, likelihood=...)"
            )
        try:
            made: Likelihood = LIKELIHOODS[self.likelihood["kind"]](**self.likelihood["settings"])
            return made
        except _NONSENSE as error:
            raise InputError(
                f"{folder.path / PROBLEM}: no such likelihood ({error}): restore it"
            ) from None


def problem_record(run: Run, head: str | None, model: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the content of problem.json.

    Args:
        run: that is stored.
        head: the name of the network's head, where it was given.
        model: how the network is made again; None for a module of the user's own.
    """
    likelihood: Any = run.problem.likelihood
    kind = next((name for name, cls in LIKELIHOODS.items() if type(likelihood) is cls), "own")
    federation, network, algorithm = run.problem.federation, run.problem.network, run.algorithm
    record = {
        "model": dict(model) if model else None,
        "head": head,
        "batch_norm": network.batch_norm,
        "input_shape": list(run.input_shape),
        "scaling": {"mean": network.scaling.mean.tolist(), "std": network.scaling.std.tolist()},
        "likelihood": {"kind": kind, "settings": asdict(likelihood) if kind != "own" else {}},
        "federation": {
            "num_clients": federation.num_clients,
            "num_examples": federation.num_examples,
            "num_classes": federation.num_classes,
        },
        "algorithm": {
            "name": algorithm.name,
            "own": type(algorithm) is not algorithms.ALGORITHMS.get(algorithm.name),
            "settings": asdict(algorithm),  # type: ignore[call-overload]
        },
        "probe": probe(network, run.input_shape),
        "personal_plan": asdict(run.personal_plan),
        "seed": run.seed,
        "augment": run.augment,
        "files": {},
    }
    try:
        Description.parse(json.loads(json.dumps(record)))
    except _NONSENSE as error:
        raise InputError(
            f"a run with these settings could not be loaded again ({error}): change them, or leave "
            "out --out"
        ) from None
    return record


def probe(network: Network, shape: Sequence[int]) -> list[float] | None:
    """Return the network's first outputs for zeros, by which it is recognised.

    None stands for a network that cannot take zeros, or has other outputs every time.
    """
    try:
        with one_thread():
            first, second = (
                network.outputs(
                    own_weights(network), torch.zeros(1, 2, *shape, device=network.device)
                )
                for _ in range(2)
            )
    except Exception:  # of a module of the user's own, which may not take zeros
        return None
    outputs = first[0, 0].double().cpu()
    alike = torch.equal(first, second) and bool(torch.isfinite(outputs).all())
    return outputs.tolist() if alike else None


def try_out(
    folder: RunFolder,
    arrays: Sequence[Arrays],
    predict: Callable[[Tensor], Tensor],
    shape: Sequence[int],
) -> None:
    """Refuse stored arrays that are not finite, or that cannot predict two inputs of zeros."""
    for key, value in ((key, value) for part in arrays for key, value in part.items()):
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise InputError(
                f"{folder.path}: the stored {key!r} holds NaN or infinity: restore it, or train "
                "again"
            )
    try:
        with one_thread():
            prediction = predict(torch.zeros(2, *shape))
    except InputError:
        raise
    except _NONSENSE as error:
        raise InputError(
            f"{folder.path}: its arrays do not fit its network ({reason(error)}): restore it, or "
            "train again"
        ) from None
    if not torch.isfinite(prediction).all():
        raise InputError(f"{folder.path}: it predicts NaN or infinity: restore it, or train again")


def _check(name: str, right: bool) -> None:
    if not right:
        raise ValueError(f"its {name!r}")


def _whole(value: Any, least: int, most: int = MOST_WHOLE) -> bool:
    return type(value) is int and least <= value <= most
