"""Where one process does the work."""

from __future__ import annotations

import pytest
import torch
from builders import CASES, PLAN, clients, problem

import fedhb
from engines import fit
from fedhb.engine.automatic import Automatic
from fedhb.engine.client_memory import ClientStore
from fedhb.engine.loop import Training


def test_small_work_stays_in_one_process():
    run = fit(fedhb.FedAvg(), None, rounds=1)
    assert run.result["executor"] == {"workers": 1, "clients_at_once": 3}


def test_a_device_works_in_one_process(monkeypatch):
    prob = problem()
    monkeypatch.setattr(type(prob.network), "device", torch.device("meta"))
    with pytest.raises(fedhb.InputError, match=r"workers=2.*device=meta"):
        Automatic(
            prob,
            CASES["fedavg-full"],
            clients(),
            ClientStore(),
            training=Training(1, 1.0, PLAN, "constant", 0),
            workers=2,
        )
