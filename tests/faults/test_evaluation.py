"""An evaluation that is killed goes on where it was, to the numbers of an undisturbed one."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from builders import clients, mlp

import fedhb
from fedhb.runs.folder import EVALUATED, EVALUATION, RunFolder


@dataclass(frozen=True)
class Counting(fedhb.FedAvg):
    """FedAvg that counts the clients it personalises, and can be killed at one."""

    name = "counting"
    seen: ClassVar[list[int]] = []
    fatal: ClassVar[list[int]] = []

    def personalise(
        self, problem: Any, server: Any, clients: Any, memory: Any, plan: Any, rng: Any
    ) -> Any:
        for client in clients.ids.tolist():
            if client in self.fatal:
                raise KeyboardInterrupt
            self.seen.append(client)
        return super().personalise(problem, server, clients, memory, plan, rng)


@pytest.fixture(autouse=True)
def by_twos(monkeypatch):
    monkeypatch.setattr(
        importlib.import_module("fedhb.evaluation.evaluate"), "chunk_size", lambda network: 2
    )
    Counting.seen.clear()
    Counting.fatal.clear()


def fit(out, **options):
    everyone = clients([6] * 8)
    known, novel = everyone.hold_out(3, 0)
    chosen = {
        "rounds": 2,
        "batch_size": 4,
        "personal_lr": 0.1,
        "seed": 1,
        "resume": True,
        "progress": False,
    } | options
    return fedhb.fit(
        mlp(torch.float32), known, Counting(), holdout=novel, out=out, workers=1, **chosen
    )


def numbers(run):
    return {key: run.result[key] for key in ("global", "personalised", "holdout", "per_client")}


@pytest.mark.filterwarnings("ignore:.*evaluated")
@pytest.mark.parametrize("place", [2, -1])
def test_a_killed_evaluation_goes_on(tmp_path, place):
    whole = numbers(fit(tmp_path / "whole"))
    order = list(Counting.seen)
    assert len(order) == 8 and not (tmp_path / "whole" / EVALUATED).exists()
    Counting.fatal.append(order[place])
    Counting.seen.clear()
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run")
    with (tmp_path / "run" / EVALUATED).open("a") as file:
        file.write('{"mark": "cut sh')
    Counting.fatal.clear()
    Counting.seen.clear()
    found = fit(tmp_path / "run")
    assert numbers(found) == whole
    # chunks of two, those that train first: what lay before the fatal one's chunk is not done again
    begin = 2 if place == 2 else 7
    assert Counting.seen == order[begin:] and not (tmp_path / "run" / EVALUATED).exists()


def test_what_was_seen_is_kept_where_only_the_result_is_missing(tmp_path, monkeypatch):
    """Killed between evaluation.json and result.json: both belong to the same evaluation."""

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "write_result", killed)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run")
    seen = (tmp_path / "run" / EVALUATION).read_bytes()
    monkeypatch.undo()
    with warnings.catch_warnings(action="error"):
        fit(tmp_path / "run")
    assert (tmp_path / "run" / EVALUATION).read_bytes() == seen and (
        tmp_path / "run" / "result.json"
    ).exists()


def test_other_settings_begin_anew(tmp_path):
    fit(tmp_path / "whole", personal_lr=0.01)
    order, whole = list(Counting.seen), numbers(fit(tmp_path / "other", personal_lr=0.2))
    Counting.fatal.append(order[-1])
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", personal_lr=0.01)
    Counting.fatal.clear()
    Counting.seen.clear()
    assert numbers(fit(tmp_path / "run", personal_lr=0.2)) == whole and Counting.seen == order
