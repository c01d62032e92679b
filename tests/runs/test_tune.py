"""Tuning: the same budget for all, validation data only, seeds that no result uses, and defaults
that are what was chosen.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tuning import OWN, SPACE, run, write, write_data

from fedhb.algorithms import FedBABU
from fedhb.cli import tune_command
from fedhb.clients.clients import Share
from fedhb.errors import InputError
from fedhb.runs import tune
from fedhb.runs.settings import read_toml

ROOT = Path(__file__).parents[2]


def test_a_method_without_a_space_is_refused(tmp_path):
    with pytest.raises(InputError, match="'fedprox'"):
        run(write(tmp_path), ["fedprox"])


def test_every_method_has_the_same_budget(tmp_path):
    found, made = run(write(tmp_path))
    count = Counter((r["key"]["variant"].split()[0], r["key"]["cell"]) for r in made)
    assert count == {
        ("niw", "one"): 8,
        ("fedavg", "one"): 8,
        ("niw", "two"): 6,
        ("fedavg", "two"): 6,
    }
    assert {one.trials for one in found} == {4}
    assert {r["key"]["seed"] for r in made} == {100, 101}
    assert {(r["settings"]["evaluate_on"], r["settings"]["validation"]) for r in made} == {
        ("validation", 0.2)
    }


def test_a_stage_may_have_seeds_of_its_own(tmp_path):
    found, made = run(
        write(tmp_path, SPACE.replace('cells = ["two"]', 'cells = ["one", "two"]\nseeds = [102]')),
        ["niw"],
    )
    count = Counter((r["key"]["cell"], r["key"]["seed"]) for r in made)
    assert count == {("one", 100): 4, ("one", 101): 4, ("one", 102): 3, ("two", 102): 3}
    both = [r for r in made if r["key"]["variant"] == "niw 0"]
    assert len(both) == 4
    assert found[0].default == pytest.approx(-sum(tune.score(r["result"])[0] for r in both) / 4)


def test_the_best_go_on_and_the_best_of_all_cells_is_chosen(tmp_path, monkeypatch):
    """By hand: trials 3 and 1, the best half beside the default, go on with it; over both cells 3
    is best, or not.
    """
    first = {0: 0.5, 1: 0.6, 2: 0.4, 3: 0.9}
    for second, best in ((0.2, 3), (0.0, 0)):

        def run_one(settings, key, folder, tell, second=second):
            trial = int(key["variant"].split()[1])
            accuracy = (
                first.get(trial, 0.1) if key["cell"] == "one" else {0: 0.5}.get(trial, second)
            )
            return {task: {"accuracy": accuracy, "nll": 1.0} for task in ("global", "personalised")}

        monkeypatch.setattr("fedhb.runs.tune.run", run_one)
        path = write(tmp_path / str(best))
        found, made = run(path, ["fedavg"])
        space = tune.Space.read(path)
        assert 3 in space.trials("fedavg")
        assert {r["key"]["variant"] for r in made if r["key"]["cell"] == "two"} == {
            "fedavg 0",
            "fedavg 1",
            "fedavg 3",
        }
        assert found[0].choice == space.trials("fedavg")[best] and found[
            0
        ].default == pytest.approx(0.5)
        assert found[0].best == pytest.approx((0.9 + second) / 2 if best else 0.5)


@pytest.mark.parametrize(("gain", "best"), [(0.0004, 3), (0.002, 1)])
def test_scores_that_agree_to_a_tenth_of_a_percent_are_ordered_by_nll(
    tmp_path, monkeypatch, gain, best
):
    """Trial 3 has the lower NLL, trial 1 the higher accuracy: by less than a run can tell, and by
    more.
    """

    def run_one(settings, key, folder, tell):
        accuracy, nll = {1: (0.9 + gain, 0.5), 3: (0.9, 0.4)}.get(
            int(key["variant"].split()[1]), (0.5, 1.0)
        )
        return {task: {"accuracy": accuracy, "nll": nll} for task in ("global", "personalised")}

    monkeypatch.setattr("fedhb.runs.tune.run", run_one)
    path = write(tmp_path)
    found, _ = run(path, ["fedavg"])
    assert found[0].choice == tune.Space.read(path).trials("fedavg")[best]


def test_scores():
    def result(a, b, nll=1.0):
        return {"global": {"accuracy": a, "nll": nll}, "personalised": {"accuracy": b, "nll": nll}}

    assert tune.score(result(0.8, 0.6)) == (pytest.approx(-0.7), 1.0)
    assert (
        tune.score(result(0.8, 0.6, 0.5))
        < tune.score(result(0.8, 0.6))
        < tune.score(result(0.7, 0.6))
    )
    assert tune.score(result(0.1, 0.1, math.nan)) < tune.score({"diverged": "x"}) == (0.0, math.inf)


def test_recorded_trials_are_not_run_again(tmp_path):
    path = write(tmp_path)
    found, made = run(path)
    again, nothing = run(path)
    assert again == found and made and not nothing


def test_no_test_example_is_read(tmp_path, monkeypatch):
    """Test inputs that are NaN would show in any number they enter; nothing even gathers them."""
    from fedhb.runs import from_settings

    path = write(tmp_path, SPACE + "[own.mixture]\n")
    clean, _ = run(path)
    (path.parent / "records.jsonl").unlink()
    real, gather = from_settings.make_population, Share.examples

    def poisoned(*arguments):

        population = real(*arguments)
        test = population.clients.test
        poison = Share(
            torch.full(test.x.shape, math.nan),
            torch.full_like(test.y, 10**6),
            test.rows,
            test.offsets,
        )
        return replace(population, clients=replace(population.clients, test=poison))

    def watched(self, k, most=None):
        assert not self.x.is_floating_point() or not torch.isnan(self.x).any(), (
            "a test example was read"
        )
        return gather(self, k, most)

    monkeypatch.setattr(from_settings, "make_population", poisoned)
    monkeypatch.setattr(Share, "examples", watched)
    assert run(path)[0] == clean
    with pytest.raises(AssertionError, match="a test example was read"):
        from_settings.train(
            from_settings.Settings.of(num_clients=6, rounds=1), None, progress=False
        )


def test_real_targets_are_tuned_by_nll(tmp_path, monkeypatch):
    """A trial that diverged is the worst, also where every NLL is above zero."""
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, OWN)
    write_data(real=True)
    found, made = run(path)
    for one in found:
        means = {
            r["key"]["variant"]: (r["result"]["global"]["nll"] + r["result"]["personalised"]["nll"])
            / 2
            for r in made
            if r["key"]["variant"].startswith(one.method)
        }
        assert one.metric == "nll" and one.best == pytest.approx(min(means.values()))
        assert one.default == pytest.approx(means[f"{one.method} 0"])
    assert tune.score({"diverged": "x"}) > max(tune.score(r["result"]) for r in made)
    tune.write_chosen(path.parent / "chosen.toml", found)
    assert {"nll", "default_nll"} <= read_toml(path.parent / "chosen.toml")[
        "empirical-bayes"
    ].keys()
    assert tune_command.table(found).title == "validation NLL"


def test_differences_from_the_code_are_seen(monkeypatch):
    monkeypatch.setattr(FedBABU, "training", {})
    chosen = {"fedbabu": {"training": {"lr": 0.3}, "settings": {"update": "full"}}}
    assert tune.differences(chosen) == [
        "fedbabu: lr is 0.1, chosen was 0.3",
        "fedbabu: update is body, chosen was full",
    ]
    monkeypatch.setattr(FedBABU, "training", {"lr": 0.3})
    assert tune.differences(chosen) == ["fedbabu: update is body, chosen was full"]


def test_the_defaults_of_the_code_are_those_that_were_chosen():
    path = ROOT / "experiments/tuning/chosen.toml"
    assert tune.differences(read_toml(path) if path.exists() else {}) == []
