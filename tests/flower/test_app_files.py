"""The files that `fedhb deploy init` and `config` write. tests/federation starts what
is written.
"""

from __future__ import annotations

import tomllib

import pytest

pytest.importorskip("flwr")


from deploying import deploy

from fedhb.errors import InputError
from fedhb.flower.federated_task import Rules, settings_of


def test_the_run_config_gives_the_settings_back(folder, tmp_path):
    config = tomllib.loads((folder / "run.toml").read_text())
    settings = settings_of(config)
    assert (settings.training.rounds, settings.training.fraction) == (4, 1.0)
    assert settings.data.num_clients == 2
    deploy(
        "config",
        folder,
        "--nodes",
        2,
        "--rounds",
        9,
        "--deadline",
        30,
        "--min-answers",
        0.9,
        "--resume",
        "--out",
        tmp_path / "o",
    )
    config = tomllib.loads((folder / "run.toml").read_text())
    assert (
        settings_of(config).training.rounds == 9
        and config["resume"] is True
        and config["out"] == str(tmp_path / "o")
    )
    assert Rules.of(config) == Rules(nodes=2, deadline=30.0, min_answers=0.9)
    project = tomllib.loads((folder / "app" / "pyproject.toml").read_text())
    assert config.keys() <= project["tool"]["flwr"]["app"]["config"].keys(), (
        "flwr refuses keys that the app does not have"
    )
    connection = tomllib.loads((folder / "flower" / "config.toml").read_text())["superlink"][
        "fedhb"
    ]
    assert connection["address"] == "server.example.org:8000" and connection[
        "root-certificates"
    ].endswith("ca.crt")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0"], "nodes=0"),
        (["--nodes", "3", "--num-clients", "9"], "num_clients=9.*3 nodes"),
        (["--port", "99999"], "port=99999"),
        (["--host", "münchen"], "ASCII"),
        (["--host", ""], "host ''"),
        (["--host", "server.example.org", "--host", " "], "host ' '"),
        (["--algorithm", "nwi"], "'niw'"),
        (["--algorithm", "centralised"], "centralised"),
        (["--set", "empirical-bayes.foo=3"], "empirical-bayes.*'foo'"),
        (["--set", "fedavg.update=body"], "empirical-bayes"),
        (["--model", "nosuch"], "'nosuch'"),
        (["--dataset", "nosuch"], "'nosuch'"),
        (["--dp-noise", "1", "--algorithm", "fedpa"], "fedpa"),
        (["--workers", "2"], "workers=2"),
        (["--checkpoint-every", "5"], "checkpoint_every=5"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_written(tmp_path, words, message):
    with pytest.raises(InputError, match=message):
        deploy("init", tmp_path / "new", *words)
    assert not (tmp_path / "new").exists()


def test_a_folder_in_use_is_refused(folder):
    with pytest.raises(InputError, match="empty"):
        deploy("init", folder)


def test_config_says_how_to_start_and_refuses_a_folder_that_holds_a_run(folder):
    said = deploy("config", folder, "--nodes", 2)
    assert f"FLWR_HOME={folder}/flower flwr run {folder}/app" in said
    (folder / "run").mkdir()
    (folder / "run/settings.toml").touch()
    with pytest.raises(InputError, match=r"run.*resume"):
        deploy("config", folder, "--nodes", 2)
    deploy("config", folder, "--nodes", 2, "--resume")


def test_all_nodes_take_part_unless_a_fraction_is_given(tmp_path):
    (tmp_path / "s.toml").write_text("rounds = 4\n")
    deploy("init", tmp_path / "a", "--nodes", 2, "--settings", tmp_path / "s.toml")
    (tmp_path / "s.toml").write_text("fraction = 0.5\n")
    deploy("init", tmp_path / "b", "--nodes", 2, "--settings", tmp_path / "s.toml")
    deploy(
        "init", tmp_path / "c", "--nodes", 2, "--settings", tmp_path / "s.toml", "--fraction", 0.25
    )
    found = [
        settings_of(tomllib.loads((tmp_path / name / "run.toml").read_text())).training.fraction
        for name in "abc"
    ]
    assert found == [1.0, 0.5, 0.25]
