"""Make a network and a likelihood that fit together, from what a user names or gives."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedhb.clients.checks import refuse_single
from fedhb.clients.clients import Clients
from fedhb.errors import InputError, reason
from fedhb.likelihood import (
    CALM,
    Categorical,
    GaussianRegression,
    Likelihood,
    PerTarget,
    per_target,
)
from fedhb.network import nets
from fedhb.network.vectors import Network, Weights
from fedhb.user_code import imported, takes

LEAST_DEVIATION = 1e-12
"""The least deviation of real targets: smaller ones look like targets that are all the same."""


def make_model(
    name: str,
    input_shape: Sequence[int],
    num_outputs: int,
    options: Mapping[str, Any],
    seed: int = 0,
) -> nn.Module:
    """Return a network by name (mlp, ...) or by `pkg.mod:factory`.

    The factory is called as factory(input_shape, num_outputs, **options).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if ":" not in name:
            return _built_in(name, input_shape, num_outputs, options)
        factory, arguments = imported("model", name), (tuple(input_shape), num_outputs)
        takes(f"model {name!r}", factory, *arguments, **options)
        model = factory(*arguments, **options)  # its own errors keep their traceback
    if not isinstance(model, nn.Module):
        raise InputError(f"model {name!r} gave a {type(model).__name__}: return a torch module")
    return model


def _built_in(
    name: str, input_shape: Sequence[int], num_outputs: int, options: Mapping[str, Any]
) -> nn.Module:
    """Return a network of `nets`; refuse options that it does not take."""
    try:
        return nets.build(name, input_shape, num_outputs, **options)
    except InputError:
        raise
    except TypeError as error:
        raise InputError(f"model {name!r} does not take these options ({error})") from None
    # numbers without sense, or beyond the memory
    except (ValueError, OverflowError, RuntimeError, MemoryError) as error:
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        raise InputError(
            f"model {name!r} cannot be made with {given or 'its defaults'} ({reason(error)}): "
            "choose other options"
        ) from None


def default_likelihood(clients: Clients, network: Network) -> Likelihood:
    """Return Categorical for labels, and Gaussian for real targets.

    Each target is in the units of its training examples.
    """
    if clients.num_classes is not None:
        return Categorical(clients.num_classes)
    y = clients.train.y[clients.train.rows].double()
    columns = y.reshape(len(y), -1).unbind(1)
    correction = min(1, len(y) - 1)  # the deviation of a single example is 0
    centre = per_target([column.mean().item() for column in columns])
    deviation = per_target([column.std(correction=correction).item() for column in columns])
    return regression(network, clients, len(columns), centre, deviation)


def regression(
    network: Network, clients: Clients, count: int, centre: PerTarget, deviation: PerTarget
) -> GaussianRegression:
    """Return the likelihood of `count` real targets with these moments.

    A network with one output per target has noise of a fixed size.
    """
    deviations = deviation if isinstance(deviation, tuple) else (deviation,)
    for k, value in enumerate(deviations):
        if 0 < value < LEAST_DEVIATION:
            raise InputError(
                f"column {k} of the targets deviates by {value:.3g} from its mean: give it in a "
                "smaller unit"
            )
    scale = per_target([max(d, LEAST_DEVIATION) for d in deviations])
    likelihood = GaussianRegression(count, centre, scale, **CALM)
    if _num_outputs(network, clients) == count:
        return dataclasses.replace(likelihood, noise=likelihood.scale)
    return likelihood


def check_model(network: Network, likelihood: Likelihood, clients: Clients) -> None:
    """Refuse a network with another number of outputs than the likelihood needs.

    Warn of outputs that are probabilities, or that depend on the other examples of a batch.
    """
    outputs = _num_outputs(network, clients)
    if outputs != likelihood.num_outputs:
        why = (
            f"for {clients.num_classes} classes"
            if clients.num_classes
            else "(mean and noise of each target)"
        )
        raise InputError(
            f"the model has {outputs} outputs, but {likelihood.num_outputs} are needed {why}: "
            "change its last layer"
        )
    rows = clients.train.rows
    x = clients.train.x[rows[:: max(1, len(rows) // 8)]]  # of several clients
    several = network.outputs(own_weights(network), x.unsqueeze(0))[0]
    sum_to_one = (several >= 0).all() and (several.sum(-1) - 1.0).abs().max() < 1e-4
    if isinstance(likelihood, Categorical) and sum_to_one:
        warnings.warn(
            "the model gives probabilities, and logits are wanted: leave out its softmax",
            stacklevel=3,
        )
    if len(x) > 1 and not network.normalises_by_batch:
        alone = network.outputs(own_weights(network), x[-1:].unsqueeze(0))[0, 0]
        if not torch.allclose(alone, several[-1], rtol=1e-3, atol=1e-4):
            warnings.warn(
                "the model's output for an example depends on the others of its batch: does a "
                "recurrent layer or an attention lack batch_first=True?",
                stacklevel=3,
            )


def check_head(network: Network, clients: Clients) -> None:
    """Refuse to guess the head where the linear layer registered last does not run last."""
    modules = network.module.named_modules()
    names = {module: name for name, module in modules if isinstance(module, nn.Linear)}
    order: list[str] = []
    hooks = [
        module.register_forward_hook(lambda module, *_: order.append(names[module]))
        for module in names
    ]
    try:
        with torch.no_grad():
            network.module.eval()
            network.module(network.prepare(clients.train.x[:2].unsqueeze(0))[0])
    finally:
        for hook in hooks:
            hook.remove()
    if order and network.head_name and order[-1] != network.head_name:
        raise InputError(
            f"the last linear layer of the model is {network.head_name!r}, but {order[-1]!r} runs "
            f"last: say which is the head, head={order[-1]!r} (or '' for none)"
        )


def check_single(network: Network, clients: Clients, split: str | None) -> None:
    """Refuse clients with a single example where batch norm needs two.

    It needs them to train, and to evaluate by the batch's statistics.
    """
    if not network.has_batch_norm:
        return
    refuse_single(clients)
    share = getattr(clients, split) if split else None
    alone = clients.ids[share.sizes == 1].tolist() if share is not None else []
    if not alone or not network.normalises_by_batch:
        return
    try:  # maps of more than one pixel have enough to normalise by
        network.outputs(own_weights(network), clients.train.x[:1].unsqueeze(0))
    except ValueError:
        raise InputError(
            f"client {alone[0]} has a single {split} example, and this network normalises by the "
            "batch: leave it out, or use batch_norm=running"
        ) from None


def own_weights(network: Network) -> Weights:
    """Return the network as it was made, for one client."""
    vectors = (network.theta, network.head, network.buffers)
    return Weights(*(vector.unsqueeze(0) for vector in vectors))


def _num_outputs(network: Network, clients: Clients) -> int:
    """Return the number of outputs of the network for these clients' inputs."""
    x = clients.train.x[:2]
    try:
        outputs: Tensor = network.outputs(own_weights(network), x.unsqueeze(0))
    except Exception as error:  # the user's own code: anything may go wrong in it
        raise InputError(
            f"the model does not work on inputs of shape {tuple(x.shape[1:])}: {reason(error)}. It "
            "must take a batch of them and return one tensor [batch, outputs]"
        ) from None
    if outputs.ndim != 3:
        raise InputError(
            f"the model gives outputs of shape {tuple(outputs.shape[1:])} for 2 inputs: give "
            "[batch, outputs]"
        )
    return outputs.shape[-1]
