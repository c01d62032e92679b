"""Loss and score that clients report of their training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import CLASSES, PLAN, clients, initial, mlp

from fedhb.likelihood import Categorical
from fedhb.network.vectors import Network, Weights
from fedhb.seeding import Randomness
from fedhb.training import training_metrics
from fedhb.training.sgd import train

RNG = Randomness(5, 3)


def test_reports_are_means_over_the_last_epoch():
    """With a step of size zero they are the loss and the accuracy of the starting point."""
    network, who = Network(mlp()), clients()
    weights, reports = train(
        network,
        Categorical(CLASSES),
        initial(network, len(who)),
        who,
        replace(PLAN, lr=1e-300),
        RNG,
    )
    for k in range(len(who)):
        x, y = who.train.examples(k)
        outputs = network.outputs(
            Weights(weights.theta[k : k + 1], weights.head[k : k + 1], weights.buffers[k : k + 1]),
            x[None],
        )
        assert reports["loss"][k].item() == pytest.approx(
            Categorical(CLASSES).loss(outputs, y[None]).mean().item(), rel=1e-9
        )
        assert reports["score"][k].item() == pytest.approx(
            (outputs[0].argmax(1) == y).double().mean().item()
        )


@pytest.mark.parametrize("kept", [0, 40, 2**20])
def test_means_of_batches_that_differ_in_clients_and_padding(
    monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    monkeypatch.setattr(training_metrics, "OUTPUTS_KEPT", kept)
    likelihood, generator = Categorical(3), torch.Generator().manual_seed(0)
    seen: dict[int, list[tuple[float, float]]] = {0: [], 1: [], 2: []}
    log = training_metrics.TrainingMetrics(3, torch.device("cpu"))
    whole, padded = None, torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    steps: list[tuple[slice | torch.Tensor, list[int], torch.Tensor | None]] = [
        (slice(0, 3), [0, 1, 2], whole),
        (slice(0, 3), [0, 1, 2], whole),
        (slice(0, 2), [0, 1], padded),
        (torch.tensor([0, 2]), [0, 2], padded),
        (torch.tensor([0, 2]), [0, 2], whole),
        (slice(1, 2), [1], whole),
    ]
    for places, who, valid in steps:
        outputs = torch.randn(len(who), 2, 3, generator=generator)
        y = torch.randint(3, (len(who), 2), generator=generator)
        log.add(likelihood, places, outputs, y, valid)
        for row, client in enumerate(who):
            for column in range(2 if valid is None else int(valid[row].sum())):
                loss = -outputs[row, column].log_softmax(0)[y[row, column]]
                seen[client].append(
                    (float(loss), float(outputs[row, column].argmax() == y[row, column]))
                )
    found = log.report()
    for client, pairs in seen.items():
        losses, scores = zip(*pairs, strict=True)
        assert found["loss"][client].item() == pytest.approx(sum(losses) / len(losses), rel=1e-6)
        assert found["score"][client].item() == pytest.approx(sum(scores) / len(scores))
