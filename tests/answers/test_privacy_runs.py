"""Private runs: what they report, their key, who takes part, what is refused."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("dp_accounting")

import builders
from private_answers import RNG, privacy
from scipy import stats

import fedhb
from fedhb.algorithms import ALGORITHMS
from fedhb.answers.privacy import Mechanism, Private, releasing
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.in_process import InProcess
from fedhb.errors import InputError
from fedhb.seeding import Randomness


def test_noise_and_cohorts_have_more_secrets_than_a_generator_for_simulations(
    monkeypatch, tmp_path
):
    """torch's generators keep 32 bits of their seed, which can all be tried; and the seed, with its
    cohorts, is public.
    """

    def refuse(*arguments, **options):
        raise AssertionError("it could be guessed")

    monkeypatch.setattr("fedhb.engine.schedule.cohort", refuse)
    options = {
        "rounds": 2,
        "fraction": 0.5,
        "progress": False,
        "privacy": fedhb.Privacy(noise=1.0),
        "evaluate_on": None,
        "workers": 1,
    }
    run = fedhb.fit(
        builders.mlp(torch.float32),
        builders.clients(),
        fedhb.FedAvg(),
        out=tmp_path / "a",
        **options,
    )
    assert run.state.client_rounds == 6
    monkeypatch.setattr(torch, "Generator", refuse)
    monkeypatch.setattr(torch, "randn", refuse)
    assert (
        privacy().normal("noise 1 theta", (3, 5)).shape == (3, 5)
        and privacy().normal("", ()).shape == ()
    )


def test_cohorts_are_drawn_without_replacement_each_as_likely_as_any_other():
    private, rounds = privacy(num_clients=5, cohort=2), 5000
    drawn = [tuple(private.draw(r)) for r in range(1, rounds + 1)]
    assert all(a < b for a, b in drawn) and drawn == [
        tuple(private.draw(r)) for r in range(1, rounds + 1)
    ]
    seen = [drawn.count(pair) for pair in itertools.combinations(range(5), 2)]
    assert sum(seen) == rounds and stats.chisquare(seen).pvalue > 1e-4
    follows = sum(b == a for a, b in itertools.pairwise(drawn))
    assert (
        stats.binomtest(follows, rounds - 1, 0.1).pvalue > 1e-4
    )  # a round tells nothing of the next
    other = replace(private, key=b"x" * 32)
    assert (
        stats.binomtest(
            sum(tuple(other.draw(r + 1)) == d for r, d in enumerate(drawn)), rounds, 0.1
        ).pvalue
        > 1e-4
    )


def test_running_statistics_are_not_noised_but_refused():
    """A variance may come out negative, and the network then predicts NaN."""
    options = {
        "rounds": 1,
        "progress": False,
        "privacy": fedhb.Privacy(noise=1.0),
        "evaluate_on": None,
    }
    for batch_norm in ("running", "batch"):
        context = (
            pytest.raises(InputError, match=r"dp_noise.*statistics")
            if batch_norm == "running"
            else contextlib.nullcontext()
        )
        with context:
            net = builders.batch_norm_net(torch.float32)
            fedhb.fit(net, builders.clients(), fedhb.FedAvg(), batch_norm=batch_norm, **options)


def test_a_private_run_reports_what_it_cost_and_resumes_to_the_same_bits(tmp_path):
    who, options = (
        builders.clients(),
        {
            "rounds": 4,
            "fraction": 0.5,
            "progress": False,
            "checkpoint_every": 1,
            "privacy": fedhb.Privacy(noise=1.0),
        },
    )
    run = fedhb.fit(
        builders.mlp(torch.float32), who, fedhb.EmpiricalBayes(), out=tmp_path / "a", **options
    )
    spent = run.result["privacy"]
    assert (
        spent["epsilon"] == pytest.approx(Mechanism(1.0, 1.0, 1e-5, 6, 3).epsilon(4))
        and spent["delta"] == 1e-5
    )
    lines = [
        json.loads(line) for line in (tmp_path / "a" / "rounds.jsonl").read_text().splitlines()
    ]
    assert [line["epsilon"] for line in lines] == sorted(line["epsilon"] for line in lines)
    assert lines[0]["loss"] is None and "negative_elbo" not in lines[0]
    assert oct((tmp_path / "a" / "noise.key").stat().st_mode)[-3:] == "600"

    class Stop:
        def on_start(self, done, rounds): ...
        def on_round(self, record, state):
            if record["round"] == 2:
                raise KeyboardInterrupt

        def on_end(self): ...

    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "noise.key").write_bytes((tmp_path / "a" / "noise.key").read_bytes())
    with pytest.raises(KeyboardInterrupt):
        fedhb.fit(
            builders.mlp(torch.float32),
            who,
            fedhb.EmpiricalBayes(),
            out=tmp_path / "b",
            callbacks=[Stop()],
            **options,
        )
    resumed = fedhb.fit(
        builders.mlp(torch.float32),
        who,
        fedhb.EmpiricalBayes(),
        out=tmp_path / "b",
        resume=True,
        **options,
    )
    assert builders.same_bits(resumed.state.server, run.state.server)
    other = fedhb.fit(
        builders.mlp(torch.float32), who, fedhb.EmpiricalBayes(), out=tmp_path / "c", **options
    )
    assert not builders.same_bits(other.state.server, run.state.server), (
        "the noise does not follow from the seed"
    )


def test_a_run_without_its_key_is_not_gone_on_with(tmp_path):
    """With other noise a round that was released already would be released once more; with no key
    the noise is known to all.
    """
    who, options = (
        builders.clients(),
        {"fraction": 0.5, "progress": False, "privacy": fedhb.Privacy(noise=1.0), "resume": True},
    )
    key = tmp_path / "a" / "noise.key"
    fedhb.fit(
        builders.mlp(torch.float32), who, fedhb.FedAvg(), out=tmp_path / "a", rounds=2, **options
    )
    drawn = key.read_bytes()
    assert len(drawn) == 32 and not list((tmp_path / "a").glob("*.tmp"))

    def again():
        return fedhb.fit(
            builders.mlp(torch.float32),
            who,
            fedhb.FedAvg(),
            out=tmp_path / "a",
            rounds=2,
            **options,
        )

    for content, says in (
        (b"", "0 bytes.*32"),
        (drawn[:-1], "31 bytes"),
        (bytes(32), "resume"),
    ):
        key.write_bytes(content)
        with pytest.raises(InputError, match=says):
            again()
    key.unlink()
    with pytest.raises(InputError, match=r"noise\.key.*restore"):
        again()
    key.write_bytes(drawn)
    assert again().result["rounds"] == 2


def test_a_key_that_could_not_be_written_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    options = {"rounds": 1, "fraction": 0.5, "progress": False, "privacy": fedhb.Privacy(noise=1.0)}
    with pytest.raises(OSError, match="No space"):
        fedhb.fit(
            builders.mlp(torch.float32),
            builders.clients(),
            fedhb.FedAvg(),
            out=tmp_path / "a",
            **options,
        )
    assert {path.name for path in (tmp_path / "a").iterdir()} == {".lock"}


def test_chunks_do_not_matter():
    """Each client is clipped for itself, whoever it is trained beside."""
    algorithm = Private(fedhb.EmpiricalBayes(), privacy())
    who = builders.clients()
    problem = builders.problem(None, who)
    server = algorithm.start(problem, Randomness(0))
    plan = builders.plan(algorithm)
    runs = [
        InProcess(problem, algorithm, who, ClientStore(), chunk).run(server, range(6), plan, RNG)[0]
        for chunk in (1, 2, 6)
    ]
    builders.assert_close(runs[0], runs[1], 1e-9)
    builders.assert_close(runs[0], runs[2], 1e-9)


RELEASING = {"empirical-bayes", "niw", "mixture", "fedavg", "fedprox", "fedbabu"}


def test_these_algorithms_declare_a_release():
    assert set(releasing()) == RELEASING


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - RELEASING))
def test_other_algorithms_are_refused(name):
    with pytest.raises(InputError, match=r"empirical-bayes.*mixture"):
        Private(fedhb.algorithms.build(name), privacy())
