"""`--log` on the command line."""

from __future__ import annotations

import sys

import pytest

from fedhb.cli import main


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fedhb", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return ended.value.code or 0


FLAGS = [
    "--num-clients",
    6,
    "--shards-per-client",
    3,
    "--fraction",
    0.5,
    "--rounds",
    2,
    "--personal-epochs",
    1,
]


def test_the_command_line_logs_every_run_of_a_comparison(monkeypatch, tmp_path, capsys):
    out = tmp_path / "c"
    assert (
        command(
            monkeypatch,
            "compare",
            *FLAGS,
            "--algorithms",
            "empirical-bayes,fedavg",
            "--seeds",
            0,
            "--out",
            out,
            "--log",
            "csv",
        )
        == 0
    )
    for name in ("empirical-bayes", "fedavg"):
        assert len((out / f"{name}-seed0/log.csv").read_text().splitlines()) == 3
    said = capsys.readouterr().err
    assert (
        "\x1b" not in said
        and "empirical-bayes seed 0: round 2/2" in said
        and "fedavg seed 0: global accuracy" in said
    )  # lines for a log


def test_an_unknown_logger_is_refused_before_training(monkeypatch, tmp_path, capsys):
    assert (
        command(monkeypatch, "train", *FLAGS, "--out", tmp_path / "x", "--log", "tensorbored") == 2
    )
    assert "'tensorboard'" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x").exists()
