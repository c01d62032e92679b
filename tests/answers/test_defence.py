"""Filters of answers: what each does to a vector, and who has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import clients, mlp, plan, problem

import fedhb
from fedhb.answers.defence import Defence, Defended, Vectors, krum, normalised
from fedhb.answers.hostile import Hostile
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.in_process import InProcess
from fedhb.errors import InputError
from fedhb.seeding import Randomness


def test_shares_are_normalised():
    shares = torch.tensor([[0.25, 0.75], [1.0, 3.0], [-1.0, 2.0], [0.0, 0.0], [3e38, 3e38]])
    expected = torch.tensor([[0.25, 0.75], [0.25, 0.75], [0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    torch.testing.assert_close(normalised(shares), expected)


def vectors(rows: Any) -> Vectors:
    values = torch.tensor(rows, dtype=torch.float64)
    zeros = torch.zeros(1, values.shape[1], dtype=torch.float64)
    return Vectors({"theta": values.clone()}, {"theta": zeros}, len(values))


def test_winsorising_moves_extremes_to_the_next():
    v = vectors([[0.0, 5.0], [1.0, 4.0], [2.0, 3.0], [3.0, 2.0], [1000.0, -1000.0]])
    v.winsorise(0.2)
    assert v.arrays()["theta"].tolist() == [
        [1.0, 4.0],
        [1.0, 4.0],
        [2.0, 3.0],
        [3.0, 2.0],
        [3.0, 2.0],
    ]


def test_fewer_than_half_cannot_move_a_coordinate_out_of_the_others():
    generator = torch.Generator().manual_seed(0)
    honest = torch.randn(7, 50, generator=generator, dtype=torch.float64)
    for size in (1e3, 1e12, -1e12):
        v = vectors(torch.cat([honest, torch.full((2, 50), size, dtype=torch.float64)]).tolist())
        v.winsorise(0.25)
        mean = v.arrays()["theta"].mean(0)
        assert (mean <= honest.max(0).values).all() and (mean >= honest.min(0).values).all()


def test_krum_is_what_its_definition_says():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    rows[3] += 20.0
    n, f = 9, 2
    scores = []
    for i in range(n):
        distances = sorted(float((rows[i] - rows[j]).square().sum()) for j in range(n) if j != i)
        scores.append(sum(distances[: n - f - 2]))
    best = sorted(sorted(range(n), key=lambda i: scores[i])[: n - f])
    assert krum(vectors(rows.tolist()), list(range(n)), 0.25) == best and 3 not in best
    assert krum(vectors(rows[:3].tolist()), [0, 1, 2], 0.4) == [
        0,
        1,
        2,
    ]  # too few to say who is far
    # by n - f - 2 = 4 neighbours; by 3 it would keep 6 instead of 5, by 5 others again
    line = [2.3, 9.5, 9.0, 0.3, 0.3, 5.4, 9.4, 3.8]
    assert krum(vectors([[place] for place in line]), list(range(8)), 0.25) == [0, 2, 3, 4, 5, 7]


def test_clipping_shortens_what_is_long_and_nothing_else():
    algorithm = Defended(
        Hostile(fedhb.FedAvg(weighted=False), (2,), 4.0), Defence(("clip",), longest=1.0)
    )
    prob, rng = problem(), Randomness(5, 1)
    server = algorithm.start(prob, Randomness(5))
    found, _ = InProcess(prob, algorithm, clients(), ClientStore(), 6).run(
        server, range(6), plan(algorithm), rng
    )
    lengths = Vectors.of(found, server, algorithm).norms()
    summary, middle, extra = algorithm.sift(prob, server, found, rng, ())
    assert middle == pytest.approx(float(lengths.sort().values[2:4].mean())) and extra[
        "clipped"
    ] == int((lengths > middle).sum())
    shortened = [
        (found["theta"][k] - server["theta"]) * min(1.0, middle / float(lengths[k]))
        for k in range(6)
    ]
    torch.testing.assert_close(summary["theta"], torch.stack(shortened).sum(0))


@pytest.mark.parametrize(
    ("defence", "says"),
    [("kramp", "default.*refuse.*clip"), ("clip;krum", "comma")],
)
def test_an_unknown_defence_is_refused(defence, says):
    with pytest.raises(InputError, match=says):
        fedhb.fit(mlp(torch.float32), clients(), defence=defence, progress=False)


def test_algorithms_without_answers_have_no_filters():
    for name in ("centralised", "local"):
        with pytest.raises(InputError, match=name):
            fedhb.fit(
                mlp(torch.float32),
                clients(),
                fedhb.algorithms.build(name, {}),
                defence="default",
                progress=False,
            )
