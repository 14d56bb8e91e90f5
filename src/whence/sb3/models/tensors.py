"""A model's tensors and settings: copied, loaded, and restored."""

import copy
from collections.abc import Iterator, Mapping
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
    groups = [(group, dict(group)) for group in policy.optimizer.param_groups]
    states = dict(policy.optimizer.state)
    # Steps change a state in place, so inside they are taken on copies.
    policy.optimizer.state.update({parameter: copy.deepcopy(state) for parameter, state in states.items()})
    for parameter in policy.parameters():
        parameter.grad = None
    model.verbose = 0  # train() would print that it stopped early
    try:
        yield
    finally:
        vars(model).clear()
        vars(model).update(attributes)
        load_tensors(named_tensors(policy), tensors)
        for group, settings in groups:
            group.clear()
            group.update(settings)
        policy.optimizer.state.clear()
        policy.optimizer.state.update(states)
        for module, mode in modes.items():
            module.training = mode
        for parameter, gradient in zip(policy.parameters(), gradients, strict=True):
            parameter.grad = gradient


def load_tensors(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors, in place, into those of the same names."""
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(tensors[name])
