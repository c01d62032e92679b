"""The settings of cells and variants, and what their results depend on."""

from __future__ import annotations

import pytest
from tuning import write_data

from fedhb.errors import InputError
from fedhb.runs import run_grid


def test_a_file_takes_the_place_of_a_data_set_and_the_other_way_round(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data()
    settings = {
        "cells": {"digits": {"dataset": "digits"}, "mine": {}},
        "variants": {"empirical-bayes": {}},
        "common": {"data": "mine.npz"},
    }
    found = {
        cell: run_grid.resolved(settings, {"cell": cell, "variant": "empirical-bayes", "seed": 0})
        for cell in settings["cells"]
    }
    assert [one["dataset"] for one in found.values()] == [
        "digits",
        "mine.npz",
    ] and "data" not in found["digits"]
    settings["cells"]["mine"] |= {"dataset": "digits", "data": "mine.npz"}
    with pytest.raises(InputError, match=r"data=.mine\.npz.*dataset=.digits"):
        run_grid.resolved(settings, {"cell": "mine", "variant": "empirical-bayes", "seed": 0})


def test_a_changed_file_is_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data()
    before = run_grid.dataset_of("digits", "mine.npz")
    assert run_grid.dataset_of("digits", "mine.npz") is before
    write_data(seed=1)
    assert run_grid.dataset_of("digits", "mine.npz") is not before


def test_a_setting_that_a_record_lacks_is_at_its_default():
    names = ["lr", "dp_noise", "fedprox.mu", "model.hidden", "nosuch", "nosuch.lr"]
    assert run_grid.with_defaults({"lr": 0.3}, names) == {
        "lr": 0.3,
        "dp_noise": 0.0,
        "fedprox.mu": run_grid.default("fedprox.mu"),
    }
