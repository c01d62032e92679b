"""The sentence that says what was run, and the settings."""

from __future__ import annotations

import json
import shutil

import finished
from compared import own, table
from pages import words_of

from fedhb.report import run_data, summary_section


def test_the_sentence_says_what_was_run(page):
    words = words_of(page)
    assert (
        "niw, mixture and fedavg trained on digits, held by 8 clients with at most 3 classes each, 4 of them in each of 6 rounds"
        in words
    )
    assert "seeds 0, 1" in words and "fedhb 0." in words and "torch 2." in words


def test_the_sentence_and_the_settings_of_own_data(tmp_path):
    path = own(table(tmp_path / "patients.npz", 0), tmp_path / "r")
    for _ in range(2):
        methods = run_data.read([path])
        assert (
            "fedavg trained on patients, held by 4 clients, 2 of them in each of 1 round"
            in summary_section.sentence(methods)
        )
        settings = summary_section.settings_table(methods)
        assert (
            "<code>dataset</code></th><td>patients</td>" in settings
            and "<code>num_clients</code></th><td>4</td>" in settings
        )
        (path / "result.json").unlink(missing_ok=True)
        (path / "evaluation.json").unlink(
            missing_ok=True
        )  # once more, as it was before it was evaluated
    (path / "problem.json").unlink()
    assert "held by" not in summary_section.sentence(run_data.read([path]))


def test_the_data_of_nodes_are_not_said_to_be_dealt(tmp_path):
    path = finished.one(tmp_path / "r", "fedavg", rounds=1)
    result = json.loads((path / "result.json").read_text()) | {"dataset": "nodes"}
    shutil.rmtree(path / "checkpoint")
    (path / "result.json").write_text(json.dumps(result))
    assert "trained on nodes, held by 8 clients, 4 of them" in summary_section.sentence(
        run_data.read([path])
    )


def test_clients_are_all_that_train_and_cohorts_as_they_are_drawn(tmp_path):
    path = finished.one(tmp_path / "r", "fedavg", rounds=1, num_clients=100, fraction=0.29)
    result = json.loads((path / "result.json").read_text())
    result["per_client"] = {
        key: values[:7] for key, values in result["per_client"].items()
    }  # the others have no test examples
    shutil.rmtree(path / "checkpoint")
    (path / "result.json").write_text(json.dumps(result))
    (path / "evaluation.json").unlink()
    assert (
        "held by 100 clients with at most 3 classes each, 29 of them"
        in summary_section.sentence(run_data.read([path]))
    )
