"""A torch module as vectors, evaluated for C clients at once.

Any module becomes four vectors that are never mixed: the trainable **body** `theta` [d], the
**head** [h] (by default the last linear layer), the floating-point **buffers** [b] (running
statistics of batch norm), and what is frozen. Clients are a leading axis: `theta` of shape [C, d]
and inputs of shape [C, B, ...] give outputs of shape [C, B, out].

Sequences of linear layers and element-wise activations know the client axis (client_axis.py: one
batched product for all clients). Any other module is evaluated client by client, on its true batch
without padding, and with its own randomness seeded per client.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from fedhb.clients.scaling import Scaling
from fedhb.errors import InputError
from fedhb.network.client_axis import Stack
from fedhb.network.columns import Columns
from fedhb.network.gradients import Bound


@dataclass(frozen=True)
class Slot:
    """The place of one tensor of the module in its vector."""

    name: str
    shape: torch.Size
    start: int
    stop: int

    def of(self, vector: Tensor) -> Tensor:
        """Return the tensor(s) in `vector` [..., size]: a view [..., *shape]."""
        return vector[..., self.start : self.stop].view(vector.shape[:-1] + self.shape)


@dataclass
class Weights:
    """The weights of C clients: `theta` [C, d], `head` [C, h], `buffers` [C, b]."""

    theta: Tensor
    head: Tensor
    buffers: Tensor


class Network:
    """A module as body, head and buffers.

    Args:
        module: any torch module that maps a batch of inputs to a batch of outputs. Parameters with
            `requires_grad=False` stay as they are and are part of no vector. The module itself is
            never changed.
        head: the name of the head's submodule; default: the last linear layer; "" for none.
        batch_norm: "running" keeps running statistics as buffers; "batch" normalises with the
            batch, also in test.
        scaling: applied to inputs, which come as they are stored.

    Attributes:
        normalises_by_batch: whether a prediction depends on the rest of its batch.
        stack: the layers of a module that knows the client axis, None for any other.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        head: str | None = None,
        batch_norm: str = "running",
        scaling: Scaling | None = None,
    ):
        self.module = copy.deepcopy(module)
        self.scaling = scaling or Scaling()
        self.batch_norm = batch_norm
        norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm)]
        _set_batch_norm(norms, batch_norm)
        self.has_batch_norm = bool(norms)
        # a module may bring layers along that normalise by the batch
        self.normalises_by_batch = any(norm.running_mean is None for norm in norms)
        self.head_name = _find_head(self.module, head)
        self.body_slots, self.head_slots = self._trained_slots()
        buffers = dict(self.module.named_buffers())
        self.buffer_slots = _slots([(n, b) for n, b in buffers.items() if b.is_floating_point()])
        self._counters = tuple(n for n, b in buffers.items() if not b.is_floating_point())
        tensors = dict(self.module.named_parameters()) | buffers
        self.dtype = next(p.dtype for p in self.module.parameters() if p.requires_grad)
        self.theta = _flatten(tensors, self.body_slots, self.dtype)
        self.head = _flatten(tensors, self.head_slots, self.dtype)
        self.buffers = _flatten(tensors, self.buffer_slots, self.dtype)
        # to look for shared tensors at every step would cost more than small layers do
        self._ties = any(
            len(list(named(remove_duplicate=False))) > len(list(named()))
            for named in (self.module.named_parameters, self.module.named_buffers)
        )
        self.stack = Stack.of(self.module)
        self._convolves = any(isinstance(m, nn.Conv2d) for m in self.module.modules())
        self._takes_channels_last: bool | None = None  # not known before the first images
        self._gates: dict[int, Network] = {}

    def _trained_slots(self) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
        """Return the slots of the trained tensors of body and head."""
        trained = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        if not trained:
            raise InputError(
                "the module has no trainable parameters: set requires_grad=True on those to train"
            )
        inside = self.head_name + "."
        head = [(n, p) for n, p in trained if self.head_name and n.startswith(inside)]
        body = [(n, p) for n, p in trained if not (self.head_name and n.startswith(inside))]
        if not body:
            raise InputError(
                f"nothing is left to train beside the head {self.head_name!r}: name another head, "
                "or head='' for none"
            )
        return _slots(body), _slots(head)

    @property
    def num_params(self) -> int:
        """Return d, the number of trained parameters of the body."""
        return len(self.theta)

    @property
    def batches_clients(self) -> bool:
        """Return whether the module knows the client axis; if not, clients come one by one."""
        return self.stack is not None

    @property
    def device(self) -> torch.device:
        """Return where the vectors live."""
        return self.theta.device

    def to(self, device: torch.device | str) -> Network:
        """Move everything to a device."""
        self.module.to(device)
        for name in ("theta", "head", "buffers"):
            setattr(self, name, getattr(self, name).to(device))
        self.scaling = Scaling(self.scaling.mean.to(device), self.scaling.std.to(device))
        return self

    # A network in a file ----------------------------------------------------------------------

    def constants(self) -> dict[str, Tensor]:
        """Return what a saved run needs beside the code: initial vectors and frozen tensors."""
        in_vectors = {s.name for s in (*self.body_slots, *self.head_slots, *self.buffer_slots)}
        frozen = {
            f"frozen.{name}": tensor.detach().clone()
            for name, tensor in self.module.state_dict().items()
            if name not in in_vectors
        }
        return {"theta": self.theta, "head": self.head, "buffers": self.buffers, **frozen}

    def restore(self, constants: dict[str, Tensor]) -> None:
        """Take back what `constants` gave."""
        current = self.constants()
        for name, tensor in current.items():
            if name not in constants:
                raise InputError(
                    f"the run has no {name}: give the module that was trained, or restore the "
                    "files of the run"
                )
            if constants[name].shape != tensor.shape:
                raise InputError(
                    f"the run's {name} has {constants[name].numel()} numbers, this module's "
                    f"{tensor.numel()}: give the module that was trained (same architecture and "
                    "head)"
                )
        for name in ("theta", "head", "buffers"):
            setattr(self, name, constants[name].to(self.dtype))
        frozen = {
            name.removeprefix("frozen."): constants[name]
            for name in current
            if name.startswith("frozen.")
        }
        self.module.load_state_dict(frozen, strict=False)

    # Parts of the network ---------------------------------------------------------------------

    @cached_property
    def columns(self) -> Columns:
        """Return the columns of the body's weight matrices."""
        modules = dict(self.module.named_modules())
        return Columns.of_tensors(
            (slot.start, slot.shape, modules[slot.name.rpartition(".")[0]])
            for slot in self.body_slots
        )

    def gate(self, num_outputs: int) -> Network:
        """Return the gate g(x; beta): the body under a fixed random linear head of `num_outputs`.

        Its head depends on this network's initial head alone, so every client and every restart
        has the same one.
        """
        if num_outputs not in self._gates:
            head = self.module.get_submodule(self.head_name) if self.head_name else None
            if not isinstance(head, nn.Linear):
                raise InputError(
                    f"a gate needs a linear head, and the head is {self.head_name or 'empty'!r}: "
                    "name one with head=..."
                )
            linear = self._random_linear(head.in_features, num_outputs)
            module = copy.deepcopy(self.module)
            parent, _, leaf = self.head_name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, linear)
            gate = Network(
                module, head=self.head_name, batch_norm=self.batch_norm, scaling=self.scaling
            ).to(self.device)
            gate.theta, gate.buffers, gate.scaling = self.theta, self.buffers, self.scaling
            self._gates[num_outputs] = gate
        return self._gates[num_outputs]

    def _random_linear(self, num_inputs: int, num_outputs: int) -> nn.Linear:
        """Return a linear layer whose random weights depend on the initial head alone."""
        digest = hashlib.blake2b(self.head.cpu().numpy().tobytes(), digest_size=6).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        linear = nn.utils.skip_init(nn.Linear, num_inputs, num_outputs, dtype=self.dtype)
        bound = num_inputs**-0.5  # torch's own initial range for a linear layer
        for parameter in linear.parameters():
            values = torch.empty(parameter.shape, dtype=self.dtype)
            parameter.data = values.uniform_(-bound, bound, generator=generator)
        return linear

    # Evaluation -------------------------------------------------------------------------------

    def prepare(self, x: Tensor) -> Tensor:
        """Return stored inputs [C, B, ...] as the module takes them.

        They are scaled, and images have their channels innermost in memory: convolutions on a
        processor are a quarter faster so. A module that cannot take such images
        (`x.view(len(x), -1)` after a convolution) gets them as usual.
        """
        x = self.scaling(x, self.dtype)
        if x.ndim != 5 or not self._convolves:
            return x
        last = x.movedim(2, -1).contiguous()
        # viewed anew: a single channel would keep the strides of images as usual, by which torch
        # chooses
        channels_last = last.flatten(2).unflatten(2, last.shape[2:]).movedim(-1, 2)
        if self._takes_channels_last is None:
            self._takes_channels_last = self._can_evaluate(channels_last[0, :2])
        return channels_last if self._takes_channels_last else x.contiguous()

    @torch.no_grad()
    def _can_evaluate(self, x: Tensor) -> bool:
        """Return whether the module can be evaluated on these inputs."""
        training = self.module.training
        try:
            with torch.random.fork_rng(devices=[]):
                self.module.eval()(x.clone(memory_format=torch.preserve_format))
        except RuntimeError:
            return False
        finally:
            self.module.train(training)
        return True

    @torch.no_grad()
    def outputs(self, weights: Weights, x: Tensor) -> Tensor:
        """Return outputs [C, B, out] in evaluation mode for stored inputs x [C, B, ...]."""
        count = len(x)
        expanded = count > 1 and x.stride(0) == 0  # one batch for all clients: prepare it once
        x = self.prepare(x[:1] if expanded else x).expand(count, *x.shape[1:])
        self.module.eval()
        if self.stack is not None:
            layers = self.stack.bind(self.views(weights.theta, weights.head), count, {})
            return Stack.outputs(layers, x)
        return torch.stack([self.evaluate(self.tensors(weights, c), x[c]) for c in range(count)])

    def bind(
        self, weights: Weights, gradient: Tensor | None, head_gradient: Tensor | None
    ) -> Bound:
        """Return these weights with the places of their gradients [C, d] and [C, h] (or None)."""
        return Bound(self, weights, gradient, head_gradient)

    def views(self, theta: Tensor, head: Tensor) -> dict[str, Tensor]:
        """Return the trained tensors in theta [..., d] and head [..., h], by name."""
        body = {slot.name: slot.of(theta.detach()) for slot in self.body_slots}
        return body | {slot.name: slot.of(head.detach()) for slot in self.head_slots}

    def tensors(self, weights: Weights, c: int) -> dict[str, Tensor]:
        """Return the trained tensors and the buffers of client c, by name: views."""
        buffers = {slot.name: slot.of(weights.buffers[c]) for slot in self.buffer_slots}
        return self.views(weights.theta[c], weights.head[c]) | buffers

    def evaluate(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """Return the module's outputs for inputs x [B, ...] with these tensors as its own.

        Its counters of batches are copies, so that no client's step stays in the module.
        """
        counters = {name: self.module.get_buffer(name).clone() for name in self._counters}
        outputs: Tensor = functional_call(
            self.module, tensors | counters, (x,), tie_weights=self._ties
        )
        return outputs


# Numbers of each tensor -----------------------------------------------------------------------


def tensor_sizes(network: Network, with_head: bool) -> list[int]:
    """Return the number of weights of each tensor of the body, and of the head if asked for."""
    slots = (*network.body_slots, *(network.head_slots if with_head else ()))
    return [slot.stop - slot.start for slot in slots]


def tensor_means(vector: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the mean over the weights of each tensor: [..., d] -> [..., L]."""
    return torch.stack([part.mean(-1) for part in vector.split(list(sizes), -1)], -1)


def per_weight(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return a number for each tensor [L] as one for each weight [d]."""
    return values.repeat_interleave(torch.tensor(sizes, device=values.device))


# The parts of a module ------------------------------------------------------------------------


def _set_batch_norm(norms: Sequence[_BatchNorm], batch_norm: str) -> None:
    """Make these layers normalise as `batch_norm` says."""
    if batch_norm not in ("running", "batch"):
        raise InputError(f"batch_norm={batch_norm!r}: choose 'running' or 'batch'")
    for norm in norms:
        if batch_norm == "batch":
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
        elif norm.track_running_stats and norm.momentum is None:
            raise InputError(
                "batch norm with momentum=None counts batches, which clients do not share: give "
                "it a momentum"
            )


def _find_head(module: nn.Module, head: str | None) -> str:
    """Return the name of the head: the one given, or the last linear layer if a body is left."""
    names = [name for name, _ in module.named_modules() if name]
    if head is not None:
        if head and head not in names:
            raise InputError(f"head={head!r} names no submodule: choose from {', '.join(names)}")
        return head
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if not linear:
        return ""
    # a single linear layer is a body without a head, otherwise nothing would be left to train
    outside = [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not name.startswith(linear[-1] + ".")
    ]
    return linear[-1] if outside else ""


def _slots(tensors: Sequence[tuple[str, Tensor]]) -> tuple[Slot, ...]:
    """Return slots that lie one behind the other."""
    slots, start = [], 0
    for name, tensor in tensors:
        stop = start + tensor.numel()
        slots.append(Slot(name, tensor.shape, start, stop))
        start = stop
    return tuple(slots)


def _flatten(tensors: dict[str, Tensor], slots: Sequence[Slot], dtype: torch.dtype) -> Tensor:
    """Return the tensors of these slots as one vector."""
    parts = [tensors[slot.name].detach().flatten().to(dtype) for slot in slots]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)
