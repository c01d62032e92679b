"""Sequences of linear and element-wise layers, evaluated and differentiated for C clients at once.

One batched product serves all clients. The backward pass is written out: autograd would write each gradient to memory of its own,
and its bookkeeping takes as long for small layers as the layers themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ELEMENTWISE = (
    nn.ReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.LeakyReLU,
    nn.Softplus,
    nn.Identity,
)

Tape = list[tuple[Tensor, Tensor]]
"""Input and output of each layer, which the backward pass needs."""


@dataclass(frozen=True)
class Layer:
    """A layer with its weight [C, out, in] and bias [C, 1, out], if it is linear, and where their gradients go, if anywhere."""

    module: nn.Module
    weight: Tensor | None = None
    bias: Tensor | None = None
    weight_place: Tensor | None = None
    bias_place: Tensor | None = None


class Stack:
    """The layers of a module, in order, with their names. Tensors that are not given stay those of the module: frozen."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]):
        self.layers = layers
        for _, layer in layers:
            if getattr(layer, "inplace", False):
                setattr(layer, "inplace", False)  # noqa: B010  # the backward pass needs what came in

    @classmethod
    def of(cls, module: nn.Module) -> Stack | None:
        """The stack of a module that is a sequence of linear and element-wise layers only, else None."""

        def flat(name: str, part: nn.Module) -> list[tuple[str, nn.Module]]:
            if type(part) is nn.Sequential:
                return [
                    layer
                    for n, p in part._modules.items()
                    if p is not None
                    for layer in flat(_join(name, n), p)
                ]
            return [(name, part)]

        layers = flat("", module)
        linear = [part for _, part in layers if isinstance(part, nn.Linear)]
        if not linear or len(set(linear)) < len(linear):
            return None  # a layer that is used twice has one name: leave it to torch
        if len(list(module.named_parameters(remove_duplicate=False))) > len(
            list(module.parameters())
        ):
            return None  # shared weights: torch ties them
        if any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
            return None
        for position, (_, part) in enumerate(layers):
            if isinstance(part, nn.Flatten):
                if position or (part.start_dim, part.end_dim) != (1, -1):
                    return None
            elif type(part) not in (nn.Linear, *ELEMENTWISE):  # a subclass may do anything
                return None
        return cls(layers)

    def bind(
        self, tensors: Mapping[str, Tensor], count: int, places: Mapping[str, Tensor]
    ) -> list[Layer]:
        """The layers with the tensors of `count` clients, [C, ...] each, and where their gradients go."""
        bound = []
        for name, layer in self.layers:
            if isinstance(layer, nn.Linear):
                weight, bias = (
                    None
                    if own is None
                    else tensors.get(_join(name, key), own.detach()).expand(count, *own.shape)
                    for key, own in (("weight", layer.weight), ("bias", layer.bias))
                )
                to = tuple(places.get(_join(name, key)) for key in ("weight", "bias"))
                bound.append(Layer(layer, weight, None if bias is None else bias.unsqueeze(1), *to))
            else:
                bound.append(Layer(layer))
        return bound

    @staticmethod
    @torch.no_grad()
    def outputs(layers: Sequence[Layer], x: Tensor, tape: Tape | None = None) -> Tensor:
        """Outputs [C, B, out] for scaled inputs [C, B, ...]; a tape takes up what `backward` needs."""
        for layer in layers:
            if layer.weight is not None:
                weight = layer.weight.mT
                y = (
                    torch.bmm(x, weight)
                    if layer.bias is None
                    else torch.baddbmm(layer.bias, x, weight)
                )
            elif isinstance(layer.module, nn.ReLU):
                y = torch.relu(x)
            elif isinstance(layer.module, nn.Flatten):
                y = x.flatten(2)
            elif tape is None:
                y = layer.module(x)
            else:
                x = x.detach().requires_grad_()
                with torch.enable_grad():
                    y = layer.module(x)
            if tape is not None:
                tape.append((x, y))
            x = y
        return x.detach()

    @staticmethod
    @torch.no_grad()
    def backward(layers: Sequence[Layer], tape: Tape, g: Tensor, keep: float, scale: float) -> None:
        """place <- keep place + scale gradient wherever a layer has a place, from g = d loss / d outputs [C, B, out].

        The places may be the weights themselves: each is read for the last time before it changes.
        """
        first = next(
            k
            for k, layer in enumerate(layers)
            if layer.weight_place is not None or layer.bias_place is not None
        )
        for k in range(len(layers) - 1, first - 1, -1):
            layer, (x, y) = layers[k], tape[k]
            if layer.weight is not None:
                above = g
                if k > first:
                    g = torch.bmm(above, layer.weight)
                if layer.weight_place is not None:
                    torch.baddbmm(
                        layer.weight_place,
                        above.mT,
                        x,
                        beta=keep,
                        alpha=scale,
                        out=layer.weight_place,
                    )
                if layer.bias_place is not None:
                    accumulate(layer.bias_place, above.sum(1), keep, scale)
            elif isinstance(layer.module, nn.ReLU):
                g = torch.ops.aten.threshold_backward.grad_input(g, y, 0.0, grad_input=g)
            else:
                (g,) = torch.autograd.grad(y, x, g)


def accumulate(place: Tensor, grad: Tensor, keep: float, scale: float) -> None:
    """place <- keep place + scale grad; with keep = 0, whatever was there (NaN too) is gone."""
    if keep == 0.0:
        torch.mul(grad, scale, out=place)
    else:
        (place if keep == 1.0 else place.mul_(keep)).add_(grad, alpha=scale)


def _join(name: str, key: str) -> str:
    """The name of a layer's tensor; a module that is one linear layer has no name."""
    return f"{name}.{key}" if name else key
