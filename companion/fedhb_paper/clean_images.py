"""Global prediction on the training images of another data set, which no client has.

settings.toml names the data set: `clean = "cifar-100"`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedhb.data.dataset import Dataset
from fedhb.runs.run import Run, one_thread

BATCH = 128
"""How many images are predicted together, drawn at random.

Batch norm by the batch's statistics depends on it (docs/deviations.md).
"""


def metrics(run: Run, dataset: Dataset) -> dict[str, Any]:
    """Return the metrics of the global prediction, over all images."""
    x, y = torch.from_numpy(dataset.train.x), torch.from_numpy(dataset.train.y)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    device = run.problem.network.device
    with one_thread():
        predictions = [
            run.algorithm.predict(run.problem, run.state.server, x[rows].to(device), run.rng).cpu()
            for rows in order.split(BATCH)
        ]
    return run.problem.likelihood.metrics(torch.cat(predictions), y[order])
