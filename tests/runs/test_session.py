"""A run from its beginning to its result: the files of its folder, and a finished run that is asked
again.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import clients
from fitted import fit

import fedhb
from fedhb.errors import InputError


def test_the_result_has_the_keys_that_were_promised(tmp_path):
    known, novel = clients().hold_out(2, seed=0)
    run = fit(None, known, holdout=novel, out=tmp_path / "run", seed=5)
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result == run.result
    promised = {
        "algorithm",
        "keeps",
        "dataset",
        "seed",
        "rounds",
        "global",
        "personalised",
        "holdout",
        "per_client",
        "communication",
    }
    assert set(result) == promised | {"data", "executor", "keeps", "seconds", "split"}
    assert (result["algorithm"], result["dataset"], result["seed"], result["rounds"]) == (
        "empirical-bayes",
        "arrays",
        5,
        3,
    )
    for metrics in (
        result["global"],
        result["personalised"],
        result["holdout"]["global"],
        result["holdout"]["personalised"],
    ):
        assert list(metrics) == ["accuracy", "nll", "brier", "ece"]
        assert all(0 <= metrics[key] <= 1 for key in ("accuracy", "ece")) and metrics["nll"] > 0
    assert result["per_client"].keys() == {"client", "global_accuracy", "personalised_accuracy"}
    assert result["per_client"]["client"] == known.ids.tolist()
    assert set(result["communication"]) == {"down_bytes", "up_bytes", "per_client_round"}
    assert all(value >= 0 for value in result["seconds"].values())


def test_a_folder_holds_what_was_promised(tmp_path):
    out = tmp_path / "run"
    run = fit(None, None, fedhb.Mixture(), out=out)
    assert {p.name for p in out.iterdir()} - {".lock"} == {
        "settings.toml",
        "problem.json",
        "rounds.jsonl",
        "result.json",
        "evaluation.json",
        "checkpoint",
    }
    settings = tomllib.loads((out / "settings.toml").read_text())
    assert settings["rounds"] == 3 and settings["mixture"]["num_prototypes"] == 2
    assert torch.__version__ in (out / "settings.toml").read_text()
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert lines == run.records and [line["round"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert {
            "round",
            "lr",
            "clients",
            "loss",
            "score",
            "down_bytes",
            "up_bytes",
            "seconds",
        } <= line.keys()
    assert {p.suffix for p in (out / "checkpoint").rglob("*") if p.is_file()} == {
        ".json",
        ".safetensors",
    }


def test_a_finished_run_that_is_asked_for_other_numbers_is_evaluated_again(tmp_path):
    """Training is not repeated, the result is that of a fresh run with those settings, and what was
    asked before is kept.
    """
    known, novel = clients().hold_out(2, seed=0)
    out = tmp_path / "run"
    first = fit(None, known, out=out, evaluate_on=None)
    assert first.result["global"] is None
    changes: list[dict[str, Any]] = [
        {},
        {"personal_lr": 0.3},
        {"personal_epochs": 4},
        {"holdout": novel},
    ]
    for change in changes:
        found = fit(None, known, out=out, resume=True, **change).result
        fresh = fit(None, known, **change).result
        for key in ("global", "personalised", "holdout", "per_client", "split"):
            assert found[key] == fresh[key], (change, key)
        written = (out / "result.json").read_bytes()
        assert (
            fit(None, known, out=out, resume=True, **change).result == found == json.loads(written)
        )
        assert (out / "result.json").read_bytes() == written, "nothing was done"
    other = replace(known, test=replace(known.test, x=known.test.x + 1.0))
    assert fit(None, other, out=out, resume=True, holdout=novel).result["global"] != found["global"]
    assert len((out / "rounds.jsonl").read_text().splitlines()) == 3
    assert (out / "evaluation.json").exists()
    assert fit(None, known, out=out, resume=True, evaluate_on=None).result["global"] is None
    assert not (out / "evaluation.json").exists(), "it would be that of another evaluation"


def test_numbers_of_numpy_are_kept_as_numbers(tmp_path):
    options = {
        "rounds": np.int64(2),
        "lr": np.float64(0.05),
        "momentum": np.float32(0.5),
        "seed": np.int64(3),
    }
    run = fit(None, None, fedhb.FedProx(mu=np.float64(0.1)), out=tmp_path / "run", **options)
    kept = tomllib.loads((tmp_path / "run/settings.toml").read_text())
    assert (kept["rounds"], kept["lr"], kept["momentum"], kept["seed"], kept["fedprox"]["mu"]) == (
        2,
        0.05,
        0.5,
        3,
        0.1,
    )
    plain = {"rounds": 2, "lr": 0.05, "momentum": 0.5, "seed": 3}
    again = fit(None, None, fedhb.FedProx(mu=0.1), out=tmp_path / "run", resume=True, **plain)
    assert again.result == run.result  # the same run, not another


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_run_is_not_resumed_on_inputs_that_were_changed(split, tmp_path):
    """Of a named data set too, whose files are known by their hashes: examples may be changed after
    they are read.
    """
    digits = fedhb.data.load("digits")
    examples = getattr(digits, split)
    turned = replace(digits, **{split: replace(examples, x=examples.x[..., ::-1].copy())})
    before, after = (
        fedhb.partition.shards(d, num_clients=4, shards_per_client=5, seed=0)
        for d in (digits, turned)
    )
    net = fedhb.nets.mlp((1, 8, 8), 10)
    options = {"rounds": 2, "out": tmp_path / "run"}
    first = fit(net, before, fedhb.FedAvg(), **options)
    if split == "train":
        with pytest.raises(InputError, match="data.*resume|resume.*data"):
            fit(net, after, fedhb.FedAvg(), resume=True, **options)
    else:  # the posterior is the same, its evaluation is not
        again = fit(net, after, fedhb.FedAvg(), resume=True, **options)
        assert again.result["global"] != first.result["global"]
        assert again.result["global"] == fit(net, after, fedhb.FedAvg(), rounds=2).result["global"]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit()
    assert list(Path(tmp_path).iterdir()) == []
