"""A table with a natural partition: patients of twelve hospitals that may not pool their data.

The data are made here, with a seed. Hospitals differ in size (40 to 800 patients), in whom they treat
(age, severity), in their laboratories (the same blood gives other numbers) and in outcome (an
intercept and a slope of their own). EmpiricalBayes, FedAvg and FedBABU are compared before and
after personalisation; then a thirteenth hospital with 30 patients joins.
`python examples/hospitals.py` takes less than 30 s.

This is one draw, seed 0. Over seeds 0 to 3 the personalised accuracies of the methods lie within
about one standard error. Personalisation lowers the mean NLL in every draw, but raises the error in
one (seed 3), and 30 patients do not always help the new hospital (seed 2). Change the seed and see.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import torch

import fedhb

SIZES = (800, 600, 450, 300, 250, 200, 150, 100, 80, 60, 50, 40)  # patients to learn from
NUM_TEST = 300  # patients per hospital to test on; as many everywhere, or the small hospitals' numbers would be mostly noise
FEATURES = (
    "age",
    "female",
    "systolic pressure",
    "haemoglobin",
    "log creatinine",
    "log lactate",
    "log CRP",
)


# 1. The patients ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hospital:
    """What sets a hospital apart: covariate shift (older, sicker, assays) and concept shift (risk, lactate)."""

    older: float
    sicker: float
    creatinine_assay: float
    crp_assay: float
    risk: float
    lactate: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Hospital:
        """A hospital of the region."""
        return cls(*rng.normal([0, 0, 0, 0, -0.9, 0.9], [6, 0.7, 0.15, 0.3, 0.9, 0.45]))

    def admit(
        self, rng: np.random.Generator, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Features [n, 7], outcome [n] (1: a complication within 30 days) and its true probability [n]."""
        age = np.clip(rng.normal(62 + self.older, 14, count), 18, 98)
        female = rng.random(count) < 0.48
        pressure = rng.normal(128 + 0.25 * (age - 62), 19)
        haemoglobin = rng.normal(134 - 10 * female, 17)
        creatinine = rng.normal(
            4.4 + 0.008 * (age - 62) + 0.2 * self.sicker, 0.35
        )  # in logarithms, as are the next two
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
    """One .npz file with x, y, client and split. Returns accuracy and NLL of the true probabilities: the best anyone can do."""
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
    """Accuracy and negative log-likelihood."""
    truth = probabilities[np.arange(len(y)), y]
    return float((probabilities.argmax(1) == y).mean()), float(-np.log(truth).mean())


def entropy(probabilities: np.ndarray) -> np.ndarray:
    """The entropy of each prediction in bits: 0 is certain, 1 is a coin toss."""
    return -(probabilities * np.log2(np.clip(probabilities, 1e-12, None))).sum(1)


# 2. The comparison ----------------------------------------------------------------------------------------------------------


def train(algorithm: fedhb.algorithms.Algorithm, clients: fedhb.Clients) -> fedhb.Run:
    """The same network, rounds and learning rate for every method; then the learning rate of personalisation by validation."""
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
    # How fast to personalise matters, and differs between methods. Each gets the same grid and its own choice, made on
    # validation patients: test patients are looked at once, at the end.
    plans = [dataclasses.replace(run.personal_plan, lr=lr) for lr in (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)]
    tried = [dataclasses.replace(run, personal_plan=plan) for plan in plans]
    return min(tried, key=lambda r: r.evaluate(clients, "validation")["personalised"]["nll"])


def main() -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "patients.npz"
        best_accuracy, best_nll = write_patients(path, rng)
        # The array `client` says who holds which row. Features are standardised by the training rows of all hospitals.
        clients = fedhb.partition.natural(fedhb.data.read_npz(path)).with_validation(0.2, seed=0)
    sizes = clients.sizes.tolist()
    print(f"{len(clients)} hospitals, {min(sizes)} to {max(sizes)} patients to train on")

    methods = (fedhb.EmpiricalBayes(), fedhb.FedAvg(), fedhb.FedBABU())
    runs = {algorithm.name: train(algorithm, clients) for algorithm in methods}

    print("\nmean over hospitals        global                  personalised")
    print("                  accuracy    NLL    ECE    accuracy    NLL    ECE    personal lr")
    for name, run in runs.items():
        result = run.evaluate(clients, "test")
        line = f"{name:16}"
        for part in ("global", "personalised"):
            m = result[part]
            line += f"    {m['accuracy']:.3f}  {m['nll']:.3f}  {m['ece']:.3f} "
        print(line + f"       {run.personal_plan.lr:g}")
    print(f"{'best possible':16}                            {best_accuracy:.3f}  {best_nll:.3f}")
    error = (best_accuracy * (1 - best_accuracy) / (len(SIZES) * NUM_TEST)) ** 0.5
    print(f"(standard error of each accuracy: about {error:.3f})")

    # 3. A new hospital. It has never taken part, and 30 patients are too few to train a network on.
    run, hospital = runs["empirical-bayes"], Hospital.draw(rng)
    x_own, y_own, _ = hospital.admit(rng, 30)
    x_new, y_new, _ = hospital.admit(rng, 1000)
    mine = run.personalise(x_own, y_own)
    print("\na new hospital with 30 patients, EmpiricalBayes:")
    for when, p in (("before", run.predict(x_new)), ("after", mine.predict(x_new))):
        accuracy, nll = scores(p, y_new)
        print(
            f"  {when:6}  accuracy {accuracy:.3f}  NLL {nll:.3f}  mean entropy {entropy(p).mean():.3f} bits"
        )
    # Entropy says which predictions to trust: compare the patients it is sure of with those it is not.
    order = entropy(p).argsort()
    sure, unsure = (scores(p[rows], y_new[rows])[0] for rows in (order[:250], order[-250:]))
    print(
        f"  accuracy on the quarter with the lowest entropy {sure:.3f}, with the highest {unsure:.3f}"
    )


if __name__ == "__main__":
    main()
