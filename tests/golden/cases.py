"""Short runs of everything that has numbers: their results must stay what they are while the code
around them changes.

Each case is a function that takes an empty folder and returns arrays by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedhb
from fedhb.algorithms import ALGORITHMS, build

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))  # where the in-process nodes are

Numbers = dict[str, np.ndarray]

NAMES = {"empirical-bayes": "niw", "niw": "niw"} if "empirical-bayes" not in ALGORITHMS else {}
PRINTED = {"dof": "full", "kl_weight": 1e-4, "num_samples": 1, "average": 0.0}


def made(name: str, **options: Any) -> Any:
    """An algorithm by its name with these settings."""
    if NAMES:
        return build(NAMES.get(name, name), options)
    return build(
        name, {key: value for key, value in options.items() if (name, key) not in CONSTANT}
    )


CONSTANT: set[tuple[str, str]] = set()


def clients(server_share: int = 0, **options: Any) -> fedhb.Clients:
    """Twenty clients with three shards of the digits each."""
    who = fedhb.partition.shards(fedhb.data.load("digits"), 20, 3, seed=1)
    x = fedhb.data.load("digits").test.x[:server_share]
    return dataclasses.replace(who, server_inputs=torch.from_numpy(x)) if server_share else who


def images(
    side: int = 12, sizes: tuple[int, ...] = (24, 17, 30, 9, 21, 26), channels: int = 1
) -> fedhb.Clients:
    """Clients of different sizes with images of three classes."""
    rng = np.random.default_rng(7)
    means = rng.normal(size=(3, channels, side, side))

    def pairs(lengths: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
        labels = [rng.integers(0, 3, n) for n in lengths]
        return [
            ((means[y] + rng.normal(size=(len(y), channels, side, side))).astype(np.float32), y)
            for y in labels
        ]

    return fedhb.Clients.from_arrays(pairs(sizes), pairs((6,) * len(sizes)), num_classes=3)


def two_targets() -> fedhb.Clients:
    """Clients with two real targets of very different scale."""
    rng = np.random.default_rng(3)

    def pair(n: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.normal(size=(n, 3)).astype(np.float32)
        y = x @ np.array([[1.0, 200.0], [-2.0, 50.0], [0.5, 0.0]]) + rng.normal(size=(n, 2)) * [
            0.3,
            30.0,
        ]
        return x, y.astype(np.float32)

    return fedhb.Clients.from_arrays(
        [pair(n) for n in (12, 20, 7, 15)], [pair(8) for _ in range(4)], standardise=True
    )


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A module with fixed first weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return make()


def mlp() -> nn.Module:
    """A small network for the digits."""
    return seeded(lambda: fedhb.nets.mlp((1, 8, 8), 10, hidden=12))


def numbers(run: fedhb.Run) -> Numbers:
    """The server's state, what clients remember, the metrics, and the records of the rounds."""
    found = {f"server/{key}": as_array(value) for key, value in run.state.server.items()}
    for client, memory in sorted(run.state.store.memories.items()):
        found |= {f"memory/{client}/{key}": as_array(value) for key, value in memory.items()}
    for task in ("global", "personalised"):
        if run.result.get(task):
            found[f"result/{task}"] = np.array(list(run.result[task].values()))
    if run.result.get("holdout"):
        found["result/holdout"] = np.array(
            [list(run.result["holdout"][task].values()) for task in ("global", "personalised")]
        )
    if run.result.get("per_client"):
        found["result/per_client"] = np.array(
            [v for k, v in run.result["per_client"].items() if k != "client"], dtype=float
        )
    for key in ("loss", "score", "negative_elbo", "kl", "up_bytes", "down_bytes"):
        values = [record[key] for record in run.records if record.get(key) is not None]
        if values:
            found[f"rounds/{key}"] = np.array(values, dtype=float)
    return found


def as_array(value: Tensor) -> np.ndarray:
    """The tensor's numbers."""
    return value.detach().cpu().numpy().copy()


