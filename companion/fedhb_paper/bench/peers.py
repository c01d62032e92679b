"""FedAvg without fedhb: in plain PyTorch, and by hand at the limit of this machine.

Both do the work of fedhb's FedAvg on the same cohorts and batches, and find the same weights up to
rounding (a test checks it).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedhb.clients.clients import Clients
from fedhb_paper.bench.bench_task import Task
from fedhb_paper.bench.processes import Team, shared_floats


class PlainTorch:
    """Federated averaging as in a tutorial: a model copy, an optimiser and a loop per client.

    The examples are float32 tensors in memory, so that no data loader is in the way.
    """

    def __init__(self, task: Task, clients: Clients, threads: int):
        self.task, self.threads, self.done = task, threads, 0
        self.model = task.ordinary()
        self.data = views(task, clients)

    def __call__(self) -> None:
        """Run one round."""
        torch.set_num_threads(self.threads)
        self.done += 1
        cohort = self.task.cohort(self.done)
        total: dict[str, Tensor] = {}
        for k in cohort:
            order = self.task.order(self.done, k)
            trained = train(copy.deepcopy(self.model), *self.data[k], order, self.task)
            weights = trained.state_dict()
            total = {
                name: total[name] + value if total else value for name, value in weights.items()
            }
        # the plain mean: all clients have the same number of examples
        self.model.load_state_dict({name: value / len(cohort) for name, value in total.items()})

    def weights(self) -> dict[str, Tensor]:
        """Return the global network by the names of its tensors."""
        return self.model.state_dict()

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def train(model: nn.Module, x: Tensor, y: Tensor, order: Tensor, task: Task) -> nn.Module:
    """Train the model for one epoch of SGD, and return it."""
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    for batch in order.split(task.batch_size):
        optimiser.zero_grad()
        functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimiser.step()
    return model


def views(task: Task, clients: Clients) -> list[tuple[Tensor, Tensor]]:
    """Return the examples of each client, which lie one after another in the pool."""
    x, y = clients.train.x, clients.train.y
    return [
        (x[s : s + task.examples], y[s : s + task.examples])
        for s in range(0, len(x), task.examples)
    ]


class Handwritten:
    """The MLP's gradients by hand, for all clients of a share at once, with the step in place.

    Nothing is computed or stored twice. For C clients, a batch x [C, B, f] and weights
    W1 [C, h, f], b1 [C, h], W2 [C, k, h], b2 [C, k]:

        u = relu(x W1' + b1);  p = softmax(u W2' + b2) - onehot(y)
        q = (p W2) * (u > 0)                                             before W2 moves
        W2 -= lr/B p' u;  b2 -= lr/B sum_B p;  W1 -= lr/B q' x;  b1 -= lr/B sum_B q

    With `processes` > 1 the cohort is dealt to so many forked helpers with one thread each, else
    it is one share on `threads`.
    """

    def __init__(self, task: Task, clients: Clients, processes: int = 1, threads: int = 1):
        self.task, self.threads, self.done = task, threads, 0
        self.x, self.y = clients.train.x.flatten(1), clients.train.y
        state = task.model().state_dict()
        self.shapes = {
            name: state[name].shape
            for name in ("hidden.weight", "hidden.bias", "head.weight", "head.bias")
        }
        self.vector = shared_floats(sum(shape.numel() for shape in self.shapes.values()))
        self.vector.copy_(torch.cat([state[name].flatten() for name in self.shapes]))
        self.sums = shared_floats(processes, len(self.vector))
        self.team = Team(processes, self._share) if processes > 1 else None

    def __call__(self) -> None:
        """Run one round."""
        torch.set_num_threads(self.threads)
        self.done += 1
        if self.team is None:
            self._share(0, self.done)
        else:
            self.team(self.done)
        torch.sum(self.sums, 0, out=self.vector).div_(self.task.per_round)

    def _share(self, helper: int, round_number: int) -> None:
        """Train this helper's part of the cohort; its row of `sums` gets the sum of weights."""
        cohort = self.task.cohort(round_number)[helper :: len(self.sums)]
        trained = self._train(cohort, round_number) if cohort else None
        self.sums[helper] = (
            0.0 if trained is None else torch.cat([w.sum(0).flatten() for w in trained])
        )

    def _train(self, cohort: Sequence[int], round_number: int) -> list[Tensor]:
        task, count = self.task, len(cohort)
        W1, b1, W2, b2 = (
            part.expand(count, *part.shape).clone() for part in self.weights().values()
        )
        order = torch.stack(
            [k * task.examples + task.order(round_number, k) for k in cohort]
        )  # [C, n]
        for rows in order.split(task.batch_size, dim=1):
            size = rows.shape[1]
            x = self.x.index_select(0, rows.reshape(-1)).view(count, size, -1)
            u = torch.baddbmm(b1.unsqueeze(1), x, W1.transpose(1, 2)).relu_()
            p = torch.baddbmm(b2.unsqueeze(1), u, W2.transpose(1, 2)).softmax(-1)
            p.scatter_add_(2, self.y[rows].unsqueeze(2), p.new_full((count, size, 1), -1.0))
            q = torch.bmm(p, W2).mul_(u > 0)
            rate = task.lr / size
            W2.baddbmm_(p.transpose(1, 2), u, alpha=-rate)
            b2.sub_(p.sum(1), alpha=rate)
            W1.baddbmm_(q.transpose(1, 2), x, alpha=-rate)
            b1.sub_(q.sum(1), alpha=rate)
        return [W1, b1, W2, b2]

    def weights(self) -> dict[str, Tensor]:
        """Return the global network by the names of its tensors."""
        parts = self.vector.split([shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def close(self) -> None:
        """Stop the helpers."""
        if self.team is not None:
            self.team.close()


class PlainProcesses:
    """Plain PyTorch dealt to one forked process per core, in channels-last layout.

    It is the limit for a network of convolutions, whose kernels take nearly all of the time.
    """

    def __init__(self, task: Task, clients: Clients, processes: int):
        self.task, self.done = task, 0
        self.model = task.ordinary().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.data = [
            (x.contiguous(memory_format=torch.channels_last), y) for x, y in views(task, clients)
        ]
        self.numbers = [
            value for value in self.model.state_dict().values() if value.is_floating_point()
        ]
        size = sum(value.numel() for value in self.numbers)
        self.vector, self.sums = shared_floats(size), shared_floats(processes, size)
        self.vector.copy_(_flat(self.numbers))
        self.team = Team(processes, self._share)

    def __call__(self) -> None:
        """Run one round."""
        torch.set_num_threads(1)
        self.done += 1
        self.team(self.done)
        torch.sum(self.sums, 0, out=self.vector).div_(self.task.per_round)

    def _share(self, helper: int, round_number: int) -> None:
        _fill(self.numbers, self.vector)
        self.sums[helper] = 0.0
        for k in self.task.cohort(round_number)[helper :: len(self.sums)]:
            order = self.task.order(round_number, k)
            trained = train(copy.deepcopy(self.model), *self.data[k], order, self.task)
            self.sums[helper] += _flat(
                [value for value in trained.state_dict().values() if value.is_floating_point()]
            )

    def weights(self) -> dict[str, Tensor]:
        """Return the global network by the names of its tensors."""
        _fill(self.numbers, self.vector)
        return self.model.state_dict()

    def close(self) -> None:
        """Stop the helpers."""
        self.team.close()


def _flat(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in values])


def _fill(values: Sequence[Tensor], vector: Tensor) -> None:
    for value, part in zip(values, vector.split([v.numel() for v in values]), strict=True):
        value.copy_(part.view(value.shape))


def agreement(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest difference between two networks, over the tensors that both have."""
    both = [name for name in ours if name in theirs and ours[name].is_floating_point()]
    return max(float((ours[name] - theirs[name]).abs().max()) for name in both)
