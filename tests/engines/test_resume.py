"""A run that was stopped goes on to the same numbers, for every algorithm."""

from __future__ import annotations

import json

import pytest
import torch
from builders import CASES, mlp, same_bits

import fedhb
from engines import ROUNDS, assert_same_run, every_algorithm, fit, records


@every_algorithm
def test_a_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    algorithm = CASES[name]
    whole = fit(algorithm, tmp_path / "whole")
    for stops in ((1,), (2, 3), (3, 4, 5)):
        out = tmp_path / "-".join(map(str, stops))
        for stop in stops:
            with pytest.raises(KeyboardInterrupt):
                fit(algorithm, out, stop, resume=True)
        resumed = fit(algorithm, out, resume=True)
        assert_same_run(resumed, whole)
        assert_same_run(fedhb.load(out, model=mlp(torch.float32)), whole)
        lines = (out / "rounds.jsonl").read_text().splitlines()
        assert [json.loads(line)["round"] for line in lines] == list(range(1, ROUNDS + 1))
        assert [json.loads(line)["noted"] for line in lines] == list(range(1, ROUNDS + 1))


def test_an_interrupted_run_loses_no_round_that_was_done(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(fedhb.NIW(), tmp_path / "run", stop=3)
    run = fedhb.load(tmp_path / "run", model=mlp(torch.float32))
    assert run.state.done == 3 and [r["round"] for r in run.records] == [1, 2, 3]


def test_a_finished_run_is_not_run_again(tmp_path):
    whole = fit(fedhb.NIW(), tmp_path / "run")
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()}
    again = fit(fedhb.NIW(), tmp_path / "run", stop=1, resume=True)
    assert_same_run(again, whole)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*") if p.is_file()} == files


def test_resuming_nothing_is_starting(tmp_path):
    (tmp_path / "empty").mkdir()
    whole = fit(fedhb.NIW(), None)
    assert same_bits(
        fit(fedhb.NIW(), tmp_path / "absent", resume=True).state.server, whole.state.server
    )
    assert same_bits(
        fit(fedhb.NIW(), tmp_path / "empty", resume=True).state.server, whole.state.server
    )


def test_a_run_stopped_before_its_first_checkpoint_starts_again(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "settings.toml").write_text("")
    (folder / "rounds.jsonl").write_text('{"round": 1}\n{"rou')
    assert records(fit(fedhb.NIW(), folder, resume=True)) == records(
        fit(fedhb.NIW(), tmp_path / "whole")
    )
