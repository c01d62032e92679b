"""Your own images and your own network: numpy arrays in, a global posterior out, personalised for a client that never trained.

The images are scikit-learn's handwritten digits (8 x 8 pixels), dealt by hand to clients that see four of the ten digits each.
Run it with `python examples/images_from_arrays.py`; it takes a few seconds. The learning rate was chosen on a
validation split of the clients' training images (experiments/examples). The held-out client has 39 images to predict: the
numbers show how it works, not how it compares.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedhb

NUM_CLIENTS = 12  # that train; one more is held out
DIGITS_PER_CLIENT = 4


class SmallCNN(nn.Module):
    """Any torch module will do. Its last linear layer is taken as the head; `fit(..., head="name")` names another one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(16 * 2 * 2, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, 1, 8, 8] to logits [B, 10]."""
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.head(x.flatten(1))


def deal(labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
    """Row numbers of each client: client k holds the digits k, k+1, ..., k+3 (mod 10), and no two clients share an image."""
    rng = np.random.default_rng(seed)
    hands: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for digit in range(10):
        rows = rng.permutation(np.flatnonzero(labels == digit))
        holders = [k for k in range(num_clients) if (digit - k) % 10 < DIGITS_PER_CLIENT]
        for k, part in zip(holders, np.array_split(rows, len(holders)), strict=True):
            hands[k].append(part)
    return [rng.permutation(np.concatenate(hand)) for hand in hands]


def accuracy(probabilities: np.ndarray, labels: np.ndarray) -> float:
    return float((probabilities.argmax(1) == labels).mean())


def make_clients() -> tuple[fedhb.Clients, tuple[np.ndarray, ...]]:
    """The federation, and the client that stays out of it: its images and labels to learn from, then those to predict."""
    digits = load_digits()
    x = digits.images[:, None].astype(
        np.float32
    )  # [n, 1, 8, 8]: channels first, as torch wants them
    y = digits.target

    # One (x, y) pair per client, for training and for testing.
    train, test = [], []
    for rows in deal(y, NUM_CLIENTS + 1, seed=0):
        cut = len(rows) * 2 // 3
        train.append((x[rows[:cut]], y[rows[:cut]]))
        test.append((x[rows[cut:]], y[rows[cut:]]))
    return fedhb.Clients.from_arrays(train[:-1], test[:-1], num_classes=10, standardise=True), (
        *train[-1],
        *test[-1],
    )


def train(clients: fedhb.Clients, lr: float = 0.2, evaluate_on: str = "test") -> fedhb.Run:
    """EmpiricalBayes learns how far clients may be from the common network, tensor by tensor."""
    torch.manual_seed(0)  # the module's initial weights are the starting point
    options = {"rounds": 40, "fraction": 0.5, "local_epochs": 2, "batch_size": 32, "lr": lr}
    algorithm = fedhb.EmpiricalBayes()
    return fedhb.fit(SmallCNN(), clients, algorithm, **options, evaluate_on=evaluate_on, seed=0)


def main() -> None:
    clients, (x_mine, y_mine, x_new, y_new) = make_clients()
    print(
        f"{len(clients)} clients with {clients.num_examples} training images, {DIGITS_PER_CLIENT} of 10 digits each"
    )
    run = train(clients)

    # The result is the mean over the clients, each on its own test images.
    print(f"training clients: global accuracy {run.result['global']['accuracy']:.3f}", end=", ")
    print(f"personalised {run.result['personalised']['accuracy']:.3f}")

    # The held-out client: first what the global posterior makes of its images, then after a few epochs on its own.
    before = run.predict(x_new)  # probabilities [n, 10]
    mine = run.personalise(x_mine, y_mine)
    after = mine.predict(x_new)
    print(f"held-out client ({len(y_mine)} images of its own, {len(y_new)} to predict):")
    print(f"  accuracy before personalisation {accuracy(before, y_new):.3f}")
    print(f"  accuracy after personalisation  {accuracy(after, y_new):.3f}")


if __name__ == "__main__":
    main()
