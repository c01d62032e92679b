"""problem.json: what a stored run says of itself is checked before it is believed."""

from __future__ import annotations

from dataclasses import replace
import json
import pytest
import torch
from builders import CLASSES
from builders import arrays
from builders import mlp
from fedhb.clients.clients import Clients
from fedhb.errors import InputError
from fedhb.files import sealed
from fedhb.likelihood import GaussianRegression
from fitted import X
from fitted import fit
from fitted import images
from fitted import rewritten
import fedhb


def test_a_folder_with_one_scale_for_several_targets_is_loaded_and_nonsense_is_not(tmp_path):
    model = mlp(torch.float32, outputs=2)
    fit(
        model,
        Clients.from_arrays([(x, x[:, :2]) for x, _ in arrays([30] * 4)]),
        out=tmp_path / "run",
    )
    before = {"num_targets": 2, "centre": 0.5, "scale": 2.0, "noise": 2.0}  # as runs had it once
    rewritten(tmp_path / "run", lambda record: record["likelihood"].update(settings=before))
    old = fedhb.load(tmp_path / "run", model=model)
    assert old.problem.likelihood == GaussianRegression(**before)
    assert old.predict(X).shape == (9, 2, 2)
    for wrong in (
        {"scale": [1.0]},
        {"scale": [1.0, 0.0]},
        {"noise": ["a", "b"]},
        {"centre": {}},
        {"centre": [[1.0], [2.0]]},
    ):
        rewritten(
            tmp_path / "run",
            lambda record, wrong=wrong: record["likelihood"].update(settings=before | wrong),
        )
        with pytest.raises(
            InputError,
            match=rf"problem\.json.*{next(iter(wrong))}=.*restore",
        ):
            fedhb.load(tmp_path / "run", model=model)


def test_a_folder_says_how_inputs_are_varied(tmp_path):
    """Runs that did not keep it vary nothing; anything but what there is makes no sense."""
    known, _ = images()
    model = fedhb.nets.mlp((1, 8, 8), CLASSES, hidden=7)
    fit(model, known, out=tmp_path / "run", rounds=1)
    for wrong in ("mirror", "", True, 1, ["crop-flip"]):
        rewritten(tmp_path / "run", lambda record, wrong=wrong: record.update(augment=wrong))
        with pytest.raises(InputError, match=r"problem\.json.*'augment'"):
            fedhb.load(tmp_path / "run", model=model)
    rewritten(tmp_path / "run", lambda record: record.pop("augment"))
    assert fedhb.load(tmp_path / "run", model=model).augment is None
    rewritten(
        tmp_path / "run", lambda record: record.update(augment="crop-flip", input_shape=[64])
    )  # no images
    with pytest.raises(InputError, match="'augment'"):
        fedhb.load(tmp_path / "run", model=model)
    with pytest.raises(InputError, match="loaded"):
        fit(model, replace(known, augment="mirror"), out=tmp_path / "other", rounds=1)


@pytest.mark.parametrize(
    ("algorithm", "options", "says"),
    [
        (
            fedhb.Mixture(patience=10_001),
            {},
            "patience=10001.* 10000",
        ),
        (fedhb.NIW(), {"seed": 2**53 + 1}, "seed=9007199254740993"),
        (fedhb.NIW(), {"batch_size": 10**30}, "batch_size=1000"),
    ],
)
def test_what_could_not_be_loaded_again_is_refused_before_training(
    tmp_path, algorithm, options, says
):
    with pytest.raises(InputError, match=says):
        fit(None, None, algorithm, out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("probe", [[], [0.0], [0.0] * 100, "zeros", [1]])
def test_a_probe_that_makes_no_sense_is_refused(probe, tmp_path):
    fit(out=tmp_path / "run")
    path = tmp_path / "run/problem.json"
    record = {
        key: value for key, value in json.loads(path.read_text()).items() if key != "checksum"
    }
    path.write_bytes(sealed(record | {"probe": probe}))
    with pytest.raises(InputError, match=r"module|'probe'"):
        fedhb.load(tmp_path / "run", model=mlp(torch.float32))
