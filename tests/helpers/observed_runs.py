"""Short runs on digits, with what they record for their report."""

from __future__ import annotations

import json

import builders

import fedhb

QUICK = {
    "rounds": 2,
    "fraction": 0.5,
    "batch_size": 20,
    "personal_epochs": 1,
    "progress": False,
    "workers": 1,
}


def fit(clients, algorithm, out, **more):
    with builders.seeded():
        model = fedhb.nets.mlp((1, 8, 8), 10, hidden=8)
    return fedhb.fit(model, clients, algorithm, out=out, **QUICK, **more)


def evaluation(path):
    return json.loads((path / "evaluation.json").read_text())
