"""Experiments from their files: what is chosen, and settings with a mistake."""

from __future__ import annotations

import pytest
from small_experiment import SETTINGS, lines, write

from fedhb.errors import InputError
from fedhb_paper import experiments, workbench


def test_choosing(tmp_path):
    more = '"niw S=5" = {algorithm = "niw", niw = {num_samples = 5}}\n[cells.other]\ndataset = "mnist"\n'
    write(tmp_path, SETTINGS.replace("niw = {}\n", "") + more)
    experiment = experiments.load(tmp_path, "small")
    assert len(experiments.choose(experiment)) == 2 * 3 * 3
    assert {k["cell"] for k in experiments.choose(experiment, datasets=["digits"])} == {
        "one",
        "two epochs",
    }
    assert {k["variant"] for k in experiments.choose(experiment, algorithms=["niw"])} == {
        "niw S=0",
        "niw S=5",
    }
    assert {k["variant"] for k in experiments.choose(experiment, algorithms=["niw S=0"])} == {
        "niw S=0"
    }
    for wrong, says in (
        (
            {"cells": ["ones"]},
            "--cell ones.*'one'.*one, two epochs, other",
        ),
        ({"datasets": ["emnist"]}, r"--dataset emnist"),
        (
            {"algorithms": ["mixture"]},
            "--algorithms mixture.*niw S=0, fedavg, niw S=5, niw",
        ),
        ({"cells": ["one"], "datasets": ["mnist"]}, "--cell one.*other"),
    ):
        with pytest.raises(InputError, match=says):
            experiments.choose(experiment, **wrong)


def test_a_cell_may_have_seeds_and_variants_of_its_own(tmp_path):
    settings = SETTINGS.replace(
        "local_epochs = 2\n", 'local_epochs = 2\nseeds = [0, 5]\nonly = ["fedavg"]\n'
    )
    experiment = experiments.load(write(tmp_path, settings), "small")
    theirs = [key for key in experiments.choose(experiment) if key["cell"] == "two epochs"]
    assert [(key["variant"], key["seed"]) for key in theirs] == [("fedavg", 0), ("fedavg", 5)]
    assert len(experiments.choose(experiment)) == 2 * 3 + 2
    assert (
        experiment.resolved(theirs[0])["local_epochs"] == 2
    )  # seeds and only are no settings of a run
    asked = experiments.choose(experiment.with_seeds([7]))
    assert {key["seed"] for key in asked} == {7} and len(asked) == 3 + 1
    write(tmp_path, settings.replace('only = ["fedavg"]', 'only = ["fedavgs"]'))
    with pytest.raises(InputError, match=r"cell 'two epochs'.*'fedavgs'.*'fedavg'"):
        experiments.choose(experiments.load(tmp_path, "small"))


def test_listing_and_errors_of_the_command(tmp_path, run, monkeypatch):
    write(tmp_path)
    write(tmp_path, SETTINGS.replace('"digits"', '"imagenet"'), "large", "")
    write(tmp_path, 'title = "t"\nkind = "tabel"\n', "wrong", "")
    code, printed = run("paper", "--folder", tmp_path)
    assert code == 0 and "0 of 12" in printed and "digits, small" in printed
    assert "needs imagenet" in printed
    assert "kind='tabel'" in printed
    code, printed = run("paper", "large", "--folder", tmp_path)
    assert code == 2 and "data set imagenet" in printed
    code, printed = run("paper", "smal", "--folder", tmp_path)
    assert code == 2 and "'small'" in printed
    code, printed = run("paper", "small", "--folder", tmp_path / "none")
    assert code == 2 and "folder" in printed
    for seeds in ("one", ",", ""):
        code, printed = run("paper", "small", "--folder", tmp_path, "--seeds", seeds)
        assert code == 2 and f"seeds='{seeds}'" in printed
    code, printed = run("paper", "small", "--folder", tmp_path, "--algorithms", ",")
    assert code == 2 and "algorithms=','" in printed
    monkeypatch.chdir(tmp_path)
    code, printed = run("paper")
    assert code == 2 and "repository" in printed and "--folder" in printed


def test_the_folder_is_found_from_below(tmp_path, monkeypatch):
    write(tmp_path / "experiments")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "fedhb"\n')
    (tmp_path / "deep/er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep/er")
    assert experiments.find_folder(None) == tmp_path / "experiments"


def test_seeds_of_the_command_replace_those_of_the_file(tmp_path, run):
    write(tmp_path)
    assert (
        run(
            "paper",
            "small",
            "--folder",
            tmp_path,
            "--cell",
            "one",
            "--algorithms",
            "fedavg",
            "--seeds",
            "7",
        )[0]
        == 0
    )
    assert [r["key"]["seed"] for r in lines(tmp_path)] == [7]


def test_settings_with_a_mistake_are_refused(tmp_path):
    write(tmp_path, SETTINGS.replace("rounds = 3", "round = 3"))
    experiment = experiments.load(tmp_path, "small")
    with pytest.raises(InputError, match=r"cell 'one', variant 'niw'.*'round'"):
        workbench.standing(experiment, experiments.choose(experiment))
    write(tmp_path, SETTINGS.replace("seeds = [0, 1]", ""))
    with pytest.raises(InputError, match="seeds"):
        experiments.choose(experiments.load(tmp_path, "small"))


def test_printed_numbers_are_read(tmp_path):
    write(
        tmp_path,
        printed="cell,algorithm,task,metric,mean,std\na,niw,up,formula,2d,\na,niw,global,accuracy,1.50,0.25\n",
    )
    formula, number = experiments.load(tmp_path, "small").printed()
    assert (
        formula["mean"] == "2d"
        and formula["std"] is None
        and (number["mean"], number["std"]) == (1.5, 0.25)
    )
    write(tmp_path, printed="cell,method,mean\n")
    with pytest.raises(InputError, match=r"printed\.csv.*columns"):
        experiments.load(tmp_path, "small").printed()
