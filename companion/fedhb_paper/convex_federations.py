"""Federations whose negative ELBO is convex and whose minimiser is known.

    mu ~ N(0, diag(1 / root)),  theta_i | mu ~ N(mu, diag(1 / prior)),
    y | a ~ N(theta_i . a, noise^2), or logistic in theta_i . a

With q(mu) and q_i narrow around x_0 and x_i the negative ELBO is, up to a constant,

    f(x) = scale { sum_i sum_j loss(x_i . a_ij, y_ij)
                   + 1/2 sum_i (x_i - x_0)' diag(prior) (x_i - x_0) + 1/2 x_0' diag(root) x_0 }

over x = [x_0, x_1, .., x_N]: row 0 of an array [N + 1, d] is the server's block, the others are the
clients'. It is the objective of Mixture with one prototype (prior = 1 / sigma2, root = 1). A
client's examples lie in equal batches, and f_t has one of them, times their number, for each
client: its mean over batches is f. `scale` makes the gradient of every f_t 1-Lipschitz.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedhb.errors import InputError

Array = np.ndarray
CURVATURE = {"gaussian": 1.0, "logistic": 0.25}
"""The largest second derivative of each loss."""


@dataclass(frozen=True)
class ConvexFederation:
    """The problem.

    Attributes:
        inputs: [N, batches, B, d].
        targets: [N, batches, B]; 0 or 1 for the logistic model. Gaussian inputs and targets are in
            units of the noise.
        loss: "gaussian", 1/2 (z - y)^2, or "logistic", log(1 + e^z) - y z.
        prior: the precision of theta_i around mu [d].
        root: the precision of mu around 0 [d].
        scale: multiplies f.
    """

    inputs: Array
    targets: Array
    loss: str
    prior: Array
    root: Array
    scale: float = 1.0

    @property
    def num_clients(self) -> int:
        """The number of clients, N."""
        return len(self.inputs)

    @property
    def num_batches(self) -> int:
        """The number of batches of a client."""
        return self.inputs.shape[1]

    def start(self) -> Array:
        """Return x^0 = 0, the mean of the prior [N + 1, d]."""
        return np.zeros((self.num_clients + 1, self.inputs.shape[-1]))

    def _pooled(self) -> tuple[Array, Array]:
        """Return inputs [N, n, d] and targets [N, n]."""
        count, dim = self.num_clients, self.inputs.shape[-1]
        return self.inputs.reshape(count, -1, dim), self.targets.reshape(count, -1)

    def value(self, x: Array) -> float:
        """Return f(x)."""
        a, y = self._pooled()
        z = np.einsum("ind,id->in", a, x[1:])
        loss = 0.5 * (z - y) ** 2 if self.loss == "gaussian" else np.logaddexp(0.0, z) - y * z
        pull = 0.5 * (self.prior * (x[1:] - x[0]) ** 2).sum() + 0.5 * (self.root * x[0] ** 2).sum()
        return self.scale * float(loss.sum() + pull)

    def gradient(self, x: Array, batch: Array | None = None) -> Array:
        """Return the gradient of f [N + 1, d], or of f_t with this batch of each client [N]."""
        if batch is None:
            (a, y), times = self._pooled(), 1
        else:
            rows, times = np.arange(self.num_clients), self.num_batches
            a, y = self.inputs[rows, batch], self.targets[rows, batch]
        z = (a @ x[1:, :, None])[..., 0]
        slope = z - y if self.loss == "gaussian" else 1.0 / (1.0 + np.exp(-z)) - y
        derivative = np.empty_like(x)
        pull = self.prior * (x[1:] - x[0])
        derivative[1:] = times * (slope[:, None] @ a)[:, 0] + pull
        derivative[0] = self.root * x[0] - pull.sum(0)
        derivative *= self.scale
        return derivative

    def hessian(self, x: Array) -> Array:
        """Return the second derivatives of f [(N + 1) d, (N + 1) d]."""
        a, _ = self._pooled()
        z = np.einsum("ind,id->in", a, x[1:])
        weight = np.ones_like(z) if self.loss == "gaussian" else 0.25 / np.cosh(z / 2) ** 2
        return self.scale * self._arrow(np.einsum("ind,in,ine->ide", a, weight, a))

    def _arrow(self, losses: Array) -> Array:
        """Return the Hessian for given Hessians of the clients' losses [N, d, d]."""
        count, dim = self.num_clients, self.inputs.shape[-1]
        whole = np.zeros((count + 1, dim, count + 1, dim))
        prior = np.diag(self.prior)
        whole[0, :, 0] = np.diag(self.root) + count * prior
        for i in range(count):
            whole[i + 1, :, i + 1] = losses[i] + prior
            whole[0, :, i + 1] = whole[i + 1, :, 0] = -prior
        return whole.reshape((count + 1) * dim, (count + 1) * dim)

    def smoothness(self) -> float:
        """Return a Lipschitz constant of the gradient of every f_t.

        The Hessian of a client's loss in f_t is at most c_i I, with c_i its largest eigenvalue over
        the batches. With c_i I in its place the largest eigenvalue of the whole can only grow.
        """
        gram = (
            self.num_batches
            * CURVATURE[self.loss]
            * np.einsum("ibnd,ibne->ibde", self.inputs, self.inputs)
        )
        top = np.linalg.eigvalsh(gram)[..., -1].max(1)
        return self.scale * float(
            np.linalg.eigvalsh(self._arrow(top[:, None, None] * np.eye(gram.shape[-1])))[-1]
        )

    def minimiser(self) -> Array:
        """Return x* [N + 1, d], by Newton's method.

        It takes one step for the Gaussian model, and is damped only where a full step does not
        descend.
        """
        x = self.start()
        for _ in range(100):
            gradient = self.gradient(x)
            if np.abs(gradient).max() < 1e-15 * max(1.0, np.abs(x).max()):
                break
            step = np.linalg.solve(self.hessian(x), gradient.ravel()).reshape(x.shape)
            size = 1.0
            while self.value(x - size * step) > self.value(x) + 1e-15 and size > 1e-4:
                size /= 2
            x = x - size * step
        return x


