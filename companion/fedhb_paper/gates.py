"""A mixture's global prediction under other gates, which shows the worth of the learned gate.

learned   sum_j g_j(x) p(y | x, r_j), the prediction of the model
uniform   sum_j 1/K p(y | x, r_j)
oracle    p(y | x, r_j) with the j under which a sample of the client's own training data is
          likeliest
"""

from __future__ import annotations

from typing import Any

import torch

from fedhb.algorithms import Mixture
from fedhb.algorithms.toolbox import mixture_prediction, uniform
from fedhb.evaluation.evaluate import mean
from fedhb.network.vectors import Weights
from fedhb.runs.run import Run, one_thread
from fedhb.runs.settings import Settings
from fedhb_paper.cells import clients_of

GATES = ("learned", "uniform", "oracle")


def metrics(run: Run, settings: Settings) -> dict[str, Any]:
    """Return the means over clients of each gate's metrics.

    It is empty where the algorithm is no mixture of several prototypes.
    """
    algorithm, server, problem = run.algorithm, run.state.server, run.problem
    if not isinstance(algorithm, Mixture) or len(server["r"]) < 2:
        return {}
    clients, _ = clients_of(run, settings)
    share = getattr(clients, settings.evaluation.split)
    prototypes = algorithm.prototypes(problem, server)
    count = len(prototypes.theta)
    each_client: dict[str, list[dict[str, float]]] = {"uniform": [], "oracle": []}
    with one_thread():
        best = algorithm.likeliest(problem, server, clients)
        for k, j in enumerate(best):
            x, y = share.examples(k)
            prototype = Weights(
                prototypes.theta[j : j + 1],
                prototypes.head[j : j + 1],
                prototypes.buffers[j : j + 1],
            )
            equal = mixture_prediction(
                problem, prototypes, uniform(count, x, problem.network.dtype), x
            )
            nearest = mixture_prediction(
                problem,
                prototype,
                torch.ones(1, len(x), dtype=problem.network.dtype, device=x.device),
                x,
            )
            each_client["uniform"].append(problem.likelihood.metrics(equal, y))
            each_client["oracle"].append(problem.likelihood.metrics(nearest, y))
    return {"learned": run.result["global"]} | {
        gate: mean(each) for gate, each in each_client.items()
    }
