"""The rules of a federation, as the run config gives them."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr")

from fedhb.errors import InputError
from fedhb.flower.federated_task import Rules


def test_rules_are_read_from_keys_with_hyphens():
    rules = Rules.of({"nodes": 4, "min-answers": "0.75", "max-growth": 5, "other": 1})
    assert (rules.nodes, rules.min_answers, rules.max_growth) == (4, 0.75, 5.0)
    assert rules.deadline == Rules().deadline


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("deadline", 0.0),
        ("patience", float("inf")),
        ("poll", float("nan")),
        ("max_growth", -1.0),
        ("nodes", 0),
        ("retries", -1),
        ("min_answers", 0.0),
        ("min_answers", 1.5),
    ],
)
def test_a_rule_out_of_its_bounds_is_named(name, value):
    with pytest.raises(InputError, match=f"{name}={value}"):
        Rules(**{name: value})
