"""Sequences of linear and element-wise layers, evaluated and differentiated for C clients at once.

One batched product serves all clients. The backward pass is written out: autograd would write each gradient to memory of its own,
and its bookkeeping takes as long for small layers as the layers themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

ELEMENTWISE = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Identity)

Tape = list[tuple[Tensor, Tensor]]
"""Input and output of each layer, which the backward pass needs."""


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
                return [layer for n, p in part._modules.items() if p is not None for layer in flat(_join(name, n), p)]
            return [(name, part)]

        layers = flat("", module)
        linear = [part for _, part in layers if isinstance(part, nn.Linear)]
        if not linear or len(set(linear)) < len(linear):
            return None  # a layer that is used twice has one name: leave it to torch
        if len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters())):
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

    @torch.no_grad()
    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor, tape: Tape | None = None) -> Tensor:
        """Outputs [C, B, out] for tensors [C, ...] and scaled inputs [C, B, ...]; a tape takes up what `backward` needs."""
        for name, layer in self.layers:
            if isinstance(layer, nn.Linear):
                weight, bias = (_own(tensors, name, key, own, len(x)) for key, own in _parts(layer))
                assert weight is not None
                y = torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
            elif isinstance(layer, nn.Flatten):
                y = x.flatten(2)
            elif tape is None or isinstance(layer, nn.ReLU):
                y = layer(x)
            else:
                x = x.detach().requires_grad_()
                with torch.enable_grad():
                    y = layer(x)
            if tape is not None:
                tape.append((x, y))
            x = y
        return x.detach()

    @torch.no_grad()
    def backward(
        self, tensors: Mapping[str, Tensor], tape: Tape, g: Tensor, places: Mapping[str, Tensor], keep: float, scale: float
    ) -> None:
        """place <- keep place + scale gradient for every tensor in `places`, from g = d loss / d outputs [C, B, out].

        The places may be the tensors themselves: each is read for the last time before it changes.
        """
        first = next(
            k for k, (name, _) in enumerate(self.layers) if any(_join(name, key) in places for key in ("weight", "bias"))
        )
        for k in range(len(self.layers) - 1, first - 1, -1):
            (name, layer), (x, y) = self.layers[k], tape[k]
            if isinstance(layer, nn.Linear):
                above = g
                if k > first:
                    weight = _own(tensors, name, "weight", layer.weight, len(x))
                    assert weight is not None
                    g = torch.bmm(above, weight)
                if (place := places.get(_join(name, "weight"))) is not None:
                    torch.baddbmm(place, above.mT, x, beta=keep, alpha=scale, out=place)
                if (place := places.get(_join(name, "bias"))) is not None:
                    accumulate(place, above.sum(1), keep, scale)
            elif isinstance(layer, nn.ReLU):
                g = torch.ops.aten.threshold_backward(g, y, 0.0)
            else:
                (g,) = torch.autograd.grad(y, x, g)


def accumulate(place: Tensor, grad: Tensor, keep: float, scale: float) -> None:
    """place <- keep place + scale grad; with keep = 0, whatever was there (NaN too) is gone."""
    if keep == 0.0:
        torch.mul(grad, scale, out=place)
    else:
        (place if keep == 1.0 else place.mul_(keep)).add_(grad, alpha=scale)


def _parts(layer: nn.Linear) -> tuple[tuple[str, Tensor], tuple[str, Tensor | None]]:
    return ("weight", layer.weight), ("bias", layer.bias)


def _own(tensors: Mapping[str, Tensor], name: str, key: str, frozen: Tensor | None, count: int) -> Tensor | None:
    """The clients' own tensors [C, ...], or the layer's for all of them."""
    return None if frozen is None else tensors.get(_join(name, key), frozen.detach()).expand(count, *frozen.shape)


def _join(name: str, key: str) -> str:
    """The name of a layer's tensor; a module that is one linear layer has no name."""
    return f"{name}.{key}" if name else key
