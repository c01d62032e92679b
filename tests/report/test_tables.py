"""The result table: means, deviations, the best, and its caption."""

from __future__ import annotations

import json
import re
import statistics

import finished
from pages import words_of

from fedhb.report.page import write


def result_of(folder, name, seed):
    return json.loads((folder / f"{name}-seed{seed}/result.json").read_text())


def test_the_table_has_means_deviations_and_the_best_in_bold(compared, page):
    means = {}
    for name in ("empirical-bayes", "mixture", "fedavg"):
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
    assert "fedpop" in words_of(text)
    assert "of their own" not in words_of(write_page(compared, tmp_path))


def write_page(folder, out):
    write([folder], out / "other.html")
    return (out / "other.html").read_text()


def test_the_caption_tells_of_another_split_than_test(compared, page, tmp_path):
    assert "at the last round; ±" in words_of(page)
    a = finished.one(tmp_path / "a", "fedavg", rounds=1, validation=0.2, evaluate_on="validation")
    write([a], tmp_path / "p.html")
    assert "at the last round, on validation examples." in words_of(
        (tmp_path / "p.html").read_text()
    )
    write([a, compared / "empirical-bayes-seed0"], tmp_path / "p.html")
    assert "on validation examples (fedavg) and test examples (empirical-bayes)" in words_of(
        (tmp_path / "p.html").read_text()
    )
