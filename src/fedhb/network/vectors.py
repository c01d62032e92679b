"""A torch module as vectors, evaluated for C clients at once.

Any module becomes four vectors that are never mixed: the trainable **body** `theta` [d], the **head** [h] (by default the last
linear layer), the floating-point **buffers** [b] (running statistics of batch norm), and what is frozen. Clients are a leading
axis: `theta` of shape [C, d] and inputs of shape [C, B, ...] give outputs of shape [C, B, out].

Sequences of linear layers and element-wise activations know the client axis (one batched product for all clients). Any other
module is evaluated client by client, on its true batch without padding, and with its own randomness seeded per client.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fedhb.clients.scaling import Scaling
from fedhb.errors import InputError
from fedhb.network.client_axis import Stack, Tape, accumulate
from fedhb.network.columns import Columns


@dataclass(frozen=True)
class Slot:
    """Where one tensor of the module lies in its vector."""

    name: str
    shape: torch.Size
    start: int
    stop: int

    def of(self, vector: Tensor) -> Tensor:
        """The tensor(s) in `vector` [..., size]: a view [..., *shape]."""
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
        module: any torch module that maps a batch of inputs to a batch of outputs. Parameters with `requires_grad=False`
            stay as they are and are part of no vector. The module itself is never changed.
        head: the name of the head's submodule; default: the last linear layer; "" for none.
        batch_norm: "running" keeps running statistics as buffers; "batch" normalises with the batch, also in test.
        scaling: applied to inputs, which come as they are stored.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        head: str | None = None,
        batch_norm: str = "running",
        scaling: Scaling | None = None,
    ):
        if batch_norm not in ("running", "batch"):
            raise InputError(f"batch_norm={batch_norm!r}: choose 'running' or 'batch'")
        self.module = copy.deepcopy(module)
        self.scaling = scaling or Scaling()
        self.batch_norm = batch_norm
        norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm)]
        self.has_batch_norm = bool(norms)
        if batch_norm == "running" and any(
            n.track_running_stats and n.momentum is None for n in norms
        ):
            raise InputError(
                "batch norm with momentum=None counts batches, which clients do not share: give it a momentum"
            )
        if batch_norm == "batch":
            for norm in norms:
                norm.track_running_stats = False
                norm.running_mean = norm.running_var = norm.num_batches_tracked = None
        # whether a prediction depends on the rest of its batch; a module may bring such layers along itself
        self.normalises_by_batch = any(norm.running_mean is None for norm in norms)
        self.head_name = self._find_head(head)
        inside_head = (self.head_name + ".",) if self.head_name else ()
        trained = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        if not trained:
            raise InputError(
                "the module has no trainable parameters: set requires_grad=True on those to train"
            )
        self.body_slots = _slots(
            [(n, p) for n, p in trained if not n.startswith(inside_head)]
            if inside_head
            else trained
        )
        self.head_slots = _slots(
            [(n, p) for n, p in trained if inside_head and n.startswith(inside_head)]
        )
        self.buffer_slots = _slots(
            [(n, b) for n, b in self.module.named_buffers() if b.is_floating_point()]
        )
        if not self.body_slots:
            raise InputError(
                f"nothing is left to train beside the head {self.head_name!r}: name another head, or head='' for none"
            )
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        self.dtype = trained[0][1].dtype
        self.theta = _flatten(tensors, self.body_slots, self.dtype)
        self.head = _flatten(tensors, self.head_slots, self.dtype)
        self.buffers = _flatten(tensors, self.buffer_slots, self.dtype)
        self._counters = tuple(
            n for n, b in self.module.named_buffers() if not b.is_floating_point()
        )
        self._ties = (
            any(  # looking for shared tensors at every step would cost more than small layers do
                len(list(named(remove_duplicate=False))) > len(list(named()))
                for named in (self.module.named_parameters, self.module.named_buffers)
            )
        )
        self._stack = Stack.of(self.module)
        self._convolves = any(isinstance(m, nn.Conv2d) for m in self.module.modules())
        self._innermost: bool | None = None  # not known before the first images
        self._gates: dict[int, Network] = {}

    def _find_head(self, head: str | None) -> str:
        linear = [n for n, m in self.module.named_modules() if isinstance(m, nn.Linear)]
        if head is None:
            # a single linear layer is a body without a head, otherwise nothing would be left to train
            return (
                linear[-1]
                if linear
                and any(
                    p.requires_grad
                    for n, p in self.module.named_parameters()
                    if not n.startswith(linear[-1] + ".")
                )
                else ""
            )
        if head and head not in dict(self.module.named_modules()):
            raise InputError(
                f"head={head!r} names no submodule: choose from {', '.join(n for n, _ in self.module.named_modules() if n)}"
            )
        return head

    @property
    def num_params(self) -> int:
        """d, the number of trained parameters of the body."""
        return len(self.theta)

    @property
    def batches_clients(self) -> bool:
        """Whether the module knows the client axis (otherwise clients are evaluated one after another)."""
        return self._stack is not None

    @property
    def device(self) -> torch.device:
        """Where the vectors live."""
        return self.theta.device

    def to(self, device: torch.device | str) -> Network:
        """Move everything to a device."""
        self.module.to(device)
        self.theta, self.head, self.buffers = (
            self.theta.to(device),
            self.head.to(device),
            self.buffers.to(device),
        )
        self.scaling = Scaling(self.scaling.mean.to(device), self.scaling.std.to(device))
        return self

    def constants(self) -> dict[str, Tensor]:
        """What a saved run needs besides the module's code: initial vectors and frozen tensors."""
        kept = {s.name for s in (*self.body_slots, *self.head_slots, *self.buffer_slots)}
        frozen = {
            f"frozen.{n}": t.detach().clone()
            for n, t in self.module.state_dict().items()
            if n not in kept
        }
        return {"theta": self.theta, "head": self.head, "buffers": self.buffers, **frozen}

    def restore(self, constants: dict[str, Tensor]) -> None:
        """Take back what `constants` gave."""
        own = self.constants()
        for name in own:
            if name not in constants:
                raise InputError(
                    f"the run has no {name}: give the module that was trained, or restore the files of the run"
                )
            if constants[name].shape != own[name].shape:
                raise InputError(
                    f"the run's {name} has {constants[name].numel()} numbers, this module's {own[name].numel()}: "
                    "give the module that was trained (same architecture and head)"
                )
        for name in ("theta", "head", "buffers"):
            setattr(self, name, constants[name].to(self.dtype))
        frozen = {
            name.removeprefix("frozen."): constants[name]
            for name in own
            if name.startswith("frozen.")
        }
        self.module.load_state_dict(frozen, strict=False)

    @cached_property
    def columns(self) -> Columns:
        """The columns of the body's weight matrices."""
        kinds = dict(self.module.named_modules())
        grids = []
        for slot in self.body_slots:
            owner = kinds[slot.name.rpartition(".")[0]]
            if len(slot.shape) < 2 or isinstance(owner, (nn.LayerNorm, nn.RMSNorm)):
                continue
            weight = torch.empty(slot.shape, device="meta")
            if isinstance(owner, _ConvNd) and not isinstance(owner, _ConvTransposeNd):
                # [out, in / groups, ...]: an input channel feeds the outputs of its own group
                columns = [
                    column for group in weight.chunk(owner.groups) for column in group.unbind(1)
                ]
            else:
                inputs_first = isinstance(owner, (_ConvTransposeNd, nn.Embedding, nn.EmbeddingBag))
                columns = list(weight.unbind(0 if inputs_first else 1))
            grids += [
                (slot.start + int(c.storage_offset()), tuple(c.shape), c.stride()) for c in columns
            ]
        return Columns(grids)

    def gate(self, num_outputs: int) -> Network:
        """The gate g(x; beta): a second copy of the body under a fixed random linear head of `num_outputs` units.

        Its head depends on this network's initial head alone, so every client and every restart has the same one.
        """
        if num_outputs not in self._gates:
            head = self.module.get_submodule(self.head_name) if self.head_name else None
            if not isinstance(head, nn.Linear):
                raise InputError(
                    f"a gate needs a linear head, and the head is {self.head_name or 'empty'!r}: name one with head=..."
                )
            seed = int.from_bytes(
                hashlib.blake2b(self.head.cpu().numpy().tobytes(), digest_size=6).digest(), "big"
            )
            generator = torch.Generator().manual_seed(seed)
            linear = nn.utils.skip_init(nn.Linear, head.in_features, num_outputs, dtype=self.dtype)
            bound = head.in_features**-0.5  # torch's own initial range for a linear layer
            for parameter in linear.parameters():
                parameter.data = torch.empty(parameter.shape, dtype=self.dtype).uniform_(
                    -bound, bound, generator=generator
                )
            module = copy.deepcopy(self.module)
            parent, _, leaf = self.head_name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, linear)
            gate = Network(
                module, head=self.head_name, batch_norm=self.batch_norm, scaling=self.scaling
            ).to(self.device)
            gate.theta, gate.buffers, gate.scaling = self.theta, self.buffers, self.scaling
            self._gates[num_outputs] = gate
        return self._gates[num_outputs]

    def prepare(self, x: Tensor) -> Tensor:
        """Inputs [C, B, ...], as they are stored, for the module: scaled, and images with their channels innermost in memory.

        Convolutions on a processor are a quarter faster so. A module that cannot take it (`x.view(len(x), -1)` after a
        convolution) gets its images as usual.
        """
        x = self.scaling(x, self.dtype)
        if x.ndim != 5 or not self._convolves:
            return x
        last = x.movedim(2, -1).contiguous()
        # viewed anew: a single channel would keep the strides of images as usual, by which torch chooses
        innermost = last.flatten(2).unflatten(2, last.shape[2:]).movedim(-1, 2)
        if self._innermost is None:
            self._innermost = self._takes(innermost[0, :2])
        return innermost if self._innermost else x.contiguous()

    @torch.no_grad()
    def _takes(self, x: Tensor) -> bool:
        """Whether the module can be evaluated on these inputs."""
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
        """Outputs [C, B, out] in evaluation mode for inputs x [C, B, ...], as they are stored."""
        count = len(x)
        shared = (
            count > 1 and x.stride(0) == 0
        )  # one batch expanded over the clients: prepare it once
        x = self.prepare(x[:1] if shared else x).expand(count, *x.shape[1:])
        self.module.eval()
        if self._stack is not None:
            return self._stack.outputs(
                self._stack.bind(self._views(weights.theta, weights.head), count, {}), x
            )
        return torch.stack([self._evaluate(self._tensors(weights, c), x[c]) for c in range(count)])

    def bind(
        self, weights: Weights, gradient: Tensor | None, head_gradient: Tensor | None
    ) -> Bound:
        """These weights of C clients with the places of their gradients, [C, d] and [C, h] (None where it is not wanted)."""
        return Bound(self, weights, gradient, head_gradient)

    def _views(self, theta: Tensor, head: Tensor) -> dict[str, Tensor]:
        body = {s.name: s.of(theta.detach()) for s in self.body_slots}
        return body | {s.name: s.of(head.detach()) for s in self.head_slots}

    def _tensors(self, weights: Weights, c: int) -> dict[str, Tensor]:
        return self._views(weights.theta[c], weights.head[c]) | {
            s.name: s.of(weights.buffers[c]) for s in self.buffer_slots
        }

    def _evaluate(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """The module's outputs with these tensors as its own. Its counters of batches are copies: no client's step stays."""
        counters = {name: self.module.get_buffer(name).clone() for name in self._counters}
        outputs: Tensor = functional_call(
            self.module, tensors | counters, (x,), tie_weights=self._ties
        )
        return outputs


class Bound:
    """Weights of C clients, and where their gradients go, as the tensors of a module: views that are made once for many steps."""

    def __init__(
        self,
        network: Network,
        weights: Weights,
        gradient: Tensor | None,
        head_gradient: Tensor | None,
    ):
        self.network, self.weights = network, weights
        both = ((gradient, network.body_slots), (head_gradient, network.head_slots))
        self.vectors = [vector for vector, _ in both if vector is not None]
        self.places = {
            s.name: s.of(vector) for vector, slots in both if vector is not None for s in slots
        }
        stack, views = network._stack, network._views(weights.theta, weights.head)
        self._layers = None if stack is None else stack.bind(views, len(weights.theta), self.places)
        self._clients: dict[int, tuple[dict[str, Tensor], list[Tensor], list[Tensor]]] = {}

    def _client(self, c: int) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
        """The tensors of client c, those of them that are trained, and the places of their gradients."""
        if c not in self._clients:
            tensors = self.network._tensors(self.weights, c)
            leaves = [tensors[name].requires_grad_() for name in self.places]
            self._clients[c] = tensors, leaves, [place[c] for place in self.places.values()]
        return self._clients[c]

    def differentiate(
        self,
        x: Tensor,
        slope: Callable[[Tensor, int | None], Tensor],
        *,
        counts: Sequence[int],
        seeds: Sequence[int],
        keep: float = 0.0,
        scale: float = 1.0,
        training: bool = True,
    ) -> None:
        """place <- keep place + scale gradient of each client's loss with respect to its own weights.

        With the momentum as `keep` a velocity takes up the gradient without another pass over it, and with keep = 1 and
        scale = -lr the weights themselves do. keep = 0 writes anew. The buffers are updated in place.

        Args:
            x: inputs [C, B, ...], prepared.
            slope: `slope(outputs, client)`: the derivative of the clients' losses in their outputs [C, B, out] (client None),
                or of the loss of one client in its outputs [1, counts[client], out].
            counts: the true number of examples of each client in the batch; the rest is padding.
            seeds: a seed per client for randomness inside the module.
            keep: what becomes of the places before.
            scale: multiplies the gradient.
            training: whether the module is in training mode.
        """
        network = self.network
        if network.module.training != training:
            network.module.train(training)
        if self._layers is not None:
            tape = Tape()
            outputs = Stack.outputs(self._layers, x, tape)
            Stack.backward(self._layers, tape, slope(outputs, None), keep, scale)
            return
        # torch.manual_seed would format the stack for each kind of device that may be initialised later
        reseed = (
            torch.default_generator.manual_seed
            if network.device.type == "cpu"
            else torch.manual_seed
        )
        for c, (count, seed) in enumerate(zip(counts, seeds, strict=True)):
            tensors, leaves, places = self._client(c)
            with torch.random.fork_rng(devices=[]):
                reseed(seed)
                outputs = network._evaluate(tensors, x[c, :count]).unsqueeze(0)
            how = {
                "allow_unused": True,
                "materialize_grads": True,
            }  # a module may have weights that its outputs do not need
            grads = torch.autograd.grad(outputs, leaves, slope(outputs.detach(), c), **how)
            if keep not in (0.0, 1.0):  # once for all places, which are the parts of these vectors
                for vector in self.vectors:
                    vector[c].mul_(keep)
            for place, grad in zip(places, grads, strict=True):
                accumulate(place, grad, 1.0 if keep else 0.0, scale)


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


def _slots(tensors: Sequence[tuple[str, Tensor]]) -> tuple[Slot, ...]:
    slots, start = [], 0
    for name, tensor in tensors:
        stop = start + tensor.numel()
        slots.append(Slot(name, tensor.shape, start, stop))
        start = stop
    return tuple(slots)


def _flatten(tensors: dict[str, Tensor], slots: Sequence[Slot], dtype: torch.dtype) -> Tensor:
    parts = [tensors[s.name].detach().flatten().to(dtype) for s in slots]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype)
