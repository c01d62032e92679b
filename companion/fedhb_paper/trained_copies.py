"""The global prediction of images that clients train on.

CIFAR-100-C has every image once in each corruption. The paper splits each corruption for itself,
and so tests on images nearly all of which were trained on under other corruptions. A model whose
split is by image shows how much that raises the score:

    known    images that clients train on, as they are: more than such a test could score
    novel    these images under a corruption that nobody trains on, at novel clients: less than it
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedhb.engine.loop import State
from fedhb.evaluation.evaluate import mean
from fedhb.runs.run import Run, one_thread
from fedhb.runs.run_grid import dataset_of
from fedhb.runs.settings import Settings
from fedhb_paper.cells import clients_of

KINDS = ("known", "novel")
COUNT = 100
"""Training images of a client that are predicted, about as many as it is tested on.

Batch norm may depend on their number.
"""


def metrics(run: Run, settings: Settings) -> dict[str, Any]:
    """Return the means over clients of the metrics of both kinds.

    It is empty where images have no copies, or are split in another way.
    """
    if (
        not dataset_of(settings.data.dataset, settings.data.file).groups
        or settings.data.group_split != "image"
    ):
        return {}
    means = {}
    with one_thread():
        for kind, clients in zip(KINDS, clients_of(run, settings), strict=True):
            if clients is not None:
                fewer = clients.with_at_most(COUNT, settings.seed)
                evaluation = replace(run.evaluation("train"), state=State(run.state.server))
                means[kind] = mean(evaluation.global_metrics(fewer))
    return means
