"""Your own images and your own network: train on numpy arrays, and personalise for a new client.

The images are scikit-learn's handwritten digits (8 x 8 pixels). Each client holds four of the ten
digits. Run the example with `python examples/images_from_arrays.py`; it takes a few seconds. The
learning rate was chosen on a validation split of the clients' training images
(experiments/examples). The held-out client has only 39 images to predict, too few to compare
methods.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedhb

NUM_CLIENTS = 12  # clients that train; one more is held out
DIGITS_PER_CLIENT = 4


class SmallCNN(nn.Module):
    """A small network; any torch module can be used.

    Its last linear layer is taken as the head, unless `fit(..., head="name")` names another one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(16 * 2 * 2, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 1, 8, 8] to logits [B, 10]."""
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = torch.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.head(x.flatten(1))


def deal(labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
    """Deal every image to one client, and return the row numbers of each client.

    Client k holds images of the digits k, k+1, k+2 and k+3 (mod 10).
    """
    rng = np.random.default_rng(seed)
    rows_of_client: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for digit in range(10):
        rows = rng.permutation(np.flatnonzero(labels == digit))
        holders = [k for k in range(num_clients) if (digit - k) % 10 < DIGITS_PER_CLIENT]
        for k, part in zip(holders, np.array_split(rows, len(holders)), strict=True):
            rows_of_client[k].append(part)
    return [rng.permutation(np.concatenate(parts)) for parts in rows_of_client]


def accuracy(probabilities: np.ndarray, labels: np.ndarray) -> float:
    return float((probabilities.argmax(1) == labels).mean())


def make_clients() -> tuple[fedhb.Clients, tuple[np.ndarray, ...]]:
    """Make the clients, and the arrays of one client that does not take part.

    Returns:
        (clients, (x_train, y_train, x_test, y_test) of the other client).
    """
    digits = load_digits()
    x = digits.images[:, None].astype(np.float32)  # [n, 1, 8, 8]: torch needs the channels first
    y = digits.target

    # One (x, y) pair per client, for training and for testing.
    train, test = [], []
    for rows in deal(y, NUM_CLIENTS + 1, seed=0):
        cut = len(rows) * 2 // 3
        train.append((x[rows[:cut]], y[rows[:cut]]))
        test.append((x[rows[cut:]], y[rows[cut:]]))
    clients = fedhb.Clients.from_arrays(train[:-1], test[:-1], num_classes=10, standardise=True)
    return clients, (*train[-1], *test[-1])


def train(clients: fedhb.Clients, lr: float = 0.2, evaluate_on: str = "test") -> fedhb.Run:
    """Train with EmpiricalBayes, which learns how far the clients' networks differ.

    It learns one variance for each tensor of the network.
    """
    torch.manual_seed(0)  # the module's initial weights are the starting point
    options = {"rounds": 40, "fraction": 0.5, "local_epochs": 2, "batch_size": 32, "lr": lr}
    return fedhb.fit(
        SmallCNN(), clients, fedhb.EmpiricalBayes(), **options, evaluate_on=evaluate_on, seed=0
    )


def main() -> None:
    clients, (x_train, y_train, x_test, y_test) = make_clients()
    print(
        f"{len(clients)} clients with {clients.num_examples} training images, "
        f"{DIGITS_PER_CLIENT} of 10 digits each"
    )
    run = train(clients)

    # The result is the mean over the clients, each on its own test images.
    print(f"training clients: global accuracy {run.result['global']['accuracy']:.3f}", end=", ")
    print(f"personalised {run.result['personalised']['accuracy']:.3f}")

    # The held-out client: predict with the global posterior, then after a few epochs on its images.
    before = run.predict(x_test)  # probabilities [n, 10]
    personal = run.personalise(x_train, y_train)
    after = personal.predict(x_test)
    print(f"held-out client ({len(y_train)} images of its own, {len(y_test)} to predict):")
    print(f"  accuracy before personalisation {accuracy(before, y_test):.3f}")
    print(f"  accuracy after personalisation  {accuracy(after, y_test):.3f}")


if __name__ == "__main__":
    main()
