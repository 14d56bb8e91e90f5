"""A model's tensors and settings: copied, loaded, and restored."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def named_tensors(policy: Any) -> dict[str, Tensor]:
    """Return a policy's parameters and buffers, each once.

    A shared features extractor stands under three names in `state_dict()`, which safetensors refuses.
    """
    return {**dict(policy.named_parameters()), **dict(policy.named_buffers())}


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return detached copies of tensors, by name."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@contextmanager
def preserve_model(model: Any) -> Iterator[None]:
    """Restore a model on exit: policy, optimiser, gradients, attributes. It prints nothing meanwhile."""
    policy = model.policy
    attributes = dict(vars(model))
    tensors, modes = copy_tensors(named_tensors(policy)), {module: module.training for module in policy.modules()}
    gradients = [parameter.grad for parameter in policy.parameters()]
    restore_optimizer = remember_optimizer(policy.optimizer)
    for parameter in policy.parameters():
        parameter.grad = None
    model.verbose = 0  # train() would print that it stopped early
    try:
        yield
    finally:
        vars(model).clear()
        vars(model).update(attributes)
        load_tensors(named_tensors(policy), tensors)
        restore_optimizer()
        for module, mode in modes.items():
            module.training = mode
        for parameter, gradient in zip(policy.parameters(), gradients, strict=True):
            parameter.grad = gradient


def remember_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that restores an optimiser's present state, in the same objects, which others may hold."""
    groups = [
        (group, {key: value for key, value in group.items() if key != "params"}) for group in optimizer.param_groups
    ]
    # Each value with a copy, since steps change it in place.
    states = [
        (parameter, state, {key: (value, copy.deepcopy(value)) for key, value in state.items()})
        for parameter, state in optimizer.state.items()
    ]

    def restore() -> None:
        for group, settings in groups:
            for key in group.keys() - settings.keys() - {"params"}:
                del group[key]
            group.update(settings)
        optimizer.state.clear()
        for parameter, state, values in states:
            state.clear()
            for key, (value, before) in values.items():
                state[key] = value.copy_(before) if isinstance(value, Tensor) else before
            optimizer.state[parameter] = state

    return restore


def load_tensors(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors, in place, into those of the same names."""
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(tensors[name])
