"""Stands in a test's app for fedhb_app/client_app.py: the real ClientApp, spoiled where the node's
config says so.

faults="SEED/ROUND/ATTEMPT/KIND,...": the fault happens in the run with this seed alone.
"""

import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

from fedhb.flower.client_app import app as real
from fedhb.flower.federated_task import settings_of

app = ClientApp()


@app.query()
def query(message, context):
    return real(message, context)


@app.evaluate()
def evaluate(message, context):
    return real(message, context)


@app.train()
def train(message, context):
    order, seed = message.content["order"], settings_of(context.run_config).seed
    now = f"{seed}/{order['round']}/{order['attempt']}/"
    kinds = [
        f.removeprefix(now)
        for f in str(context.node_config.get("faults", "")).split(",")
        if f.startswith(now)
    ]
    if "die" in kinds:
        Path(str(context.node_config["flag"])).touch()
        time.sleep(300)
    reply = real(message, context)
    if "late" in kinds:
        time.sleep(float(context.node_config["late"]))
    found = {key: array.numpy().copy() for key, array in reply.content["found"].items()}
    for kind in kinds:
        if kind == "nan":
            found["m"][0, 5] = np.nan
        elif kind == "inf":
            found["m"][0, 5] = np.inf
        elif kind == "shape":
            found["m"] = found["m"][:, :-1]
        elif kind == "norm":
            found["m"] *= 1e5
    reply.content["found"] = ArrayRecord({key: Array(value) for key, value in found.items()})
    return reply
