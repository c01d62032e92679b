"""The page of runs: what it says is what the runs hold, and it needs nothing else."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser

import finished
import numpy as np
import pytest
from pages import data_of, words_of

from fedhb.report.page import write
from fedhb.runs.folder import RunFolder
from fedhb.runs.settings import ALGORITHMS


def test_every_section_has_its_plots(page):
    found = {plot["id"]: plot for plot in data_of(page)["plots"]}
    assert {
        "curve-loss",
        "curve-score",
        "curve-negative_elbo",
        "labels",
        "scatter",
        "bars",
        "reliability",
        "confidence",
    } <= set(found)
    assert {"rejection", "entropy", "layers", "prototypes", "use", "skill", "map"} <= set(found)
    for plot in found.values():
        assert plot["title"] and plot["alt"] and f'id="plot-{plot["id"]}"' in page
    loss = found["curve-loss"]["series"]
    assert [s["name"] for s in loss if not s.get("faint")] == ["niw", "mixture", "fedavg"]
    assert sum(bool(s.get("faint")) for s in loss) == 6
    assert "worst, seed 0" in words_of(page)


def test_the_page_stands_alone(page):
    own = re.sub(
        r"<script>.*?</script>", "", page, count=1, flags=re.S
    )  # the library's text has addresses that it never calls
    assert not re.search(r'(src|href)="(?!#|data:)', own)
    assert "http" not in re.sub(r"<script.*?</script>", "", own, flags=re.S)
    assert len(page) < 2_000_000


class Outline(HTMLParser):
    def __init__(self):
        super().__init__()
        self.levels, self.ids, self.images, self.lang = [], [], [], None

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.lang = found.get("lang", self.lang)
        self.levels += [int(tag[1])] if re.fullmatch("h[1-6]", tag) else []
        self.ids += [found["id"]] if "id" in found else []
        self.images += [found] if found.get("role") == "img" else []


def test_headings_do_not_skip_and_every_plot_is_told_in_words(page):
    outline = Outline()
    outline.feed(re.sub(r"<script>.*?</script>", "", page, flags=re.S))
    assert outline.levels[0] == 1 and outline.levels.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(outline.levels, outline.levels[1:], strict=False))
    assert len(outline.ids) == len(set(outline.ids)) and outline.lang == "en"
    assert outline.images and all(len(image["aria-label"]) > 20 for image in outline.images)


def test_old_and_unfinished_runs_have_a_page_that_says_so(compared, tmp_path):
    shutil.copytree(compared, tmp_path / "c")
    for path in (tmp_path / "c").glob("*/evaluation.json"):
        path.unlink()
    (tmp_path / "c/niw-seed1/result.json").unlink()
    write([tmp_path / "c"], tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text()
    words = words_of(text)
    assert (
        "Not finished: niw-seed1 (round 6)" in words
        and "have no evaluation.json" in words
        and "left out" in words
    )
    names = {plot["id"] for plot in data_of(text)["plots"]}
    assert {"curve-loss", "scatter", "bars"} <= names and not names & {
        "labels",
        "map",
        "reliability",
    }


def test_a_run_before_its_first_evaluation(tmp_path):
    finished.one(tmp_path / "r", "fedavg")
    (tmp_path / "r/result.json").unlink()
    (tmp_path / "r/evaluation.json").unlink()
    write([tmp_path / "r"], tmp_path / "p.html")
    assert "No run here is finished" in words_of((tmp_path / "p.html").read_text())


@pytest.mark.parametrize("place", ["names", "sizes", "metrics", "main metric"])
def test_names_from_data_cannot_break_the_page(tmp_path, place):
    path = finished.one(tmp_path / "r", "fedavg")
    evaluation = json.loads((path / "evaluation.json").read_text())
    result = json.loads((path / "result.json").read_text())
    bad = "</script><script>alert(1)</script>"
    clients = evaluation["clients"]
    if place == "names":
        clients["client"][0] = result["per_client"]["client"][0] = result["dataset"] = bad
    elif place == "sizes":
        clients["sizes"] = [bad] * 8
    elif place == "metrics":
        result["global"][bad] = result["personalised"][bad] = 0.5
    else:
        per_client = result["per_client"]
        result["per_client"] = {
            key.replace("accuracy", bad): value
            for key, value in per_client.items()
            if key != "client"
        }
    del evaluation["checksum"]
    (path / "evaluation.json").write_text(json.dumps(evaluation))
    RunFolder(path).write_result(json.dumps(result).encode())
    write([path], tmp_path / "p.html")
    assert "<script>alert(1)" not in (tmp_path / "p.html").read_text()


def test_a_hundred_clients_and_many_rounds_stay_small(compared, tmp_path):
    """The bound of five megabytes: 13 methods, 100 clients of 10 classes, 320 rounds."""
    rng = np.random.default_rng(0)
    source = compared / "mixture-seed0"
    record = json.loads((source / "rounds.jsonl").read_text().splitlines()[-1])
    evaluation, result = (
        json.loads((source / f"{name}.json").read_text()) for name in ("evaluation", "result")
    )
    del evaluation["checksum"]
    N = 100
    evaluation["clients"] = {
        "client": list(range(N)),
        "sizes": [600] * N,
        "labels": rng.integers(0, 200, (N, 10)).tolist(),
    }
    evaluation["sketches"] = rng.normal(size=(N, 64)).tolist()
    for key in ("responsibilities", "gate"):
        evaluation["posterior"][key] = rng.dirichlet([1, 1], N).tolist()
    accuracy = {
        f"{task}_accuracy": rng.uniform(size=N).tolist() for task in ("global", "personalised")
    }
    result["per_client"] = {"client": list(range(N)), **accuracy}
    for name in ALGORITHMS:
        folder = tmp_path / f"c/{name}-seed0"
        folder.mkdir(parents=True)
        (folder / "settings.toml").write_text(
            (source / "settings.toml").read_text().replace('"mixture"', f'"{name}"')
        )
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
        (folder / "result.json").write_text(json.dumps(result | {"algorithm": name}))
        lines = (
            json.dumps(record | {"round": k + 1, "loss": rng.uniform(), "score": rng.uniform()})
            for k in range(320)
        )
        (folder / "rounds.jsonl").write_text("\n".join(lines))
    write([tmp_path / "c"], tmp_path / "p.html")
    assert (tmp_path / "p.html").stat().st_size < 5_000_000


def test_a_regression_beside_classes_and_novel_clients(tmp_path):
    sites = finished.regression(tmp_path / "a/r")
    classes = finished.one(tmp_path / "b", "fedavg", rounds=1, holdout_clients=2)
    write([sites, classes], tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text()
    assert "novel clients, which never trained" in words_of(text)
    plots = {plot["id"]: plot for plot in data_of(text)["plots"]}
    (regression,) = (s["name"] for s in plots["scatter"]["series"])
    (classification,) = (s["name"] for s in plots["scatter-2"]["series"])
    assert (
        not plots["scatter"]["percent"]
        and plots["scatter-2"]["percent"]
        and regression != classification
    )
    for name, method in (("rejection-rmse", regression), ("rejection", classification)):
        assert all(
            {s["name"] for s in shown["series"]} == {method}
            for shown in plots[name]["options"].values()
        )
    assert "bars" in plots and "bars-2" in plots
