"""From what a user gives to a network and a likelihood that fit together."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from builders import CLASSES, FEATURES, arrays, batch_norm_net, clients, mlp
from fitted import X, fit
from torch import nn

import fedhb
from fedhb.clients.clients import Clients
from fedhb.errors import InputError
from fedhb.likelihood import CALM, GaussianRegression
from fedhb.network import nets
from fedhb.network.factory import LEAST_DEVIATION, make_model


def test_a_single_example_has_no_deviation():
    who = Clients.from_arrays([(X[:1], X[:1, :2])])
    assert fit(mlp(torch.float32, outputs=4), who, fraction=1.0).problem.likelihood.scale == (
        LEAST_DEVIATION,
        LEAST_DEVIATION,
    )


def test_one_target_has_plain_numbers():
    """Those of all its examples at once, whether or not it has an axis of its own: records and
    fingerprints hold them.
    """
    pairs = arrays([30] * 4)
    y = torch.from_numpy(np.concatenate([x[:, 0] for x, _ in pairs]).astype(np.float32)).double()
    expected = GaussianRegression(1, centre=y.mean().item(), scale=y.std().item(), **CALM)
    for column in (0, slice(0, 1)):
        run = fit(
            mlp(torch.float32, outputs=2),
            Clients.from_arrays([(x, x[:, column]) for x, _ in pairs]),
        )
        assert run.problem.likelihood == expected and isinstance(
            run.problem.likelihood.scale, float
        )


@pytest.mark.parametrize("batch_norm", ["running", "batch"])
def test_single_examples_under_batch_norm_are_refused_before_the_first_round(batch_norm, tmp_path):
    some, tests = arrays([9, 9, 9]), arrays([4, 1, 4], seed=1)
    one = Clients.from_arrays(
        [some[0], (some[1][0][:1], some[1][1][:1]), some[2]], arrays([4] * 3, seed=1)
    )
    with pytest.raises(InputError, match=r"client 1 .*example.*batch norm"):
        fit(
            batch_norm_net(torch.float32),
            one,
            batch_norm=batch_norm,
            fraction=0.1,
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run" / "rounds.jsonl").exists()
    few = Clients.from_arrays(some, tests)
    if batch_norm == "running":
        assert (
            fit(batch_norm_net(torch.float32), few, batch_norm=batch_norm).result["global"][
                "accuracy"
            ]
            >= 0
        )
        return
    with pytest.raises(
        InputError,
        match=r"client 1 .*test example.*batch",
    ):
        fit(batch_norm_net(torch.float32), few, batch_norm=batch_norm)
    assert (
        fit(batch_norm_net(torch.float32), few, batch_norm=batch_norm, evaluate_on=None).result[
            "global"
        ]
        is None
    )


@pytest.mark.parametrize("algorithm", [fedhb.NIW(lambda0=1.0), fedhb.Mixture(shrink=True)])
def test_a_prior_that_shortens_weights_warns_of_running_statistics(algorithm):
    with pytest.warns(UserWarning, match="running statistics"):
        fit(batch_norm_net(torch.float32), clients([9] * 4), algorithm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(batch_norm_net(torch.float32), clients([9] * 4), algorithm, batch_norm="batch")
        fit(batch_norm_net(torch.float32), clients([9] * 4), type(algorithm)())


def test_the_head_is_what_runs_last_or_is_named():
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(16, CLASSES)
            self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.out(self.body(x))
            return found

    with pytest.raises(InputError, match=r"'body\.0'.*head='out'"):
        fit(Backwards())
    assert fit(Backwards(), head="out").problem.network.head_name == "out"


class Recurrent(nn.Module):
    """Without batch_first: it runs along the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.RNN(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.cell(x.unsqueeze(1))[0][:, 0])
        return found


def test_a_model_that_may_not_be_meant_so_is_warned_of():
    softmax = nn.Sequential(
        nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES), nn.Softmax(-1)
    )
    for net, says in ((softmax, "softmax"), (Recurrent(), "batch_first=True")):
        with pytest.warns(UserWarning, match=says):
            fit(net)


def test_what_is_wrong_inside_a_factory_is_told_as_it_is(tmp_path, monkeypatch):
    """Its own errors, with their place: only a call that it does not take is the user's of the
    command.
    """
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mynets.py").write_text(
        "import torch\n"
        "def wrong(shape, outputs, depth=1):\n    return len(3)\n"
        "def right(shape, outputs, depth=1):\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, outputs))\n"
    )
    with pytest.raises(TypeError, match="has no len"):
        make_model("mynets:wrong", (1, 8, 8), 10, {})
    with pytest.raises(InputError, match=r"'mynets:right'.*'width'"):
        make_model("mynets:right", (1, 8, 8), 10, {"width": 2})
    assert make_model("mynets:right", (1, 8, 8), 10, {"depth": 2})(
        torch.zeros(2, 1, 8, 8)
    ).shape == (2, 10)


def test_a_network_is_found_by_its_name():
    assert isinstance(nets.build("mlp", (4,), 3, hidden=7).hidden, nn.Linear)
    with pytest.raises(InputError, match="'mpl'"):
        nets.build("mpl", (4,), 3)
