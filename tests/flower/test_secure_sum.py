"""Only sums: fixed point with its bound, a round through a protocol, drop-out; and why no protocol is included."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import standin
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr")

from loopback import FIRST
from test_same_numbers import close, federation, small

from fedhb.errors import DivergedError, InputError
from fedhb.experiment import train
from fedhb.fixedpoint import RANGE, Encoding
from fedhb.flower import client
from fedhb.flower.server import serve
from fedhb.flower.summed import Summed
from fedhb.privacy import Private

NUMBERS = st.floats(-(2.0**RANGE), 2.0**RANGE, allow_nan=False)


@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=20), st.sampled_from([55, 60, 63, 64]))
def test_a_decoded_sum_is_within_the_proven_bound(rows, bits):
    code = Encoding({"a": (2,), "b": ()}, clients=len(rows), bits=bits)
    total = np.zeros(3, np.uint64)
    for row in rows:
        total += code.encode({"a": torch.tensor(row[:2], dtype=torch.float64), "b": torch.tensor(row[2], dtype=torch.float64)})
    found = code.decode(total & np.uint64(2**bits - 1))
    for k, value in enumerate([*found["a"].tolist(), found["b"].item()]):
        true = sum(Fraction(row[k]) for row in rows)  # without any rounding
        assert abs(Fraction(value) - true) <= Fraction(code.error(float(abs(true))))


def test_the_bound_is_tight_and_the_range_is_used():
    """All clients at the end of the range, and all roundings the same way."""
    code = Encoding({"a": ()}, clients=4, bits=64)
    largest = torch.tensor(2.0**RANGE, dtype=torch.float64)
    total = sum((code.encode({"a": -largest}) for _ in range(4)), np.zeros(1, np.uint64))
    assert code.decode(total)["a"].item() == -4 * 2.0**RANGE
    half = torch.tensor(1.5 * 2.0**-code.fraction, dtype=torch.float64)
    found = code.decode(sum((code.encode({"a": half}) for _ in range(4)), np.zeros(1, np.uint64)))["a"].item()
    assert abs(found - 4 * half.item()) == pytest.approx(4 * 2.0 ** -(code.fraction + 1))
    assert abs(found - 4 * half.item()) <= code.error(4 * half.item())


@pytest.mark.parametrize("value", [2.0**RANGE * 1.01, float("nan"), float("inf")])
def test_what_is_out_of_range_is_an_error_and_never_clipped(value):
    with pytest.raises(ValueError, match="beyond the range"):
        Encoding({"a": ()}, 4).encode({"a": torch.tensor(value)})


def test_a_modulus_that_is_too_small_is_refused():
    for bits in (32, 48):  # the second has room for 15 bits after the point, in which squares of small steps are nothing
        with pytest.raises(InputError, match="no room"):
            Encoding({"a": ()}, clients=100, bits=bits)


@pytest.mark.parametrize("algorithm", ["niw", "mixture", "fedavg"])
def test_a_federation_of_sums_ends_where_the_simulator_does(tmp_path, algorithm):
    settings = small(algorithm)
    simulated = train(settings, tmp_path / "simulated", progress=False)
    run = serve(*federation(small(algorithm, secure_sum="standin:wide"), tmp_path / "flower"))
    close(run.state.server, simulated.state.server, algorithm)
    assert run.result["executor"]["secure_sum"] == "standin:wide"
    floats = sum(v.numel() for k, v in run.state.server.items() if k in ("m0", "r", "theta"))
    assert run.result["communication"]["per_client_round"]["up_bytes"] >= 8 * floats


def test_the_server_sees_no_clients_own_numbers(tmp_path):
    standin.wide.seen.clear()
    serve(*federation(small("niw", rounds=1, fraction=1.0, secure_sum="standin:wide"), tmp_path / "out"))
    assert len(standin.wide.seen) == 4
    for masked in standin.wide.seen:  # uniform on 64 bits: half of the top bits are set
        share = (masked >> np.uint64(63)).mean()
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(len(masked))


def test_a_coarser_modulus_costs_what_its_bound_says(tmp_path):
    fine, coarse = (
        serve(*federation(small("niw", rounds=1, secure_sum=f"standin:{name}"), tmp_path / name)) for name in ("wide", "narrow")
    )
    gap = (fine.state.server["m0"] - coarse.state.server["m0"]).abs().max().item()
    assert 0 < gap <= 2 * Encoding({"a": ()}, clients=2, bits=52).error(1.0)


def test_clients_that_drop_out_are_left_out_of_the_sum(tmp_path):
    grid, chosen = federation(small("niw", rounds=1, fraction=1.0, secure_sum="standin:wide"), tmp_path / "out", deadline=0.3)
    grid.fault = lambda client, message, reply: [] if client == 2 and "received" in message.content else [reply]
    run = serve(grid, chosen)
    assert sorted(run.records[0]["answered"]) == [0, 1, 3]
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert events[0]["client"] == 2 and events[0]["detail"] == "it dropped out of the sum"
    plain, chosen = federation(small("niw", rounds=1, fraction=1.0), tmp_path / "plain", deadline=0.3)
    plain.fault = grid.fault
    close(run.state.server, serve(plain, chosen).state.server, "without client 2")


def test_too_few_for_the_protocol_fail_the_round(tmp_path):
    grid, chosen = federation(small("niw", rounds=1, fraction=1.0, secure_sum="standin:wide"), tmp_path / "out", deadline=0.3)
    tries = []

    def fault(client, message, reply):
        if "received" in message.content and message.content["order"]["round"] == 1:
            tries.append(client)
            return [reply] if client == 0 or len(tries) > 4 else []
        return [reply]

    grid.fault = fault
    assert serve(grid, chosen).records[0]["attempts"] == 2


def dropping(*attempts):
    """A fault: in the first attempts of round 1 these clients drop out."""

    def fault(client, message, reply):
        order = message.content.get("order", {})
        number = order.get("attempt", 0) if order.get("round") == 1 else 0
        return [] if 0 < number <= len(attempts) and client in attempts[number - 1] else [reply]

    return fault


def sums_of(settings, out, fault=None, **rules):
    """A federation with this fault: its server's run, or why it ended; the clients of every sum unmasked in round 1; itself."""
    standin.wide.unmasked.clear()
    grid, chosen = federation(settings, out, deadline=0.3, **rules)
    grid.fault = fault
    try:
        run = serve(grid, chosen)
    except DivergedError as error:
        run = error
    return run, [[node - FIRST for node in nodes] for number, nodes in standin.wide.unmasked if number == 1], (grid, chosen)