def fit(
    algorithm: Any, who: fedhb.Clients | None = None, model: nn.Module | None = None, **options: Any
) -> fedhb.Run:
    """A short run."""
    given = {
        "rounds": 3,
        "fraction": 0.5,
        "batch_size": 10,
        "personal_epochs": 2,
        "seed": 4,
        "workers": 1,
        "progress": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fedhb.fit(model or mlp(), who or clients(), algorithm, **given | options)


def resumed(algorithm: Any, folder: Path) -> Numbers:
    """A run that was stopped after its second round and goes on."""

    class Stop(fedhb.Callback):
        def on_round(self, record: dict[str, Any], state: Any) -> None:
            if state.done == 2:
                raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        fit(algorithm, rounds=4, out=folder / "run", callbacks=[Stop()])
    return numbers(fit(algorithm, rounds=4, out=folder / "run", resume=True))


def private(algorithm: Any, folder: Path) -> Numbers:
    """A private run with a known key."""
    (folder / "run").mkdir()
    (folder / "run" / "noise.key").write_bytes(bytes(range(32)))
    return numbers(fit(algorithm, out=folder / "run", dp_noise=0.5, dp_clip=0.5))


def held_out(algorithm: Any) -> Numbers:
    """A run with clients that never train."""
    train, novel = clients().hold_out(5, seed=2)
    return numbers(fit(algorithm, train, holdout=novel))


def predicted(algorithm: Any, folder: Path) -> Numbers:
    """Predictions of a run, of what is loaded from its folder, and of a personal model."""
    run = fit(algorithm, out=folder / "run")
    digits = fedhb.data.load("digits").test
    mine = run.personalise(digits.x[:30], digits.y[:30])
    loaded = fedhb.load(folder / "run", model=mlp())
    return {
        "global": run.predict(digits.x[30:40]),
        "loaded": loaded.predict(digits.x[30:40]),
        "personal": mine.predict(digits.x[30:40]),
        "theta": as_array(mine.posterior.theta),
    }


def evaluation(algorithm: Any, folder: Path) -> Numbers:
    """Return the numbers of evaluation.json that describe the posterior."""
    import json

    fit(algorithm, out=folder / "run")
    posterior = json.loads((folder / "run" / "evaluation.json").read_text())["posterior"]
    return {
        f"posterior/{key}": np.array(value, dtype=float)
        for key, value in posterior.items()
        if value is not None
    }


def on_flower(name: str, folder: Path, **changes: Any) -> Numbers:
    """Three nodes in this process."""
    from loopback import Loopback

    from fedhb.flower.server_app import serve
    from fedhb.runs.settings import Settings

    small = {
        "dataset": "digits", "num_clients": 3, "shards_per_client": 4, "max_examples": 40, "fraction": 1.0, "rounds": 2,
        "batch_size": 10, "personal_epochs": 1, "workers": 1, "algorithm": NAMES.get(name, name),
        "model": {"name": "mlp", "hidden": 6},
    }  # fmt: skip
    settings = Settings.resolve(small | changes, {})
    config = {
        "settings": settings.to_toml({}),
        "out": str(folder / "out"),
        "nodes": 3,
        "poll": 0.001,
        "deadline": 5.0,
    }
    run = serve(Loopback([{"partition-id": k} for k in range(3)], config), config)
    return numbers(run)


def small_mobilenet(channels: int = 3) -> nn.Module:
    """MobileNet of an eighth of its width."""
    return seeded(lambda: fedhb.nets.mobilenet((channels, 32, 32), 3, width=0.125))


def mobile(algorithm: Any, **options: Any) -> Numbers:
    """A run of a small MobileNet."""
    who, some = images(32, (9, 12, 7), 3), {"rounds": 2, "local_epochs": 1, "personal_epochs": 1}
    return numbers(fit(algorithm, who, small_mobilenet(), **some | options))


def cases() -> dict[str, Callable[[Path], Numbers]]:
    """Every case by its name."""
    found: dict[str, Callable[[Path], Numbers]] = {}

    def add(name: str, run: Callable[[Path], Numbers]) -> None:
        found[name] = run

    for name in (
        "empirical-bayes",
        *(n for n in ALGORITHMS if n not in ("niw", "empirical-bayes")),
    ):
        for workers in (1, 2):
            share = 40 if name == "fedbe" else 0
            add(
                f"{name}, {workers} workers",
                lambda _, n=name, w=workers, s=share: numbers(fit(made(n), clients(s), workers=w)),
            )
    for update in ("body", "full"):
        for dof in ("full", "per_coordinate"):
            options = PRINTED | {"dof": dof, "update": update}
            add(
                f"printed niw, {dof}, {update}", lambda _, o=options: numbers(fit(made("niw", **o)))
            )
    add(
        "printed niw, dropout",
        lambda _: numbers(
            fit(made("niw", **PRINTED | {"p_do": 0.7, "num_samples": 2, "lambda0": 1.0}))
        ),
    )
    add("printed niw, two workers", lambda _: numbers(fit(made("niw", **PRINTED), workers=2)))
    add(
        "learned prior, dropout",
        lambda _: numbers(fit(made("empirical-bayes", p_do=0.7, num_samples=2))),
    )
    add(
        "learned prior, body",
        lambda _: numbers(fit(made("empirical-bayes", update="body", lambda0=1.0))),
    )
    add("learned prior, last", lambda _: numbers(fit(made("empirical-bayes", begin="last"))))
    add(
        "learned prior, few steps",
        lambda _: numbers(fit(made("empirical-bayes"), batch_size=50, local_epochs=2)),
    )
    add("averaged", lambda _: numbers(fit(made("empirical-bayes", average=0.5))))
    for K in (1, 3):
        add(
            f"mixture, {K}",
            lambda _, k=K: numbers(fit(made("mixture", num_prototypes=k, noise=0.1, sigma2=0.1))),
        )
    add(
        "mixture, nearest",
        lambda _: numbers(
            fit(made("mixture", num_prototypes=3, noise=0.3, begin="nearest", shrink=True))
        ),
    )
    add(
        "mixture, body, last",
        lambda _: numbers(fit(made("mixture", update="body", begin="last", patience=0))),
    )
    for name, options in {
        "fedem": {"noise": 0.0, "tune": False}, "ensemble": {"mode": "ensemble", "noise": 0.0}, "fedpop": {"update": "body"},
        "fedbe": {"posterior": "dirichlet"}, "centralised": {"shuffle": "client"}, "fedpa": {"local_samples": 3, "burn_in": 0.2},
        "pfedbayes": {"update": "body", "num_samples": 2}, "fedbabu": {"weight_decay": 1e-3}, "fedavg": {"update": "body"},
    }.items():  # fmt: skip
        add(f"{name}, other settings", lambda _, n=name, o=options: numbers(fit(made(n, **o))))

    def convnet():
        return seeded(lambda: fedhb.nets.convnet((1, 28, 28), 3))

    some = {"rounds": 2, "local_epochs": 1, "personal_epochs": 1}
    for name in ("empirical-bayes", "mixture", "fedavg"):
        add(
            f"convnet, {name}",
            lambda _, n=name: numbers(fit(made(n), images(28), convnet(), **some)),
        )
        for norm in ("running", "batch"):
            add(
                f"mobilenet, {norm}, {name}",
                lambda _, n=name, b=norm: mobile(made(n), batch_norm=b),
            )
    add("mobilenet, printed niw", lambda _: mobile(made("niw", **PRINTED)))

    def table(outputs):
        return seeded(lambda: fedhb.nets.mlp((3,), outputs, hidden=5))

    for name in ("empirical-bayes", "mixture", "fedavg", "fedbe"):
        add(f"regression, {name}", lambda _, n=name: numbers(fit(made(n), two_targets(), table(4))))
    add(
        "regression, fixed noise",
        lambda _: numbers(fit(made("empirical-bayes"), two_targets(), table(2))),
    )

    def ragged():
        return images(4, (3, 21, 2, 40, 11, 1, 8))

    def small():
        return seeded(lambda: fedhb.nets.mlp((1, 4, 4), 3, hidden=5))

    for name in ("empirical-bayes", "mixture", "fedem", "pfedbayes", "fedavg"):
        add(
            f"ragged, {name}",
            lambda _, n=name: numbers(fit(made(n), ragged(), small(), fraction=1.0)),
        )
    for name in ("empirical-bayes", "mixture", "fedem", "fedpop", "local"):
        add(f"hold out, {name}", lambda _, n=name: held_out(made(n)))
    for name in ("empirical-bayes", "mixture", "fedem", "fedpop", "pfedbayes", "local", "fedpa"):
        add(f"resumed, {name}", lambda folder, n=name: resumed(made(n), folder))
    for defence in ("default", "refuse", "clip", "winsorise", "krum"):
        add(
            f"defence, {defence}",
            lambda _, d=defence: numbers(fit(made("empirical-bayes"), defence=d)),
        )
    for name in ("mixture", "fedem", "fedavg", "ensemble", "fedbe"):
        add(
            f"defended, {name}",
            lambda _, n=name: numbers(fit(made(n), defence="refuse,clip,winsorise,krum")),
        )
    for name in ("empirical-bayes", "mixture", "fedavg", "fedbabu"):
        add(f"private, {name}", lambda folder, n=name: private(made(n), folder))
    add("private, printed niw", lambda folder: private(made("niw", **PRINTED), folder))
    for name in ("empirical-bayes", "mixture", "fedem", "ensemble", "pfedbayes", "fedpop"):
        add(f"predicted, {name}", lambda folder, n=name: predicted(made(n), folder))
    for name in ("empirical-bayes", "mixture", "fedavg"):
        add(f"evaluation, {name}", lambda folder, n=name: evaluation(made(n), folder))
    add("evaluation, printed niw", lambda folder: evaluation(made("niw", **PRINTED), folder))
    for name in ("empirical-bayes", "mixture", "fedavg", "fedem"):
        add(f"flower, {name}", lambda folder, n=name: on_flower(n, folder))
    add("flower, defended", lambda folder: on_flower("empirical-bayes", folder, defence="default"))
    return found
