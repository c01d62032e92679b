"""Jobs in several processes. More about them is in companion/test_jobs.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedhb.errors import InputError
from fedhb.runs import jobs, tune


def test_errors_come_back_from_processes(tmp_path):
    job = jobs.Job(
        tune.run,
        {"cells": {"c": {"dataset": "nosuch"}}, "variants": {"niw": {}}},
        {},
        tmp_path,
    )
    keys = [{"cell": "c", "variant": "niw", "seed": seed} for seed in (0, 1)]
    with pytest.raises(InputError, match="'nosuch'"):
        list(jobs.perform([replace(job, key=key) for key in keys], 2, lambda *told: None))
    with pytest.raises(RuntimeError, match="KeyError"):
        list(
            jobs.perform([replace(job, key={"cell": c}) for c in ("x", "y")], 2, lambda *told: None)
        )
