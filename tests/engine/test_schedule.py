"""The cohort of a round, and its learning rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhb.engine.schedule import cohort, cohort_size, learning_rate
from fedhb.errors import InputError
from fedhb.seeding import Randomness


@pytest.mark.parametrize(
    ("num_clients", "fraction", "count"),
    [
        (100, 0.1, 10),
        (100, 1.0, 100),
        (100, 0.29, 29),
        (100, 0.57, 57),
        (100, 0.105, 10),
        (7, 0.5, 3),
        (7, 0.01, 1),
        (1, 1.0, 1),
    ],
)
def test_the_cohort_is_the_fraction_rounded_down_and_never_empty(num_clients, fraction, count):
    assert cohort_size(num_clients, fraction) == count
    assert len(cohort(num_clients, fraction, Randomness(0, 1))) == count


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_fraction_of_k_in_n_is_k_clients(num_clients, k):
    assert cohort_size(num_clients, min(k, num_clients) / num_clients) == min(k, num_clients)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01, math.nan])
def test_impossible_fractions_are_refused(fraction):
    with pytest.raises(InputError, match=f"fraction={fraction}"):
        cohort_size(10, fraction)


@pytest.mark.parametrize(
    ("num_clients", "count", "number_of_rounds"), [(20, 4, 200), (100, 4, 1000)]
)  # shuffled, and drawn
def test_no_client_twice_and_each_client_sooner_or_later(num_clients, count, number_of_rounds):
    rounds = [
        cohort(num_clients, count / num_clients, Randomness(0, number))
        for number in range(1, number_of_rounds + 1)
    ]
    for chosen in rounds:
        assert (
            chosen == sorted(set(chosen))
            and chosen[0] >= 0
            and chosen[-1] < num_clients
            and len(chosen) == count
        )
    times = [sum(k in chosen for chosen in rounds) for k in range(num_clients)]
    # each is binomial with mean 40: give or take 5.7 or 6.2; five deviations are 31
    assert min(times) > 9 and max(times) < 71


def test_the_cohort_depends_on_seed_and_round_alone():
    assert cohort(50, 0.2, Randomness(3, 7)) == cohort(50, 0.2, Randomness(3, 7))
    assert cohort(50, 0.2, Randomness(3, 7)) != cohort(50, 0.2, Randomness(3, 8))
    assert cohort(50, 0.2, Randomness(3, 7)) != cohort(50, 0.2, Randomness(4, 7))


def test_the_papers_steps():
    """320 rounds: 0.1 up to and including round 160, 0.01 up to 240, then 0.001."""
    by_round = {number: learning_rate("step", 0.1, number - 1, 320) for number in range(1, 321)}
    for number, rate in by_round.items():
        expected = 0.1 if number <= 160 else 0.01 if number <= 240 else 0.001
        assert rate == pytest.approx(expected, rel=1e-12), number


def test_other_schedules():
    assert {learning_rate("constant", 0.3, done, 10) for done in range(10)} == {0.3}
    cosine = [learning_rate("cosine", 0.3, done, 10) for done in range(10)]
    assert cosine == pytest.approx(
        [0.15 * (1 + math.cos(math.pi * done / 10)) for done in range(10)]
    )
    assert cosine[0] == 0.3 and cosine == sorted(cosine, reverse=True) and cosine[-1] > 0
    with pytest.raises(InputError, match="schedule='stepwise'"):
        learning_rate("stepwise", 0.1, 0, 10)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        (1, [1]),
        (2, [1, 0.1]),
        (3, [1, 0.1, 0.01]),
        (4, [1, 1, 0.1, 0.01]),
        (5, [1, 1, 0.1, 0.01, 0.01]),
    ],
)
def test_steps_of_few_rounds(rounds, expected):
    """As in FedBABU's code: after rounds rounds // 2 and 3 rounds // 4, once where these are the
    same.
    """
    assert [learning_rate("step", 1.0, done, rounds) for done in range(rounds)] == pytest.approx(
        expected, rel=1e-12
    )
