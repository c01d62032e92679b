"""Loading runs and personal models from their folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from torch import nn
from typing import Any
import numpy as np
import os
import pytest
import subprocess
import sys
import tomllib
import torch
from builders import CASES
from builders import CLASSES
from builders import FEATURES
from builders import NETWORKS
from builders import Wrapped
from builders import arrays
from builders import clients
from builders import mlp
from fedhb.clients.clients import Clients
from fedhb.errors import InputError
from fedhb.runs.load import save_personal
from fitted import X
from fitted import fit
import fedhb


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_run_is_the_run(name, tmp_path):
    run = fit(None, None, CASES[name], out=tmp_path / "run")
    again = fedhb.load(
        tmp_path / "run", model=mlp(torch.float32, seed=5)
    )  # its own weights do not matter
    assert (
        again.algorithm == run.algorithm
        and again.result == run.result
        and again.records == run.records
    )
    assert again.seed == run.seed and again.personal_plan == run.personal_plan
    np.testing.assert_array_equal(again.predict(X), run.predict(X))
    x, y = arrays()[2]
    mine, mine_again = run.personalise(x, y), again.personalise(x, y)
    np.testing.assert_array_equal(mine_again.predict(X), mine.predict(X))
    assert not np.allclose(mine.predict(X), run.predict(X))
    for p in (run.predict(X), mine.predict(X)):
        assert p.shape == (9, CLASSES) and (p >= 0).all()
        np.testing.assert_allclose(p.sum(1), 1, rtol=1e-5)


@pytest.mark.parametrize("network", ["mlp", "dropout", "batch norm"])
@pytest.mark.parametrize("batch_norm", ["running", "batch"])
def test_any_network_survives_the_folder(network, batch_norm, tmp_path):
    make = NETWORKS[network]
    model = Wrapped(make(torch.float32))
    run = fit(
        model,
        clients(standardise=True),
        fedhb.NIW(update="full"),
        out=tmp_path / "run",
        batch_norm=batch_norm,
    )
    again = fedhb.load(tmp_path / "run", model=Wrapped(make(torch.float32)))
    np.testing.assert_array_equal(again.predict(X), run.predict(X))
    x, y = arrays()[0]
    np.testing.assert_array_equal(
        again.personalise(x, y).predict(X), run.personalise(x, y).predict(X)
    )


def test_a_frozen_layer_survives_the_folder(tmp_path):
    def model(seed: int) -> nn.Module:
        layers = mlp(torch.float32, seed)
        layers.hidden.weight.requires_grad_(False)
        return layers

    run = fit(model(0), out=tmp_path / "run")
    np.testing.assert_array_equal(
        fedhb.load(tmp_path / "run", model=model(1)).predict(X), run.predict(X)
    )


SCRIPT = """
import sys
import numpy as np
import fedhb
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
    def forward(self, x):
        return self.last(self.first(x).cos())

if len(sys.argv) > 1:
    folder = sys.argv[1]
    built_in, own = fedhb.load(folder + "/built-in"), fedhb.load(folder + "/own", model=Mine())
    x, y, new = (np.load(f"{folder}/{name}.npy") for name in ("x", "y", "new"))
    np.save(folder + "/found.npy", [r for run in (built_in, own) for r in (run.predict(new), run.personalise(x, y).predict(new))])
