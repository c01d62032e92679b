"""Sequences of linear and element-wise layers, evaluated and differentiated for C clients at once.

For client c and layer k, with inputs a_0 = x and outputs a_K:

    linear          a_k = a_{k-1} W_k^T + b_k
                    dW_k = g_k^T a_{k-1},   db_k = sum over examples of g_k,   g_{k-1} = g_k W_k
    element-wise    a_k = f(a_{k-1}),       g_{k-1} = f'(a_{k-1}) * g_k

One batched product serves all clients. The backward pass is written out: autograd would write each
gradient to memory of its own, and its bookkeeping takes as long for small layers as the layers
themselves.
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
    """A layer of C clients.

    Attributes:
        module: the layer itself.
        weight: [C, out, in], if it is linear.
        bias: [C, 1, out], if it has one.
        weight_place: where the gradient of the weight goes [C, out, in], None for nowhere.
        bias_place: the same for the bias [C, out].
    """

    module: nn.Module
    weight: Tensor | None = None
    bias: Tensor | None = None
    weight_place: Tensor | None = None
    bias_place: Tensor | None = None


class Stack:
    """The layers of a module, in order, with their names."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]):
        self.layers = layers
        for _, layer in layers:
            if getattr(layer, "inplace", False):
                # the backward pass needs what came in
                setattr(layer, "inplace", False)  # noqa: B010

    @classmethod
    def of(cls, module: nn.Module) -> Stack | None:
        """Return the stack of a sequence of linear and element-wise layers; None for any other."""
        layers = _flat("", module)
        linear = [part for _, part in layers if isinstance(part, nn.Linear)]
        if not linear or len(set(linear)) < len(linear):
            return None  # a layer that is used twice has one name: leave it to torch
        named = list(module.named_parameters(remove_duplicate=False))
        if len(named) > len(list(module.parameters())):
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
        """Return the layers with the tensors of `count` clients, and where their gradients go.

        Args:
            tensors: [C, ...] each, by name. Any other tensor is frozen: it is the module's.
            count: C.
            places: [C, ...] each, by the names of their tensors.
        """
        bound = []
        for name, layer in self.layers:
            if not isinstance(layer, nn.Linear):
                bound.append(Layer(layer))
                continue
            values: list[Tensor | None] = []
            for key, frozen in (("weight", layer.weight), ("bias", layer.bias)):
                if frozen is None:
                    values.append(None)
                else:
                    value = tensors.get(_join(name, key), frozen.detach())
                    values.append(value.expand(count, *frozen.shape))
            weight, bias = values
            weight_place, bias_place = (places.get(_join(name, key)) for key in ("weight", "bias"))
            bias = None if bias is None else bias.unsqueeze(1)
            bound.append(Layer(layer, weight, bias, weight_place, bias_place))
        return bound

    @staticmethod
    @torch.no_grad()
    def outputs(layers: Sequence[Layer], x: Tensor, tape: Tape | None = None) -> Tensor:
        """Return outputs [C, B, out] for prepared inputs [C, B, ...].

        A tape takes up what `backward` needs.
        """
        for layer in layers:
            if layer.weight is not None:
                weight = layer.weight.mT
                if layer.bias is None:
                    y = torch.bmm(x, weight)
                else:
                    y = torch.baddbmm(layer.bias, x, weight)
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
        """Do place <- keep place + scale gradient wherever a layer has a place.

        The places may be the weights themselves: each is read for the last time before it changes.

        Args:
            layers: the bound layers.
            tape: what `outputs` wrote down.
            g: d loss / d outputs [C, B, out].
            keep: by what the places are multiplied.
            scale: by what the gradients are multiplied.
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
                    place = layer.weight_place
                    torch.baddbmm(place, above.mT, x, beta=keep, alpha=scale, out=place)
                if layer.bias_place is not None:
                    accumulate(layer.bias_place, above.sum(1), keep, scale)
            elif isinstance(layer.module, nn.ReLU):
                g = torch.ops.aten.threshold_backward.grad_input(g, y, 0.0, grad_input=g)
            else:
                (g,) = torch.autograd.grad(y, x, g)


def accumulate(place: Tensor, grad: Tensor, keep: float, scale: float) -> None:
    """Do place <- keep place + scale grad; keep = 0 overwrites whatever was there, NaN too."""
    if keep == 0.0:
        torch.mul(grad, scale, out=place)
    else:
        (place if keep == 1.0 else place.mul_(keep)).add_(grad, alpha=scale)


def _flat(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers of nested sequences, in order, with their names."""
    if type(module) is not nn.Sequential:
        return [(name, module)]
    layers = []
    for key, part in module._modules.items():
        if part is not None:
            layers += _flat(_join(name, key), part)
    return layers


def _join(name: str, key: str) -> str:
    """Return the name of a layer's tensor; a module that is one linear layer has no name."""
    return f"{name}.{key}" if name else key