def test_no_sum_is_unmasked_that_is_too_small_for_the_round(tmp_path):
    """Two sums that differ by a client tell what it contributed; the second attempt must be the only one."""
    settings = small("niw", rounds=1, fraction=1.0, secure_sum="standin:wide")
    run, sums, _ = sums_of(settings, tmp_path / "out", dropping((1, 2), (3,)), **{"min-answers": 0.75})
    assert run.records[0]["attempts"] == 2 and sums == [[0, 1, 2]]


def test_a_round_is_summed_over_the_same_clients_again_or_not_at_all(tmp_path, monkeypatch):
    """Also after a sum that was refused, and in a resumed run."""
    settings = small("fedavg", rounds=1, fraction=1.0, secure_sum="standin:wide")
    with monkeypatch.context() as patch:
        lying(patch, lambda found: {"examples": -found["examples"]})
        run, sums, (grid, chosen) = sums_of(settings, tmp_path / "out", dropping((3,), (1,), ()), retries=2)
    assert isinstance(run, DivergedError) and sums == [[0, 1, 2]] * 2  # the second attempt lacks client 1, and is not unmasked
    told = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    (withheld,) = [e["detail"] for e in told if e["event"] == "sum withheld"]
    assert "over clients [0, 1, 2] before" in withheld
    standin.wide.unmasked.clear()
    grid.fault = None
    assert serve(grid, chosen | {"resume": True}).records[0]["answered"] == [0, 1, 2]
    assert standin.wide.unmasked == [(1, [FIRST, FIRST + 1, FIRST + 2])]


