"""From what a user names or gives to a network and a likelihood that fit together."""

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
"""Of real targets: smaller ones cannot be told from targets that are all the same."""


def make_model(
    name: str,
    input_shape: Sequence[int],
    num_outputs: int,
    options: Mapping[str, Any],
    seed: int = 0,
) -> nn.Module:
    """A network by name (mlp, ...) or by `pkg.mod:factory`, which is called as factory(input_shape, num_outputs, **options)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if ":" not in name:
            return _made(name, input_shape, num_outputs, options)
        factory, given = imported("model", name), (tuple(input_shape), num_outputs)
        takes(f"model {name!r}", factory, *given, **options)
        model = factory(*given, **options)  # what is wrong in it is told as it is, with the place
    if not isinstance(model, nn.Module):
        raise InputError(f"model {name!r} gave a {type(model).__name__}: return a torch module")
    return model


def _made(
    name: str, input_shape: Sequence[int], num_outputs: int, options: Mapping[str, Any]
) -> nn.Module:
    try:
        return nets.build(name, input_shape, num_outputs, **options)
    except InputError:
        raise
    except TypeError as error:
        raise InputError(f"model {name!r} does not take these options ({error})") from None
    except (
        ValueError,
        OverflowError,
        RuntimeError,
        MemoryError,
    ) as error:  # numbers beyond sense, or beyond the memory
        given = ", ".join(f"{key}={value}" for key, value in options.items())
        raise InputError(
            f"model {name!r} cannot be made with {given or 'its defaults'} ({reason(error)}): choose other options"
        ) from None


def default_likelihood(clients: Clients, network: Network) -> Likelihood:
    """Categorical for labels; Gaussian for real targets, each in the units of its training examples."""
    if clients.num_classes is not None:
        return Categorical(clients.num_classes)
    y = clients.train.y[clients.train.rows].double()
    columns = y.reshape(len(y), -1).unbind(1)
    deviation = [
        column.std(correction=min(1, len(y) - 1)).item() for column in columns
    ]  # 0 of a single example
    return regression(
        network,
        clients,
        len(columns),
        per_target([c.mean().item() for c in columns]),
        per_target(deviation),
    )


def regression(
    network: Network, clients: Clients, count: int, centre: PerTarget, deviation: PerTarget
) -> GaussianRegression:
    """The likelihood of `count` real targets with these moments; one output per target means noise of a fixed size."""
    deviations = deviation if isinstance(deviation, tuple) else (deviation,)
    for k, value in enumerate(deviations):
        if 0 < value < LEAST_DEVIATION:
            raise InputError(
                f"column {k} of the targets deviates by {value:.3g} from its mean: give it in a smaller unit"
            )
    likelihood = GaussianRegression(
        count, centre, per_target([max(d, LEAST_DEVIATION) for d in deviations]), **CALM
    )
    return (
        dataclasses.replace(likelihood, noise=likelihood.scale)
        if _num_outputs(network, clients) == count
        else likelihood
    )


def check_model(network: Network, likelihood: Likelihood, clients: Clients) -> None:
    """Refuse a network whose outputs are not what the likelihood needs; warn of what it may not be meant to do."""
    outputs = _num_outputs(network, clients)
    if outputs != likelihood.num_outputs:
        why = (
            f"for {clients.num_classes} classes"
            if clients.num_classes
            else "(mean and noise of each target)"
        )
        raise InputError(
            f"the model has {outputs} outputs, but {likelihood.num_outputs} are needed {why}: change its last layer"
        )
    x = clients.train.x[
        clients.train.rows[:: max(1, len(clients.train.rows) // 8)]
    ]  # of several clients
    found = network.outputs(own_weights(network), x.unsqueeze(0))[0]
    if (
        isinstance(likelihood, Categorical)
        and (found >= 0).all()
        and (found.sum(-1) - 1.0).abs().max() < 1e-4
    ):
        warnings.warn(
            "the model gives probabilities, and logits are wanted: leave out its softmax",
            stacklevel=3,
        )
    if len(x) > 1 and not network.normalises_by_batch:
        alone = network.outputs(own_weights(network), x[-1:].unsqueeze(0))[0, 0]
        if not torch.allclose(alone, found[-1], rtol=1e-3, atol=1e-4):
            warnings.warn(
                "the model's output for an example depends on the others of its batch: does a recurrent layer or an attention "
                "lack batch_first=True?",
                stacklevel=3,
            )


def check_head(network: Network, clients: Clients) -> None:
    """Refuse to guess the head where the linear layer that is registered last is not the one that runs last."""
    names, order = (
        {
            module: name
            for name, module in network.module.named_modules()
            if isinstance(module, nn.Linear)
        },
        [],
    )
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
            f"the last linear layer of the model is {network.head_name!r}, but {order[-1]!r} runs last: say which is the head, "
            f"head={order[-1]!r} (or '' for none)"
        )


def check_single(network: Network, clients: Clients, split: str | None) -> None:
    """Refuse clients with a single example where batch norm needs two: to train on, or to evaluate by the batch's statistics."""
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
            f"client {alone[0]} has a single {split} example, and this network normalises by the batch: leave it out, or "
            "use batch_norm=running"
        ) from None


def own_weights(network: Network) -> Weights:
    """The network as it was made, for one client."""
    return Weights(
        *(vector.unsqueeze(0) for vector in (network.theta, network.head, network.buffers))
    )


def _num_outputs(network: Network, clients: Clients) -> int:
    x = clients.train.x[:2]
    try:
        outputs: Tensor = network.outputs(own_weights(network), x.unsqueeze(0))
    except Exception as error:  # the user's own code: anything may go wrong in it
        raise InputError(
            f"the model does not work on inputs of shape {tuple(x.shape[1:])}: {reason(error)}. It must take a batch of them "
            "and return one tensor [batch, outputs]"
        ) from None
    if outputs.ndim != 3:
        raise InputError(
            f"the model gives outputs of shape {tuple(outputs.shape[1:])} for 2 inputs: give [batch, outputs]"
        )
    return outputs.shape[-1]