"""


def test_a_run_is_loaded_in_another_process(tmp_path):
    """A built-in network by its folder alone, a module of one's own with the module: the numbers
    are equal to the last bit.
    """
    scope: dict[str, Any] = {"__name__": "script"}
    exec(SCRIPT.replace("len(sys.argv) > 1", "False"), scope)
    built_in = fedhb.nets.mlp((FEATURES,), CLASSES, hidden=7)
    spec = {"name": "mlp", "num_outputs": CLASSES, "options": {"hidden": 7}}
    runs = [
        fit(built_in, None, fedhb.Mixture(), out=tmp_path / "built-in", rebuild=spec),
        fit(scope["Mine"](), None, fedhb.NIW(begin="last"), out=tmp_path / "own"),
    ]
    x, y = arrays()[2]
    for name, value in (("x", x), ("y", y), ("new", X)):
        np.save(tmp_path / f"{name}.npy", value)
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(fedhb.__file__).parents[1])}
    subprocess.run(
        [sys.executable, "-W", "error", "script.py", str(tmp_path)],
        check=True,
        cwd=tmp_path,
        env=environment,
    )
    found = np.load(tmp_path / "found.npy")
    expected = [p for run in runs for p in (run.predict(X), run.personalise(x, y).predict(X))]
    np.testing.assert_array_equal(found, expected)


def test_a_personal_model_has_a_folder_of_its_own(tmp_path):
    from fedhb.runs.load import save_personal

    run = fit(None, None, fedhb.NIW(), out=tmp_path / "run")
    mine = run.personalise(*arrays()[2])
    save_personal(tmp_path / "mine", tmp_path / "run", mine)
    loaded = fedhb.load(tmp_path / "mine", model=mlp(torch.float32, seed=3))
    np.testing.assert_array_equal(loaded.predict(X), mine.predict(X))


@pytest.mark.parametrize("outputs", [2, 4])
def test_several_targets_survive_the_folder(outputs, tmp_path):
    model = mlp(torch.float32, outputs=outputs)
    run = fit(
        model,
        Clients.from_arrays([(x, x[:, :2] * [1.0, 50.0]) for x, _ in arrays([30] * 4)]),
        out=tmp_path / "run",
    )
    again = fedhb.load(tmp_path / "run", model=model)
    assert again.problem.likelihood == run.problem.likelihood and isinstance(
        again.problem.likelihood.scale, tuple
    )
    np.testing.assert_array_equal(again.predict(X), run.predict(X))


@dataclass(frozen=True)
class Mine(fedhb.FedAvg):
    """With settings of kinds that ours do not have."""

    name = "mine"
    cap: float | None = None
    layers: tuple[int, ...] = (1, 2)
    note: str = 'a "word"'


def test_an_algorithm_of_ones_own_with_any_settings_is_loaded_and_described(tmp_path):
    run = fit(None, None, Mine(), out=tmp_path / "run")
    loaded = fedhb.load(tmp_path / "run", model=mlp(torch.float32), algorithm=Mine())
    np.testing.assert_array_equal(loaded.predict(X), run.predict(X))
    own = tomllib.loads((tmp_path / "run/settings.toml").read_text())["mine"]
    assert own["layers"] == [1, 2] and own["note"] == 'a "word"' and "cap" not in own
    with pytest.raises(
        InputError, match=r"mine\.note='a \"word\"'.*'another'"
    ):
        fedhb.load(tmp_path / "run", model=mlp(torch.float32), algorithm=Mine(note="another"))


def test_a_folder_of_runs_is_no_run(tmp_path):
    fit(None, None, fedhb.FedAvg(), out=tmp_path / "several/fedavg-seed0")
    with pytest.raises(
        InputError,
        match="several.*fedavg-seed0",
    ):
        fedhb.load(tmp_path / "several")
    (tmp_path / "file.npz").write_bytes(b"")
    with pytest.raises(InputError, match=r"file\.npz.*run"):
        fedhb.load(tmp_path / "file.npz")


def test_settings_of_an_algorithm_of_ones_own_have_no_bounds_of_ours(tmp_path):
    @dataclass(frozen=True)
    class Mine(fedhb.FedAvg):
        name = "mine"
        mode: str = "fast"
        alpha: float = 0.0
        rho: float = -1.0
        buffer: int = 50_000

    run = fit(None, None, Mine(), out=tmp_path / "run")
    assert (
        fedhb.load(tmp_path / "run", model=mlp(torch.float32), algorithm=Mine()).result
        == run.result
    )


def test_a_personal_model_takes_no_folder_that_holds_something(tmp_path):
    run = fit(out=tmp_path / "run")
    mine = run.personalise(*arrays()[0])
    with pytest.raises(InputError, match="run.*new folder"):
        save_personal(tmp_path / "run", tmp_path / "run", mine)
    assert isinstance(fedhb.load(tmp_path / "run", model=mlp(torch.float32)), fedhb.Run)
    save_personal(tmp_path / "mine", tmp_path / "run", mine)
    assert isinstance(fedhb.load(tmp_path / "mine", model=mlp(torch.float32)), fedhb.Personal)


def test_a_run_is_not_loaded_with_another_module(tmp_path):
    """Two networks with equally many weights may differ in their layers or functions."""
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    run = fit(net, out=tmp_path / "run")
    np.testing.assert_array_equal(
        fedhb.load(tmp_path / "run", model=net).predict(X), run.predict(X)
    )
    others = [
        nn.Sequential(net[0], nn.Tanh(), net[2]),
        nn.Sequential(net[0], nn.ReLU(), Twice(net[2])),
    ]
    for other in others:
        with pytest.raises(InputError, match="another module"):
            fedhb.load(tmp_path / "run", model=other)


class Twice(nn.Module):
    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = 2 * self.inner(x)
        return found


def test_a_subclass_without_a_name_of_its_own_is_not_taken_for_the_built_in(tmp_path):
    @dataclass(frozen=True)
    class Tempered(fedhb.FedAvg):
        def predict(self, problem: Any, server: Any, x: Any, rng: Any, memory: Any = None) -> Any:
            p = super().predict(problem, server, x, rng, memory) ** 0.1
            return p / p.sum(-1, keepdim=True)

    run = fit(None, None, Tempered(), out=tmp_path / "run")
    with pytest.raises(
        InputError, match=r"Tempered.*load\(path, algorithm"
    ):
        fedhb.load(tmp_path / "run", model=mlp(torch.float32))
    again = fedhb.load(tmp_path / "run", model=mlp(torch.float32), algorithm=Tempered())
    np.testing.assert_array_equal(again.predict(X), run.predict(X))


def test_a_personal_model_is_kept_with_its_own_run_alone(tmp_path):
    pairs = arrays([20] * 4)
    one, two = (
        fit(
            who=Clients.from_arrays([(k * x, y) for x, y in pairs], standardise=True),
            out=tmp_path / str(k),
        )
        for k in (1, 2)
    )
    with pytest.raises(InputError, match="2 .*run"):
        save_personal(tmp_path / "mine", tmp_path / "2", one.personalise(*pairs[0]))
    save_personal(tmp_path / "mine", tmp_path / "2", two.personalise(*pairs[0]))
