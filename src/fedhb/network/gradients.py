"""The gradients of C clients' losses in their own weights, put where the solver wants them.

    o_c = f(x_c; w_c)                      outputs [B, out] of client c with its weights w_c
    s_c = dL_c / do_c                      given by the caller as a function of the outputs
    g_c = (do_c / dw_c)^T s_c              the gradient of the client's loss
    place_c <- keep place_c + scale g_c    what is written

With keep = momentum and scale = 1 a velocity takes up the gradient. With keep = 1 and scale = -lr
the weights themselves take the step. Neither needs another pass over the vectors. keep = 0 writes
the gradient anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedhb.network.client_axis import Stack, Tape, accumulate

if TYPE_CHECKING:
    from fedhb.network.vectors import Network, Weights

LossSlope = Callable[[Tensor, int | None], Tensor]
"""`slope(outputs, client)`: the derivative of the clients' losses in their outputs [C, B, out]
(client None), or of the loss of one client in its outputs [1, counts[client], out]."""


class Bound:
    """Weights of C clients, and the places of their gradients, as the tensors of a module.

    All of them are views, which are made once for many steps.

    Args:
        network: what the weights belong to.
        weights: of the C clients.
        gradient: where the gradients of theta go [C, d], None where they are not wanted.
        head_gradient: where those of the head go [C, h], or None.
    """

    def __init__(
        self,
        network: Network,
        weights: Weights,
        gradient: Tensor | None,
        head_gradient: Tensor | None,
    ):
        self.network, self.weights = network, weights
        both = ((gradient, network.body_slots), (head_gradient, network.head_slots))
        self._vectors = [vector for vector, _ in both if vector is not None]
        self._places = {
            slot.name: slot.of(vector)
            for vector, slots in both
            if vector is not None
            for slot in slots
        }
        stack, views = network.stack, network.views(weights.theta, weights.head)
        count = len(weights.theta)
        self._layers = None if stack is None else stack.bind(views, count, self._places)
        self._clients: dict[int, tuple[dict[str, Tensor], list[Tensor], list[Tensor]]] = {}

    def _client(self, c: int) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
        """Return the tensors of client c, the trained ones, and the places of their gradients."""
        if c not in self._clients:
            tensors = self.network.tensors(self.weights, c)
            leaves = [tensors[name].requires_grad_() for name in self._places]
            self._clients[c] = tensors, leaves, [place[c] for place in self._places.values()]
        return self._clients[c]

    def differentiate(
        self,
        x: Tensor,
        slope: LossSlope,
        *,
        counts: Sequence[int],
        seeds: Sequence[int],
        keep: float = 0.0,
        scale: float = 1.0,
        training: bool = True,
    ) -> None:
        """Do place <- keep place + scale gradient for each client; update the buffers in place.

        Args:
            x: inputs [C, B, ...], prepared.
            slope: see `LossSlope`.
            counts: the true number of examples of each client in the batch; the rest is padding.
            seeds: a seed per client for randomness inside the module.
            keep: by what the places are multiplied before.
            scale: by what the gradient is multiplied.
            training: whether the module is in training mode.
        """
        if self.network.module.training != training:
            self.network.module.train(training)
        if self._layers is not None:
            tape: Tape = []
            outputs = Stack.outputs(self._layers, x, tape)
            Stack.backward(self._layers, tape, slope(outputs, None), keep, scale)
            return
        for c, (count, seed) in enumerate(zip(counts, seeds, strict=True)):
            self._differentiate_client(c, x[c, :count], seed, slope, keep, scale)

    def _differentiate_client(
        self, c: int, x: Tensor, seed: int, slope: LossSlope, keep: float, scale: float
    ) -> None:
        """Do the same for client c alone, with its inputs x [B, ...], by autograd."""
        network = self.network
        on_cpu = network.device.type == "cpu"
        # torch.manual_seed formats the call stack for each device that may be initialised later
        reseed = torch.default_generator.manual_seed if on_cpu else torch.manual_seed
        tensors, leaves, places = self._client(c)
        with torch.random.fork_rng(devices=[]):
            reseed(seed)
            outputs = network.evaluate(tensors, x).unsqueeze(0)
        # a module may have weights that its outputs do not need: their gradient is zero
        grads = torch.autograd.grad(
            outputs,
            leaves,
            slope(outputs.detach(), c),
            allow_unused=True,
            materialize_grads=True,
        )
        if keep not in (0.0, 1.0):  # once for all places, which are the parts of these vectors
            for vector in self._vectors:
                vector[c].mul_(keep)
        for place, grad in zip(places, grads, strict=True):
            accumulate(place, grad, 1.0 if keep else 0.0, scale)