def test_a_server_killed_after_a_sum_asks_for_the_same_one(tmp_path, monkeypatch):
    settings = small("niw", rounds=2, fraction=1.0, secure_sum="standin:wide")

    class Killed(BaseException):
        pass

    def killed(self, *parts):
        raise Killed

    grid, chosen = federation(settings, tmp_path / "out", deadline=0.3)
    grid.fault = dropping((3,))
    with monkeypatch.context() as patch:
        patch.setattr(Summed, "check_examples", killed)
        with pytest.raises(Killed):
            serve(grid, chosen)
    grid.fault = None
    run = serve(grid, chosen | {"resume": True})
    assert [r["answered"] for r in run.records] == [[0, 1, 2], [0, 1, 2, 3]]


def lying(monkeypatch, change):
    """Client 2 contributes something else than it found."""
    real = client.Work.found
    monkeypatch.setattr(client.Work, "found", lambda self: real(self) | (change(real(self)) if self.node.id == 2 else {}))


@pytest.mark.parametrize("examples", [0.0, -1.0, 3.0])
def test_a_sum_of_other_weights_than_its_clients_have_is_refused(tmp_path, monkeypatch, examples):
    lying(monkeypatch, lambda found: {"examples": examples * found["examples"]})
    settings = small("fedavg", rounds=1, fraction=1.0, secure_sum="standin:wide")
    with pytest.raises(DivergedError):
        serve(*federation(settings, tmp_path / "out", retries=0))
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert events[0]["event"] == "sum refused" and "examples, and those that stayed have" in events[0]["detail"]


def test_private_sums(tmp_path, monkeypatch):
    """With differential privacy clients clip what they contribute before it is masked, and the server adds the noise."""
    monkeypatch.setattr(Private, "mark", lambda self, summary: "")  # else noise follows from the sums' rounding
    pytest.importorskip("dp_accounting")
    for name in ("summed", "plain"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "noise.key").write_bytes(b"s" * 32)
    options = {"dp_noise": 0.2, "dp_clip": 0.5, "rounds": 2}
    summed = serve(*federation(small("niw", secure_sum="standin:wide", **options), tmp_path / "summed"))
    close(summed.state.server, serve(*federation(small("niw", **options), tmp_path / "plain")).state.server, "private sums")


@pytest.mark.parametrize(("name", "message"), [("secaggplus", "docs/security.md"), ("standin:nothing", "cannot be imported"),
                                               ("standin:np", "is no protocol")])  # fmt: skip
def test_a_name_that_is_no_protocol_is_refused(tmp_path, name, message):
    with pytest.raises(InputError, match=message):
        serve(*federation(small("niw", secure_sum=name), tmp_path / "out"))


def test_a_simulation_has_no_secure_sum(tmp_path):
    with pytest.raises(InputError, match="no server to hide from"):
        train(small("niw", secure_sum="standin:wide"), tmp_path / "out")


# Why Flower's own SecAgg+ is not that protocol. Should one of these fail, its masks have changed: look at it again.


def test_flowers_masks_have_32_bits_of_secret():
    """docs/security.md: the 256-bit secret of two clients is folded to 32 bits, the seed of a Mersenne Twister."""
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    secret = bytes(range(32))
    words = np.frombuffer(secret, dtype="<u4")
    other = bytes(28) + np.bitwise_xor.reduce(words).astype("<u4").tobytes()
    assert secret != other
    ours, theirs = (pseudo_rand_gen(seed, 2**32, [(50,)])[0] for seed in (secret, other))
    assert (ours == theirs).all()
    folded = int.from_bytes(other[28:], "little")
    guessed = np.random.RandomState(folded).randint(0, 2**32 - 1, (50,), dtype=np.int64)
    assert (guessed == ours).all(), "whoever tries all 2^32 seeds has the mask"


def test_flowers_quantisation_changes_large_numbers_silently():
    from flwr.common.secure_aggregation.quantization import dequantize, quantize

    (found,) = dequantize(quantize([np.array([600.0])], 8.0, 2**22), 8.0, 2**22)
    assert found[0] == pytest.approx(8.0, abs=1e-3)


def test_flowers_mod_takes_answers_of_the_old_interface_alone():
    import inspect

    from flwr.client.mod.secure_aggregation.secaggplus_mod import secaggplus_mod

    assert "recorddict_to_fitres" in inspect.getsource(secaggplus_mod)
