"""Plots of the posterior from what evaluations recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fedhb.report.figures import Style
from fedhb.report.posterior_section import plots, prototype_use, shared_prototypes


def method(posterior: dict[str, Any], rounds: Any = ()) -> Any:
    evaluation = {"posterior": posterior, "clients": {"client": ["a", "b", "c"]}}
    run = SimpleNamespace(evaluation=evaluation, rounds=list(rounds), algorithm="mixture")
    return SimpleNamespace(name="mixture", runs=[run], first=run, style=Style("#000000"))


GATE = [[0.5, 0.5]] * 3


def test_clients_are_ordered_by_their_prototype():
    c = [[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]
    plot = shared_prototypes([method({"responsibilities": c, "gate": GATE})])
    assert plot is not None
    shown = next(value for key, value in plot["options"].items() if "c(j|i)" in key)
    assert shown["columns"] == ["b", "a", "c"]
    assert shown["values"] == [[0.8, 0.1, 0.3], [0.2, 0.9, 0.7]]


def test_prototypes_that_have_become_equal_are_told_from_those_that_have_not():
    alt = {}
    for name, first in (("equal", 0.505), ("different", 0.52)):
        c = [[first, 1 - first], [0.5, 0.5], [0.5, 0.5]]
        plot = shared_prototypes([method({"responsibilities": c, "gate": GATE})])
        assert plot is not None
        alt[name] = plot["alt"]
    assert "same" in alt["equal"] and "same" not in alt["different"]


def test_the_use_of_prototypes_is_a_line_for_each():
    rounds = [
        {"round": k, "responsibilities": [0.25 * k, 1 - 0.25 * k], "effective_prototypes": 1.5}
        for k in (1, 2)
    ]
    plot = prototype_use([method({}, rounds)])
    assert plot is not None and [line["y"] for line in plot["series"]] == [[0.25, 0.5], [0.75, 0.5]]
    assert "1.50" in plot["alt"]


def test_a_method_without_a_record_has_no_plot():
    assert plots([method({})]) == []
