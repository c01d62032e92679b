"""An algorithm of one's own gets everything from what it declares: examples/third_family.py.

Filters, privacy, resuming in its phase, Flower and a section of the report, without a line in the
library that knows it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from loopback import Loopback

from fedhb.engine.loop import Callback
from fedhb.errors import InputError
from fedhb.flower.server_app import serve
from fedhb.report.page import write
from fedhb.runs.from_settings import train
from fedhb.runs.settings import Settings

EXAMPLES = Path(__file__).parents[2] / "examples"
ALGORITHM = "third_family:LayerScales"
SMALL = {
    "algorithm": ALGORITHM,
    ALGORITHM: {"kl_weight": 1e-3, "num_samples": 2},
    "dataset": "digits",
    "num_clients": 6,
    "shards_per_client": 3,
    "max_examples": 40,
    "fraction": 0.5,
    "rounds": 3,
    "batch_size": 10,
    "personal_epochs": 1,
    "workers": 1,
    "model": {"name": "mlp", "hidden": 8},
}


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    sys.modules.pop("third_family", None)


def settings(**changes) -> Settings:
    return Settings.resolve(SMALL | changes, {})


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_its_phase_asks_all_clients_before_the_first_round(tmp_path):
    run = train(settings(), tmp_path / "run", progress=False)
    phase, *rounds = records(tmp_path / "run")
    assert (phase["round"], phase["exchange"], phase["phase"]) == (0, 1, "first scales")
    assert phase["clients"] == 6 and [r["clients"] for r in rounds] == [3, 3, 3]
    assert [r["round"] for r in rounds] == [1, 2, 3] and run.result["rounds"] == 3
    # a few numbers for each layer are sent up, the whole state down
    assert 0 < phase["up_bytes"] < rounds[0]["up_bytes"]
    total = sum(r["down_bytes"] for r in (phase, *rounds))
    assert run.result["communication"]["down_bytes"] == total


@pytest.mark.parametrize("moment", [0, 1, 2])
def test_a_run_that_stops_in_its_phase_or_later_ends_the_same(tmp_path, moment):
    class Stop(Callback):
        def on_phase(self, record, state):
            if moment == 0:
                raise KeyboardInterrupt

        def on_round(self, record, state):
            if record["round"] == moment:
                raise KeyboardInterrupt

    whole = train(settings(), tmp_path / "whole", progress=False)
    with pytest.raises(KeyboardInterrupt):
        train(settings(), tmp_path / "run", progress=False, callbacks=[Stop()])
    resumed = train(settings(), tmp_path / "run", resume=True, progress=False)
    for key, value in whole.state.server.items():
        assert torch.equal(resumed.state.server[key], value), key
    assert resumed.result["personalised"] == whole.result["personalised"]
    kept = [(r["round"], r.get("phase")) for r in records(tmp_path / "run")]
    assert kept == [(0, "first scales"), (1, None), (2, None), (3, None)]


def test_two_workers_give_the_same_numbers(tmp_path):
    one, two = (train(settings(workers=w, fraction=1.0), progress=False) for w in (1, 2))
    for key, value in one.state.server.items():
        torch.testing.assert_close(two.state.server[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("more", [{"defence": "default"}, {"fraction": 1.0}])
def test_flower_ends_where_the_simulator_does(tmp_path, more):
    chosen = settings(**more)
    simulated = train(chosen, tmp_path / "simulated", progress=False)
    config = {"settings": chosen.to_toml({}), "out": str(tmp_path / "flower"), "nodes": 6}
    config |= {"poll": 0.001, "deadline": 5.0}
    run = serve(Loopback([{"partition-id": k} for k in range(6)], config), config)
    for key, value in simulated.state.server.items():
        torch.testing.assert_close(run.state.server[key], value, rtol=2e-4, atol=2e-4)
    ours, theirs = records(tmp_path / "flower"), records(tmp_path / "simulated")
    assert [r["exchange"] for r in ours] == [1, 2, 3, 4]
    assert [r["up_bytes"] for r in ours] == [r["up_bytes"] for r in theirs]
    assert len(ours[0]["answered"]) == 6


def test_filters_refuse_a_hostile_answer_of_its_phase(tmp_path):
    run = train(settings(defence="default"), tmp_path / "run", progress=False)
    assert all("refused" in record for record in records(tmp_path / "run"))
    assert torch.isfinite(run.state.server["s"]).all()


def test_its_private_run_pays_for_the_phase_too(tmp_path):
    pytest.importorskip("dp_accounting")
    run = train(settings(dp_noise=1.0), tmp_path / "run", progress=False)
    phase, *rounds = records(tmp_path / "run")
    assert 0 < phase["epsilon"] < rounds[0]["epsilon"] < rounds[-1]["epsilon"]
    assert run.result["privacy"]["epsilon"] == rounds[-1]["epsilon"]


def test_a_phase_that_does_not_say_how_it_is_released_is_refused_in_a_private_run(monkeypatch):
    pytest.importorskip("dp_accounting")
    import third_family

    monkeypatch.setattr(third_family.FirstScales, "release", None)
    with pytest.raises(InputError, match=r"FirstScales"):
        train(settings(dp_noise=1.0), progress=False)


def test_the_report_shows_its_posterior(tmp_path):
    train(settings(), tmp_path / "run", progress=False)
    write([tmp_path / "run"], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "LayerScales" in page and "hidden.weight" in page


def test_an_array_that_is_not_declared_is_refused(monkeypatch):
    import third_family

    kinds = {k: v for k, v in third_family.LayerScales.answer.items() if k != "m"}
    monkeypatch.setattr(third_family.LayerScales, "answer", kinds)
    with pytest.raises(InputError, match=r"'m'.*answer"):
        train(settings(), progress=False)
