"""A model's tensors and settings: copied out, put back, and left as they are whatever happens meanwhile."""

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
    """Return copies of tensors, by name, apart from the graph."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@contextmanager
def preserve_model(model: Any) -> Iterator[None]:
    """Leave a model as it is, whatever is trained meanwhile, in silence: policy, optimiser, gradients, attributes."""
    policy = model.policy
    attributes = dict(vars(model))
    tensors, training = copy_tensors(named_tensors(policy)), {module: module.training for module in policy.modules()}
    gradients = [parameter.grad for parameter in policy.parameters()]
    restore = _remember_optimizer(policy.optimizer)
    for parameter in policy.parameters():
        parameter.grad = None
    model.verbose = 0  # train() would say that it stopped early
    try:
        yield
    finally:
        vars(model).clear()
        vars(model).update(attributes)
        load_tensors(named_tensors(policy), tensors)
        restore()
        for module, own in training.items():
            module.training = own
        for parameter, gradient in zip(policy.parameters(), gradients, strict=True):
            parameter.grad = gradient


def _remember_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return what makes an optimiser as it is now again, in the same objects, which others may hold."""
    groups = [
        (group, {key: value for key, value in group.items() if key != "params"}) for group in optimizer.param_groups
    ]
    # What steps change in place beside a copy of it.
    state = [
        (p, own, {key: (value, copy.deepcopy(value)) for key, value in own.items()})
        for p, own in optimizer.state.items()
    ]

    def restore() -> None:
        for group, settings in groups:
            for key in group.keys() - settings.keys() - {"params"}:
                del group[key]
            group.update(settings)
        optimizer.state.clear()
        for parameter, own, values in state:
            own.clear()
            for key, (value, before) in values.items():
                own[key] = value.copy_(before) if isinstance(value, Tensor) else before
            optimizer.state[parameter] = own

    return restore


def load_tensors(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into those of their names."""
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(tensors[name])