def make(settings: dict[str, Any]) -> ConvexFederation:
    """Return the federation that the settings describe, scaled to smoothness 1.

    Feature k has the deviation sqrt(h_k), and mu and theta_i have the precisions
    h_k / mu_deviation^2 and h_k / client_deviation^2, with h_k log-spaced from 1 to `smallest`: the
    same problem in every coordinate, in units that differ more and more.
    """
    if settings["loss"] not in CURVATURE:
        raise InputError(f"loss={settings['loss']!r}: choose {' or '.join(CURVATURE)}")
    if settings["examples"] % settings["batch_size"]:
        raise InputError(
            f"batch_size={settings['batch_size']} does not divide "
            f"examples={settings['examples']}: choose a divisor"
        )
    count, dim, size = settings["num_clients"], settings["dim"], settings["batch_size"]
    rng = np.random.default_rng(settings["problem_seed"])
    h = np.geomspace(1.0, settings["smallest"], dim)
    mu = settings["mu_deviation"] * rng.normal(size=dim)
    theta = mu + settings["client_deviation"] * rng.normal(size=(count, dim))
    a = np.sqrt(h) * rng.normal(size=(count, settings["examples"], dim))
    z = np.einsum("ind,id->in", a, theta)
    if settings["loss"] == "gaussian":
        a, y = (
            a / settings["noise"],
            (z + settings["target_noise"] * rng.normal(size=z.shape)) / settings["noise"],
        )
    else:
        y = (rng.random(z.shape) < 1.0 / (1.0 + np.exp(-z))).astype(float)
    problem = ConvexFederation(
        a.reshape(count, -1, size, dim),
        y.reshape(count, -1, size),
        settings["loss"],
        prior=h / settings["client_deviation"] ** 2,
        root=h / settings["mu_deviation"] ** 2,
    )
    return replace(problem, scale=1.0 / problem.smoothness())
