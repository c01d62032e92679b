"""A table whose clients are in the data: patients of twelve hospitals that may not pool their data.

The patients are simulated. Hospitals differ in their size (40 to 800 patients), in the age and
health of their patients, in their laboratories (the same blood gives other numbers) and in the
outcomes (each has its own intercept and slope). The example compares EmpiricalBayes, FedAvg and
FedBABU before and after personalisation; then a thirteenth hospital with 30 patients joins. Run it
with `python examples/hospitals.py`; it takes less than 30 seconds.

These are the results of one random draw, with seed 0. Over seeds 0 to 3 the personalised accuracies
of the methods differ by about one standard error. Personalisation lowers the mean NLL in every
draw, but increases the error in one (seed 3), and 30 patients do not always help the new hospital
(seed 2). Change the seed to see this.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import torch

import fedhb

SIZES = (800, 600, 450, 300, 250, 200, 150, 100, 80, 60, 50, 40)  # training patients
# Test patients of each hospital. All hospitals have the same number: with fewer test patients, the
# results of the small hospitals would be mostly noise.
NUM_TEST = 300
FEATURES = (
    "age",
    "female",
    "systolic pressure",
    "haemoglobin",
    "log creatinine",
    "log lactate",
    "log CRP",
)


# 1. The patients ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hospital:
    """The differences of a hospital from the mean hospital.

    `older`, `sicker` and the two assays change the features (covariate shift); `risk` and `lactate`
    change how the outcome depends on them (concept shift).
    """

    older: float
    sicker: float
    creatinine_assay: float
    crp_assay: float
    risk: float
    lactate: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Hospital:
        """Draw a hospital at random."""
        return cls(*rng.normal([0, 0, 0, 0, -0.9, 0.9], [6, 0.7, 0.15, 0.3, 0.9, 0.45]))

    def admit(
        self, rng: np.random.Generator, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw patients at random.

        Returns:
            (features [n, 7], outcomes [n], where 1 is a complication within 30 days, true
            probabilities of a complication [n]).
        """
        age = np.clip(rng.normal(62 + self.older, 14, count), 18, 98)
        female = rng.random(count) < 0.48
        pressure = rng.normal(128 + 0.25 * (age - 62), 19)
        haemoglobin = rng.normal(134 - 10 * female, 17)
        # The next three are logarithms.
        creatinine = rng.normal(4.4 + 0.008 * (age - 62) + 0.2 * self.sicker, 0.35)
        lactate = rng.normal(0.4 + 0.4 * self.sicker, 0.5, count)
        crp = rng.normal(2.7 + 0.5 * self.sicker, 1.1, count)
        logit = (
            self.risk
            + 0.045 * (age - 65)
            + 0.02 * np.maximum(age - 75, 0)
            + 3e-4 * (pressure - 135) ** 2
        )
        logit += (
            self.lactate * (lactate - 0.4)
            + 0.8 * (creatinine - 4.4)
            + 0.25 * (crp - 2.7)
            - 0.015 * (haemoglobin - 130)
        )
        probability = 1 / (1 + np.exp(-logit))
        measured = (
            age,
            female,
            pressure,
            haemoglobin,
            creatinine + self.creatinine_assay,
            lactate,
            crp + self.crp_assay,
        )
        return (
            np.stack(measured, axis=1),
            (rng.random(count) < probability).astype(np.int64),
            probability,
        )


def write_patients(path: Path, rng: np.random.Generator) -> tuple[float, float]:
    """Write one .npz file with x, y, client and split.

    Returns:
        (accuracy, NLL) of the true probabilities, which no method can improve on.
    """
    x, y, client, split, best = [], [], [], [], []
    for k, size in enumerate(SIZES):
        features, outcome, p = Hospital.draw(rng).admit(rng, size + NUM_TEST)
        x.append(features)
        y.append(outcome)
        client.append(np.full(len(outcome), f"hospital {k + 1:02d}"))
        split.append(np.arange(len(outcome)) >= size)  # 0 for training rows, 1 for test rows
        best.append(scores(np.stack([1 - p, p], axis=1)[size:], outcome[size:]))
    np.savez(
        path,
        x=np.concatenate(x),
        y=np.concatenate(y),
        client=np.concatenate(client),
        split=np.concatenate(split),
    )
    accuracy, nll = np.mean(best, axis=0)
    return accuracy, nll


