"""Federated regression with uncertainty: thermometers that stand in different places.

Each sensor's daily curve has another amplitude, delay, offset and noise, and the noise grows in the
afternoon. The network predicts a mean and a noise for each hour. The example shows whether its 90 %
intervals hold 90 % of the readings, before and after a sensor personalises on a few dozen readings.
Run it with `python examples/regression.py`; it takes a few seconds. The learning rates were chosen
on a validation split of the training readings (experiments/examples).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import fedhb

HALF_WIDTH = 1.645  # half the width of a 90 % interval, in standard deviations


@dataclass(frozen=True)
class Sensor:
    """A sensor: all sensors have the same curve, with other constants."""

    amplitude: float
    delay: float
    offset: float
    noise: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Sensor:
        """Draw a sensor at random."""
        amplitude, delay, offset, log_noise = rng.normal(
            [6.0, 1.8, 15.0, -0.7], [1.8, 0.35, 1.2, 0.3]
        )
        return cls(amplitude, delay, offset, np.exp(log_noise))

    def mean(self, hour: np.ndarray) -> np.ndarray:
        """Return the true temperature."""
        angle = 2 * np.pi * hour / 24
        return self.offset + self.amplitude * np.sin(angle - self.delay) + 1.5 * np.sin(2 * angle)

    def read(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs [n, 2] and noisy temperatures [n] at random hours."""
        hour = rng.uniform(0, 24, count)
        deviation = self.noise * (1 + 1.5 * np.maximum(np.sin(2 * np.pi * hour / 24 - 1.8), 0))
        return inputs(hour), rng.normal(self.mean(hour), deviation)


def inputs(hour: np.ndarray) -> np.ndarray:
    """Return hours as points on a circle, so that 23:59 is next to 00:00."""
    angle = 2 * np.pi * np.asarray(hour) / 24
    return np.stack([np.sin(angle), np.cos(angle)], axis=1)


def make_clients(rng: np.random.Generator) -> tuple[fedhb.Clients, fedhb.Clients]:
    """Make twenty sensors that train, and five that are held out."""
    sensors = [Sensor.draw(rng) for _ in range(25)]
    train = [sensor.read(rng, int(rng.integers(40, 120))) for sensor in sensors]
    test = [sensor.read(rng, 200) for sensor in sensors]
    # Real targets make it a regression; no setting is needed.
    return fedhb.Clients.from_arrays(train, test).hold_out(5, seed=0)


def train(
    clients: fedhb.Clients,
    lr: float = 0.02,
    personal_lr: float = 0.01,
    holdout: fedhb.Clients | None = None,
    evaluate_on: str = "test",
) -> fedhb.Run:
    """Train with EmpiricalBayes; the head is trained with the body.

    A fixed random head with two outputs would show little of the body's features.
    """
    torch.manual_seed(0)
    # The two outputs are the mean and the noise.
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
    options = {"rounds": 40, "fraction": 0.5, "local_epochs": 5, "batch_size": 20, "lr": lr}
    personal = {"personal_lr": personal_lr, "personal_epochs": 20}
    return fedhb.fit(
        model,
        clients,
        fedhb.EmpiricalBayes(),
        **options,
        **personal,
        holdout=holdout,
        evaluate_on=evaluate_on,
        seed=0,
    )


def main() -> None:
    rng = np.random.default_rng(1)
    clients, novel = make_clients(rng)
    run = train(clients, holdout=novel)

    # The global intervals are too narrow: every client learns the noise around its own curve, and
    # the posterior's spread over networks is much smaller than the differences between sensors.
    # After personalisation the curve is that of the sensor.
    print("mean over sensors          global                    personalised")
    print("                     RMSE    NLL  coverage        RMSE    NLL  coverage   (90 % wanted)")
    for name, result in (("20 that trained", run.result), ("5 held out", run.result["holdout"])):
        line = f"{name:17}"
        for part in ("global", "personalised"):
            rmse, nll, coverage = (result[part][key] for key in ("rmse", "nll", "coverage"))
            line += f"   {rmse:5.2f}  {nll:5.2f}  {100 * coverage:6.1f} %   "
        print(line.rstrip())

    # One more sensor, in detail. Its predictions [n, 2, 1] are mean and variance, in the targets'
    # units.
    sensor = Sensor.draw(rng)
    personal = run.personalise(*sensor.read(rng, 40))
    hours = np.array([3.0, 9.0, 15.0, 21.0])
    before, after = run.predict(inputs(hours)), personal.predict(inputs(hours))
    print("\na new sensor with 40 readings: the true mean, and 90 % intervals for a reading")
    for k, hour in enumerate(hours):
        before_text, after_text = (
            f"{p[k, 0, 0]:5.1f} ± {HALF_WIDTH * p[k, 1, 0] ** 0.5:3.1f}" for p in (before, after)
        )
        print(
            f"  {hour:02.0f}:00  true {sensor.mean(hour):5.1f}   "
            f"before {before_text}   after {after_text}"
        )


if __name__ == "__main__":
    main()
