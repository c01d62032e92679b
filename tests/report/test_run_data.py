"""Run folders as plain data: which runs are one method, and folders that make no sense."""

from __future__ import annotations

import shutil

import finished
import pytest
from compared import fitted, names, own, table
from pages import changed

from fedhb.errors import InputError
from fedhb.report import run_data
from fedhb.report.page import write


def test_the_same_method_with_other_settings_has_a_name_of_its_own(tmp_path):
    a = finished.one(tmp_path / "a", "empirical-bayes", **{"empirical-bayes": {"kl_weight": 0.0}})
    b = finished.one(tmp_path / "b", "empirical-bayes", **{"empirical-bayes": {"kl_weight": 0.5}})
    methods = run_data.read([a, b])
    assert [m.name for m in methods] == [
        "empirical-bayes kl_weight=0.0",
        "empirical-bayes kl_weight=0.5",
    ]
    assert (
        methods[0].style.colour == methods[1].style.colour
        and methods[0].style.dash != methods[1].style.dash
    )


@pytest.mark.parametrize("name", ["result.json", "evaluation.json"])
def test_numbers_that_were_changed_are_not_shown(compared, tmp_path, name):
    shutil.copytree(compared / "empirical-bayes-seed0", tmp_path / "r")
    content = bytearray((tmp_path / "r" / name).read_bytes())
    place = next(k for k in range(len(content) // 2, len(content)) if chr(content[k]).isdigit())
    content[place] = ord("1") if content[place] != ord("1") else ord("2")
    (tmp_path / "r" / name).write_bytes(content)
    with pytest.raises(InputError, match=r"written|checksum"):
        write([tmp_path / "r"], tmp_path / "p.html")


def test_files_that_make_no_sense_are_told_or_passed_over(compared, tmp_path):
    shutil.copytree(compared, tmp_path / "c")
    (tmp_path / "c/comparison.json").write_text("[]")
    write([tmp_path / "c"], tmp_path / "p.html")
    settings = tmp_path / "c/empirical-bayes-seed0/settings.toml"
    settings.write_text(settings.read_text().replace("seed = 0", 'seed = "a"'))
    with pytest.raises(InputError, match="seed='a'"):
        write([tmp_path / "c"], tmp_path / "p.html")


def test_a_damaged_settings_file_is_told(compared, tmp_path):
    shutil.copytree(compared / "empirical-bayes-seed0", tmp_path / "r")
    (tmp_path / "r/settings.toml").write_text("= nothing")
    with pytest.raises(InputError, match=r"settings.toml"):
        write([tmp_path / "r"], tmp_path / "p.html")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("result.json", lambda found: found.pop("communication")),
        ("result.json", lambda found: found.update({"global": ["accuracy"]})),
        ("evaluation.json", lambda found: found["clients"].pop("sizes")),
        ("evaluation.json", lambda found: found["clients"].update(labels=[["<b>"] * 10] * 8)),
        ("evaluation.json", lambda found: found.update(sketches=["a", "b", "c"])),
        ("problem.json", lambda found: found.update(likelihood=None)),
        ("rounds.jsonl", lambda found: found.update(loss="much")),
    ],
)
def test_files_that_lack_something_are_told_by_their_folder(compared, tmp_path, name, change):
    shutil.copytree(compared, tmp_path / "c")
    changed(tmp_path / "c/mixture-seed0", name, change)
    with pytest.raises(InputError, match="mixture-seed0"):
        write([tmp_path / "c"], tmp_path / "p.html")


def test_other_data_are_another_method(tmp_path):
    a = own(table(tmp_path / "patients.npz", 0), tmp_path / "a", seed=0)
    b = own(table(tmp_path / "other.npz", 1), tmp_path / "b", seed=1)
    assert names(a, b) == ["fedavg dataset=patients", "fedavg dataset=other"]


def test_data_are_told_by_their_content_not_by_their_path(tmp_path):
    a = own(table(tmp_path / "one/patients.npz", 0), tmp_path / "a", seed=0)
    b = own(table(tmp_path / "two/patients.npz", 0), tmp_path / "b", seed=1)
    c = own(table(tmp_path / "three/patients.npz", 1), tmp_path / "c", seed=2)
    assert [[run.path.name for run in method.runs] for method in run_data.read([a, b, c])] == [
        ["a", "b"],
        ["c"],
    ]
    assert names(a, b, c) == ["fedavg (a)", "fedavg (c)"]
    (c / "result.json").unlink()
    assert names(a, c) == ["fedavg"]  # not finished: nothing tells that it is other data


@pytest.mark.parametrize("evaluate_on", ["test", None])
def test_another_network_or_more_arrays_are_another_method(tmp_path, evaluate_on):
    a = fitted(tmp_path / "a", 4, 0, evaluate_on=evaluate_on)
    assert names(a, fitted(tmp_path / "b", 4, 1, evaluate_on=evaluate_on)) == ["fedavg"]
    assert names(a, fitted(tmp_path / "c", 8, 1, evaluate_on=evaluate_on)) == [
        "fedavg (a)",
        "fedavg (c)",
    ]
    assert names(a, fitted(tmp_path / "d", 4, 1, 30, evaluate_on=evaluate_on)) == [
        "fedavg (a)",
        "fedavg (d)",
    ]


def test_a_seed_is_in_a_method_once(tmp_path):
    for seed in (0, 1):
        finished.one(tmp_path / f"x/fedavg-seed{seed}", "fedavg", rounds=1, seed=seed)
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    methods = run_data.read([tmp_path / "x", tmp_path / "y"])
    assert [method.name for method in methods] == [
        "fedavg (x/fedavg-seed0)",
        "fedavg (y/fedavg-seed0)",
    ]
    assert [[run.path.parent.name for run in method.runs] for method in methods] == [
        ["x", "x"],
        ["y", "y"],
    ]
