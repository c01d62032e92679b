"""The paper's figures: what they show is what the records hold, as PNG and SVG, the same bytes each
time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from small_experiment import COMMON, write

from fedhb.cli import main
from fedhb.report.figures import Figure, Series
from fedhb.runs.from_settings import train
from fedhb.runs.run_grid import settings_of
from fedhb_paper import experiments, pictures, workbench
from fedhb_paper.drawing import draw

ROOT = Path(__file__).parents[2]

PARAMETER = f"""
title = "K, small"
kind = "table"
seeds = [0, 1]
{COMMON}
[cells.digits]
dataset = "digits"
[variants]
fedbabu = {{}}
"mixture K=1" = {{algorithm = "mixture", mixture = {{num_prototypes = 1}}}}
"mixture K=2" = {{algorithm = "mixture", mixture = {{num_prototypes = 2}}}}
"mixture K=3" = {{algorithm = "mixture", mixture = {{num_prototypes = 3}}}}
"""
CONVERGENCE = f"""
title = "convergence, small"
kind = "convergence"
seeds = [0, 1]
{COMMON}
[cells.half]
dataset = "digits"
[cells.all]
dataset = "digits"
fraction = 1.0
[variants]
niw = {{}}
"""
NOVEL = f"""
title = "novel, small"
kind = "novel"
seeds = [0]
examples = [2, 5]
{COMMON}
holdout_clients = 2
[cells.digits]
dataset = "digits"
[variants]
niw = {{}}
fedavg = {{}}
"""
PRINTED = """cell,algorithm,task,metric,mean,std
digits,mixture K=2,global,accuracy,49.37,0.30
digits,mixture K=3,global,accuracy,46.97,0.13
"""


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["fedhb", "paper", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    printed = capsys.readouterr()
    return ended.value.code or 0, " ".join((printed.out + printed.err).split())


def found(folder, name):
    experiment = experiments.load(folder, name)
    records = workbench.standing(experiment, experiments.choose(experiment)).records
    figures = experiment.kind.figures(experiment.settings, experiment.printed(), records)
    return {figure.name: figure for figure in figures}, records


def test_a_parameter_of_the_variants_makes_a_figure(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path, PARAMETER, "k", PRINTED)
    code, said = command(monkeypatch, capsys, "k", "--folder", folder)
    assert code == 0 and "figures in" in said
    names = {path.name for path in (folder / "k/figures").iterdir()}
    assert names == {
        f"digits-{task}.{kind}" for task in ("global", "personalised") for kind in ("png", "svg")
    }
    assert (folder / "k/figures/digits-global.png").read_bytes().startswith(b"\x89PNG")
    svg = (folder / "k/figures/digits-global.svg").read_text()
    assert "mixture, printed" in svg and "fedbabu" in svg and "<dc:title>" in svg
    figures, records = found(folder, "k")
    lines = {series.name: series for series in figures["digits-global"].series}
    values = [
        r["result"]["global"]["accuracy"] for r in records if r["key"]["variant"] == "mixture K=2"
    ]
    assert lines["mixture"].x == ["1", "2", "3"]
    assert lines["mixture"].y[1] == pytest.approx(np.mean(values))
    assert lines["mixture"].spread[1] == pytest.approx(np.std(values, ddof=1))
    assert lines["mixture, printed"].y == [None, pytest.approx(0.4937), pytest.approx(0.4697)]
    assert len(set(lines["fedbabu"].y)) == 1  # a level, whatever K


def test_figures_have_all_records_also_when_few_are_asked_for_and_the_same_bytes(
    tmp_path, monkeypatch, capsys
):
    folder = write(tmp_path, PARAMETER, "k", PRINTED)
    command(monkeypatch, capsys, "k", "--folder", folder)
    path = folder / "k/figures/digits-global.svg"
    before = {one.name: one.read_bytes() for one in path.parent.iterdir()}
    path.unlink()
    assert (
        command(
            monkeypatch,
            capsys,
            "k",
            "--folder",
            folder,
            "--show",
            "--seeds",
            0,
            "--algorithms",
            "fedbabu",
        )[0]
        == 0
    )
    assert {one.name: one.read_bytes() for one in path.parent.iterdir()} == before


def test_curves_of_convergence(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path, CONVERGENCE, "c", "")
    assert command(monkeypatch, capsys, "c", "--folder", folder)[0] == 0
    figures, records = found(folder, "c")
    assert set(figures) == {"niw-negative-elbo", "niw-loss"}
    line = next(s for s in figures["niw-negative-elbo"].series if s.name == "all")
    curves = [r["result"]["negative_elbo"] for r in records if r["key"]["cell"] == "all"]
    assert line.y == pytest.approx(np.mean(curves, axis=0).tolist()) and line.x == [1, 2, 3]


def test_what_is_recorded_with_a_part_of_the_rounds_or_at_another_width_is_drawn(
    tmp_path, monkeypatch, capsys
):
    folder = write(tmp_path, CONVERGENCE, "c", "")
    asked = ("c", "--folder", folder, "--rounds", 0.67, "--cell", "all", "--seeds", 0)
    code, said = command(monkeypatch, capsys, *asked)
    assert code == 0 and "4 figures in" in said
    svg = (folder / "c/figures/niw-loss.svg").read_text()
    assert (
        "niw, all rounds=0.67</dc:title>" in svg and "half" not in svg
    )  # no legend tells what a single line is
    folder = write(
        tmp_path / "other",
        PARAMETER.replace("[variants]", "[cells.more]\ndataset = 'digits'\n[variants]"),
        "k",
        "",
    )
    asked = ("k", "--folder", folder, "--rounds", 0.67, "--cell", "digits", "--seeds", 0)
    assert command(monkeypatch, capsys, *asked)[0] == 0
    names = {path.stem for path in (folder / "k/figures").iterdir()}
    assert names == {"digits-rounds-0.67-global", "digits-rounds-0.67-personalised"}


def test_curves_of_personalisation(tmp_path, monkeypatch, capsys):
    folder = write(
        tmp_path, CONVERGENCE.replace("seeds = [0, 1]", "seeds = [0]\nepochs = [1, 3]"), "c", ""
    )
    code, said = command(monkeypatch, capsys, "c", "--folder", folder)
    figures, records = found(folder, "c")
    line = next(s for s in figures["half-personalisation-accuracy"].series if s.name == "niw")
    result = next(r["result"] for r in records if r["key"]["cell"] == "half")
    assert code == 0 and "accuracy by epochs of personalisation" in said
    assert (
        line.x == [0, 1, 3]
        and line.y[0] == result["global"]["accuracy"]
        and line.y[2] == result["after"]["3"]["accuracy"]
    )
    assert result["after"]["1"]["nll"] != result["after"]["3"]["nll"]
    chosen = settings_of(
        experiments.load(folder, "c").settings,
        {"cell": "half", "variant": "niw", "seed": 0},
    )
    for epochs in (1, 3):  # one of them as the run itself personalises
        run = train(chosen.change(personal_epochs=epochs), None, progress=False)
        assert run.result["personalised"] == result["after"][str(epochs)]


def test_novel_users(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path, NOVEL, "n", "")
    assert command(monkeypatch, capsys, "n", "--folder", folder)[0] == 0
    figures, records = found(folder, "n")
    line = next(s for s in figures["digits-accuracy"].series if s.name == "niw")
    result = next(r["result"] for r in records if r["key"]["variant"] == "niw")
    assert line.x == ["none", "2", "5"]
    assert (
        line.y[0] == result["before"]["accuracy"] and line.y[2] == result["after"]["5"]["accuracy"]
    )


def test_the_theorems_are_drawn_from_their_records(tmp_path):
    """From the records of the repository: the printed bound is broken where rounds are long, and
    nowhere else.
    """
    figures, _ = found(ROOT / "experiments", "theorem_convergence")
    assert set(figures) == {
        "gaussian",
        "gaussian-minibatch",
        "ill-scaled",
        "logistic",
        "long-rounds",
    }
    for name, figure in figures.items():
        lines = {s.name: s for s in figure.series}
        over = [
            label
            for label, s in lines.items()
            if not s.faint
            and any(g > b for g, b in zip(s.y, lines[f"{label}, bound"].y, strict=True))
        ]
        assert over == (["rounds, N_f = 1"] if name == "long-rounds" else [])
    figures, _ = found(ROOT / "experiments", "theorem_generalisation")
    lines = {s.name: s.y for s in figures["contained"].series}
    assert all(a < b for a, b in zip(lines["niw"], lines["best certificate"], strict=True))
    for path in draw(figures["contained"], tmp_path):
        assert path.stat().st_size > 5000


def test_a_diverged_or_stale_record_is_not_drawn():
    key = {"cell": "c", "variant": "v", "seed": 0}
    records = [
        {"key": key, "result": {"diverged": "x"}},
        {"key": key, "result": {"a": 1}, "stale": ["lr"]},
    ]
    assert pictures.of(records, "c", "v") == []


def test_tables_do_not_need_matplotlib(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path, PARAMETER, "k", PRINTED)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, said = command(monkeypatch, capsys, "k", "--folder", folder, "--show")
    assert code == 0 and "pip install matplotlib" in said and "49.37" in said


def test_bars_and_missing_values(tmp_path):
    figure = Figure(
        "b",
        "bars",
        "x",
        "y",
        [Series("a", ["p", "q"], [1.0, None]), Series("b", ["q"], [2.0], [0.1])],
        kind="bars",
    )
    assert [path.name for path in draw(figure, tmp_path)] == ["b.png", "b.svg"]
