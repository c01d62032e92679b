"""A cohort in this process: the sums of its chunks, what was sent, and what is refused."""

from __future__ import annotations

import pytest
import torch
from builders import clients, plan, problem

import fedhb
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.in_process import InProcess
from fedhb.errors import DivergedError
from fedhb.seeding import Randomness

RNG = Randomness(1, 1)


def test_pooled_training_is_never_cut_into_chunks():
    who = clients()
    pooled = InProcess(problem(), fedhb.algorithms.build("centralised", {}), who, ClientStore(), 2)
    assert pooled.chunk == len(who)


def test_sums_count_the_examples_of_the_cohort_alone():
    who, prob, algorithm = clients(), problem(), fedhb.FedAvg()
    executor = InProcess(prob, algorithm, who, ClientStore(), 2)
    server = algorithm.start(prob, RNG)
    sums, traffic = executor.run(server, [0, 2, 5], plan(algorithm), RNG)
    assert float(sums["examples"]) == 7 + 12 + 9
    once = sum(value.numel() * value.element_size() for value in server.values())
    assert traffic.down == 3 * once


def test_an_answer_with_nan_is_refused_with_its_client_and_round():
    class Breaks(fedhb.FedAvg):
        def local_update(self, *arguments):
            found, memory = super().local_update(*arguments)
            found["theta"][1, 0] = torch.nan
            return found, memory

    who, prob, algorithm = clients(), problem(), Breaks()
    executor = InProcess(prob, algorithm, who, ClientStore(), len(who))
    server = algorithm.start(prob, RNG)
    with pytest.raises(DivergedError, match=r"(?s)(?=.*round 1)(?=.*client \d)(?=.*'theta')"):
        executor.run(server, range(len(who)), plan(algorithm), RNG)
