"""`fedhb deploy up`, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

pytestmark = pytest.mark.federation


def fedhb(*words, cwd):
    command = [str(Path(sys.executable).parent / "fedhb"), *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )


def test_the_federation_ends_with_the_simulators_accuracy(tmp_path):
    done = fedhb(
        *[
            "deploy",
            "up",
            "--nodes",
            "3",
            "--algorithm",
            "empirical-bayes",
            "--dataset",
            "digits",
            "--rounds",
            "2",
        ],
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert (
        "with TLS and node authentication" in done.stderr
        and "unregistered key was refused" in done.stderr
    )
    assert "a round took" in done.stdout
    folder = tmp_path / "runs" / "federation"
    assert (
        fedhb("train", folder / "settings.toml", "--out", "simulated", cwd=tmp_path).returncode == 0
    )
    ours, theirs = (
        json.loads((p / "result.json").read_text())
        for p in (folder / "run", tmp_path / "simulated")
    )
    assert ours["global"]["accuracy"] == pytest.approx(theirs["global"]["accuracy"], abs=1e-3)
    assert ours["personalised"]["accuracy"] == pytest.approx(
        theirs["personalised"]["accuracy"], abs=1e-2
    )
    assert oct((folder / "keys" / "node-0").stat().st_mode)[-3:] == "600"
    again = fedhb(
        *[
            "deploy",
            "up",
            "--nodes",
            "3",
            "--algorithm",
            "empirical-bayes",
            "--dataset",
            "digits",
            "--rounds",
            "2",
        ],
        cwd=tmp_path,
    )
    assert again.returncode == 2 and "already holds a run" in again.stderr
