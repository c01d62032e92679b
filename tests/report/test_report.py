"""The page of runs: what it says is what the runs hold, old and unfinished runs have one too, and it needs nothing else."""

from __future__ import annotations

import html
import json
import re
import shutil
import statistics
import sys
import tomllib
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path

import finished
import numpy as np
import pytest

from fedhb.cli import main
from fedhb.errors import InputError
from fedhb.report import clients_section, run_data
from fedhb.report.figures import COLOURS, mean_and_spread, styles
from fedhb.report.page import write
from fedhb.report.plots import thinned
from fedhb.runs.folder import RunFolder
from fedhb.runs.settings import ALGORITHMS, Settings
from fedhb_paper import printed


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    return finished.several(tmp_path_factory.mktemp("compared") / "c")


@pytest.fixture(scope="module")
def page(compared, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "page.html"
    write([compared], out)
    return out.read_text()


def data_of(text):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S).group(1)
    )


def words_of(text):
    """What a reader sees without the plots."""
    body = re.sub(r"<(script|style).*?</\1>", " ", text, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def result_of(folder, name, seed):
    return json.loads((folder / f"{name}-seed{seed}/result.json").read_text())


def test_the_table_has_means_deviations_and_the_best_in_bold(compared, page):
    means = {}
    for name in ("niw", "mixture", "fedavg"):
        values = [
            100 * result_of(compared, name, seed)["personalised"]["accuracy"] for seed in (0, 1)
        ]
        means[name] = statistics.fmean(values)
        row = re.search(
            rf'<th scope="row"><span[^>]*></span>{name}</th>(.*?)</tr>', page, re.S
        ).group(1)
        cell = re.findall(r"<td.*?</td>", row)[4]
        assert f"{means[name]:.2f}" in cell and f"±{statistics.stdev(values):.2f}" in cell
        means[name] = (means[name], "<strong>" in cell)
    best = max(value for value, _ in means.values())
    assert all(bold == (value == best) for value, bold in means.values())


def test_a_personal_model_is_not_the_best_global_prediction(compared, tmp_path):
    finished.one(tmp_path / "fedpop", "fedpop", fraction=1.0)
    write([compared, tmp_path / "fedpop"], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    row = re.search(
        r'<th scope="row"><span[^>]*></span>fedpop.*?</th>(.*?)</tr>', text, re.S
    ).group(1)
    assert not any("<strong>" in cell for cell in re.findall(r"<td.*?</td>", row)[:4])
    assert "fedpop with heads of their own" in words_of(text)
    assert "of their own" not in words_of(write_page(compared, tmp_path))


def write_page(folder, out):
    write([folder], out / "other.html")
    return (out / "other.html").read_text()


def test_the_sentence_says_what_was_run(page):
    words = words_of(page)
    assert (
        "niw, mixture and fedavg trained on digits, held by 8 clients with at most 3 classes each, 4 of them in each of 6 rounds"
        in words
    )
    assert "seeds 0, 1" in words and "fedhb 0." in words and "torch 2." in words


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


def test_curves_are_those_of_the_runs(compared, page):
    rounds = [
        [
            json.loads(line)
            for line in (compared / f"niw-seed{k}/rounds.jsonl").read_text().splitlines()
        ]
        for k in (0, 1)
    ]
    mean = next(s for s in data_of(page)["plots"][0]["series"] if s["name"] == "niw")
    assert mean["y"] == pytest.approx(
        [(a["loss"] + b["loss"]) / 2 for a, b in zip(*rounds, strict=True)], rel=1e-4
    )
    sent = np.cumsum([r["down_bytes"] + r["up_bytes"] for r in rounds[0]]) / 1e6
    assert mean["x"]["sent"] == pytest.approx(sent, rel=1e-4) and mean["x"]["round"] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


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


def test_the_same_method_with_other_settings_has_a_name_of_its_own(tmp_path):
    a = finished.one(tmp_path / "a", "niw", niw={"kl_weight": 0.0})
    b = finished.one(tmp_path / "b", "niw", niw={"kl_weight": 1.0})
    methods = run_data.read([a, b])
    assert [m.name for m in methods] == ["niw kl_weight=0.0", "niw kl_weight=1.0"]
    assert (
        methods[0].style.colour == methods[1].style.colour
        and methods[0].style.dash != methods[1].style.dash
    )


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


def paper_run(**changes):
    """A run of a cell of the paper, or one with other settings, before its first round."""
    cell = {
        "dataset": "fashion-mnist",
        "num_clients": 100,
        "shards_per_client": 5,
        "fraction": 0.1,
        "rounds": 100,
    }
    settings = tomllib.loads(Settings.resolve(cell | changes, {}).to_toml({}))
    return run_data.RunData(Path("r"), settings, "", [], None, None)


def test_a_cell_of_the_paper_is_recognised():
    place = printed.folder()
    for run in (paper_run(), paper_run(unseen="mnist", seed=3, partition="shards", lr=0.5)):
        where, numbers = printed.numbers(run.algorithm, run.settings)
        row = next(
            r
            for r in (place / "all_mnist/printed.csv").read_text().splitlines()
            if r.startswith("fashion-mnist tau=1,niw,global,accuracy")
        )
        assert "fashion-mnist tau=1" in where
        assert numbers["global", "accuracy"][0] == pytest.approx(float(row.split(",")[4]) / 100)


@pytest.mark.parametrize(
    "changes",
    [
        {"local_epochs": 3},
        {"partition": "iid"},
        {"unseen": "9"},
        {"data": "my.npz"},
        {"model": "convnet"},
        {"model": {"hidden": 128}},
        {"validation": 0.2},
        {"evaluate_on": "validation", "validation": 0.2},
        {"holdout_clients": 10},
        {"dp_noise": 1.0},
        {"defence": "default"},
        {"schedule": "constant"},
        {"batch_norm": "batch"},
        {"server_share": 0.1},
    ],
    ids=str,
)
def test_a_run_by_other_settings_is_no_cell_of_the_paper(changes):
    assert printed.numbers("niw", paper_run(**changes).settings) == ("", {})


def test_a_run_that_has_no_such_settings_is_no_cell_of_the_paper():
    run = paper_run()
    run.settings["algorithm"] = "mine"
    assert printed.numbers(run.algorithm, run.settings) == ("", {})


def test_the_caption_tells_of_another_split_than_test(compared, page, tmp_path):
    assert "at the last round; ±" in words_of(page)
    a = finished.one(tmp_path / "a", "fedavg", rounds=1, validation=0.2, evaluate_on="validation")
    write([a], tmp_path / "p.html")
    assert "at the last round, on validation examples." in words_of(
        (tmp_path / "p.html").read_text()
    )
    write([a, compared / "niw-seed0"], tmp_path / "p.html")
    assert "on validation examples (fedavg) and test examples (niw)" in words_of(
        (tmp_path / "p.html").read_text()
    )


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


def test_few_methods_never_share_a_colour():
    for names in (
        ["niw", "fedem", "fedavg"],
        ["local", "centralised", "ensemble", "fedpop"],
        ["mine", "niw"],
    ):
        assert len({style.colour for style in styles(names).values()}) == len(names)


def test_styles_are_the_methods_own():
    all_ = styles(list(ALGORITHMS))
    assert len({(s.colour, s.dash) for s in all_.values()}) == len(ALGORITHMS)
    assert (
        styles(["fedavg"])["fedavg"].colour
        == all_["fedavg"].colour
        == styles(["niw", "fedavg"])["fedavg"].colour
    )


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("ground", ["#ffffff", "#14171b"])
def test_colours_have_contrast_on_both_grounds(colour, ground):
    """WCAG 2.2, 1.4.11: 3 to 1 for what is drawn."""

    def luminance(text):
        parts = [int(text[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(colour), luminance(ground)))
    assert (high + 0.05) / (low + 0.05) >= 3


def test_the_map_finds_groups():
    centres = np.random.default_rng(0).normal(size=(3, 64)) * 10
    labels = [k % 3 for k in range(30)]
    place, share = clients_section.principal(
        np.array([centres[k] for k in labels]) + np.random.default_rng(1).normal(size=(30, 64))
    )
    assert clients_section.neighbours(place, labels) == 1.0 and share > 0.8


def test_neighbours_of_many_clients_need_little_memory():
    rng = np.random.default_rng(0)
    place, labels = rng.normal(size=(3000, 2)), rng.integers(0, 3, 3000).tolist()
    place[1] = place[0]  # two in one place are each other's neighbours, not their own
    labels[0], labels[1] = 0, 1
    few = ((place[:600, None] - place[None, :600]) ** 2).sum(-1)
    np.fill_diagonal(few, np.inf)
    assert clients_section.neighbours(place[:600], labels[:600]) == np.mean(
        [labels[k] == labels[n] for k, n in enumerate(few.argmin(1))]
    )
    tracemalloc.start()
    clients_section.neighbours(place, labels)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6  # all distances at once: 216 MB


def test_mean_and_spread_pass_over_what_is_missing():
    assert mean_and_spread([[1.0, None, 3.0], [3.0, 5.0]]) == (
        [2.0, 5.0, 3.0],
        [pytest.approx(2**0.5), None, None],
    )


def test_thinned_keeps_both_ends():
    for count in (1, 5, 640, 641, 10_000):
        kept = thinned(count)
        assert kept[0] == 0 and kept[-1] == count - 1 and len(kept) <= 641
    assert thinned(0) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "no such folder"),
        (["."], "holds no run"),
        ([".", "--out", "no/page.html"], "folder that exists"),
    ],
)
def test_bad_input_is_told(arguments, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fedhb", "report", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2 and said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["result.json", "evaluation.json"])
def test_numbers_that_were_changed_are_not_shown(compared, tmp_path, name):
    shutil.copytree(compared / "niw-seed0", tmp_path / "r")
    content = bytearray((tmp_path / "r" / name).read_bytes())
    place = next(k for k in range(len(content) // 2, len(content)) if chr(content[k]).isdigit())
    content[place] = ord("1") if content[place] != ord("1") else ord("2")
    (tmp_path / "r" / name).write_bytes(content)
    with pytest.raises(InputError, match=r"is not as it was written|does not match its checksum"):
        write([tmp_path / "r"], tmp_path / "p.html")


def test_files_that_make_no_sense_are_told_or_passed_over(compared, tmp_path):
    shutil.copytree(compared, tmp_path / "c")
    (tmp_path / "c/comparison.json").write_text("[]")
    write([tmp_path / "c"], tmp_path / "p.html")
    settings = tmp_path / "c/niw-seed0/settings.toml"
    settings.write_text(settings.read_text().replace("seed = 0", 'seed = "a"'))
    with pytest.raises(InputError, match="seed='a'"):
        write([tmp_path / "c"], tmp_path / "p.html")


def test_a_damaged_settings_file_is_told(compared, tmp_path):
    shutil.copytree(compared / "niw-seed0", tmp_path / "r")
    (tmp_path / "r/settings.toml").write_text("= nothing")
    with pytest.raises(InputError, match="cannot be read"):
        write([tmp_path / "r"], tmp_path / "p.html")


def changed(path, name, change):
    """A file of a run with something else in it than fedhb writes, as its checksums allow."""
    shutil.rmtree(path / "checkpoint", ignore_errors=True)
    if name == "rounds.jsonl":
        records = [json.loads(line) for line in (path / name).read_text().splitlines()]
        for record in records:
            change(record)
        (path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        return
    content = json.loads((path / name).read_text())
    content.pop("checksum", None)
    change(content)
    (path / name).write_text(json.dumps(content))


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
    with pytest.raises(
        InputError, match=r"mixture-seed0: its files do not hold what fedhb writes \("
    ):
        write([tmp_path / "c"], tmp_path / "p.html")


def test_rounds_that_do_not_say_what_was_sent_have_their_curves(compared, tmp_path):
    shutil.copytree(compared / "niw-seed0", tmp_path / "r")
    changed(tmp_path / "r", "rounds.jsonl", lambda found: found.pop("down_bytes"))
    write([tmp_path / "r"], tmp_path / "p.html")
    assert "curve-loss" in {
        plot["id"] for plot in data_of((tmp_path / "p.html").read_text())["plots"]
    }


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