def scores(probabilities: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return (accuracy, negative log-likelihood)."""
    truth = probabilities[np.arange(len(y)), y]
    return float((probabilities.argmax(1) == y).mean()), float(-np.log(truth).mean())


def entropy(probabilities: np.ndarray) -> np.ndarray:
    """Return the entropy of each prediction in bits: 0 is certain, 1 is a coin toss."""
    return -(probabilities * np.log2(np.clip(probabilities, 1e-12, None))).sum(1)


# 2. The comparison --------------------------------------------------------------------------------


def train(algorithm: fedhb.algorithms.Algorithm, clients: fedhb.Clients) -> fedhb.Run:
    """Train, and choose the learning rate of personalisation by validation.

    The network, the rounds and the learning rate of training are the same for every method.
    """
    torch.manual_seed(0)
    model = fedhb.nets.mlp((len(FEATURES),), 2, hidden=32)
    run = fedhb.fit(
        model,
        clients,
        algorithm,
        rounds=30,
        fraction=0.5,
        local_epochs=2,
        batch_size=32,
        lr=0.05,
        seed=0,
        evaluate_on=None,
        progress=False,
    )
    # The best learning rate of personalisation differs between methods. Each method has the same
    # grid, and validation patients decide. Test patients are used only at the end.
    plans = [dataclasses.replace(run.personal_plan, lr=lr) for lr in (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)]
    runs = [dataclasses.replace(run, personal_plan=plan) for plan in plans]
    return min(runs, key=lambda r: r.evaluate(clients, "validation")["personalised"]["nll"])


def main() -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "patients.npz"
        best_accuracy, best_nll = write_patients(path, rng)
        # The array `client` names the hospital of each row. Features are scaled by the mean and the
        # standard deviation of all hospitals' training rows.
        clients = fedhb.partition.natural(fedhb.data.read_npz(path)).with_validation(0.2, seed=0)
    sizes = clients.sizes.tolist()
    print(f"{len(clients)} hospitals, {min(sizes)} to {max(sizes)} patients to train on")

    methods = (fedhb.EmpiricalBayes(), fedhb.FedAvg(), fedhb.FedBABU())
    runs = {algorithm.name: train(algorithm, clients) for algorithm in methods}

    print("\nmean over hospitals      global                  personalised")
    print("                accuracy    NLL    ECE    accuracy    NLL    ECE    personal lr")
    for name, run in runs.items():
        result = run.evaluate(clients, "test")
        line = f"{name:14}"
        for part in ("global", "personalised"):
            metrics = result[part]
            line += f"    {metrics['accuracy']:.3f}  {metrics['nll']:.3f}  {metrics['ece']:.3f} "
        print(line + f"       {run.personal_plan.lr:g}")
    print(f"{'best possible':14}                            {best_accuracy:.3f}  {best_nll:.3f}")
    error = (best_accuracy * (1 - best_accuracy) / (len(SIZES) * NUM_TEST)) ** 0.5
    print(f"(standard error of each accuracy: about {error:.3f})")

    # 3. A new hospital. It did not take part in the training, and 30 patients are too few to train
    # a network on.
    run, hospital = runs["empirical-bayes"], Hospital.draw(rng)
    x_train, y_train, _ = hospital.admit(rng, 30)
    x_test, y_test, _ = hospital.admit(rng, 1000)
    personal = run.personalise(x_train, y_train)
    print("\na new hospital with 30 patients, EmpiricalBayes:")
    for when, p in (("before", run.predict(x_test)), ("after", personal.predict(x_test))):
        accuracy, nll = scores(p, y_test)
        print(
            f"  {when:6}  accuracy {accuracy:.3f}  NLL {nll:.3f}  "
            f"mean entropy {entropy(p).mean():.3f} bits"
        )
    # Predictions of low entropy are right more often than those of high entropy.
    order = entropy(p).argsort()
    low, high = (scores(p[rows], y_test[rows])[0] for rows in (order[:250], order[-250:]))
    print(
        f"  accuracy on the quarter with the lowest entropy {low:.3f}, with the highest {high:.3f}"
    )


if __name__ == "__main__":
    main()
