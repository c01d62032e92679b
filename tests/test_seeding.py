"""Randomness that is derived from seed, round, client and purpose alone."""

from __future__ import annotations

import hashlib

import torch

from fedhb.seeding import SERVER, Randomness, absorb, derive


def test_a_seed_is_the_same_on_every_machine():
    """As `printf 3/1/-1/cohort | b2sum -l 64` says, without the last bit."""
    assert derive(0) == 4761921975702974394
    assert derive(3, 1, SERVER, "cohort") == 1180707279085232361


def test_seeds_have_63_bits_and_differ_by_every_part():
    seeds = {derive(*parts) for parts in ((0, 1), (1, 0), (0, "1x"), (0,), ("0", "1", ""))}
    assert len(seeds) == 5 and all(0 <= seed < 2**63 for seed in seeds)


def test_a_generator_is_fresh_for_each_client_and_purpose():
    rng = Randomness(5, round=2)
    draws = {
        (client, purpose): torch.rand(3, generator=rng(client, purpose)).tolist()
        for client in (SERVER, 0, 1)
        for purpose in ("order", "masks")
    }
    assert len({tuple(values) for values in draws.values()}) == 6
    assert torch.rand(3, generator=rng(0, "order")).tolist() == draws[0, "order"]
    for other in (Randomness(5, 3), Randomness(6, 2)):
        assert torch.rand(3, generator=other(0, "order")).tolist() != draws[0, "order"]


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    torch.rand(3, generator=Randomness(5)(0, "order"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_hash_of_tensors_depends_on_values_shape_and_type():
    def digest(*tensors: torch.Tensor) -> str:
        sha = hashlib.sha256()
        absorb(sha, tensors)
        return sha.hexdigest()

    x = torch.arange(6.0)
    others = [x + 1, x.view(2, 3), x.double(), x.int()]
    assert digest(x) == digest(x.clone()) and digest(x.view(2, 3).T) != digest(x.view(2, 3))
    assert len({digest(x), *(digest(other) for other in others)}) == 5
