"""Gradients of single records by plain autograd, which the tests of scores compare with."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import whence
from helpers.toys import OnRolloutEnd
from whence import RecordBatch
from whence.core import PolicyView
from whence.sb3 import snapshot


def two_records() -> RecordBatch:
    # theta = 0: both actions have probability 1/2, grad log pi(a|s) = (e_a - 1/2) s.
    # Record 0: s = 1, a = 0, A = 2:    grad log pi = (1/2, -1/2)
    # Record 1: s = 2, a = 1, A = 1/2:  grad log pi = (-1, 1)
    return RecordBatch(
        observations=torch.tensor([1.0, 2.0]),
        actions=torch.tensor([0, 1]),
        log_probs=torch.full((2,), 0.5).log(),
        advantages=torch.tensor([2.0, 0.5]),
    )


EXACT = 1e-5


def differentiate(value: Tensor, params: Iterable[Tensor]) -> Tensor:
    """Return a number's gradient in some parameters as one vector of double precision."""
    params = list(params)
    parts = torch.autograd.grad(value, params, retain_graph=True, allow_unused=True)
    pairs = zip(parts, params, strict=True)
    return torch.cat([(torch.zeros_like(p) if part is None else part).flatten() for part, p in pairs]).double()


def materialise(view: PolicyView, records: RecordBatch, value: Callable[[Any, int], Tensor]) -> Tensor:
    """Return the gradient of `value(outputs of record i, i)` for each record, by plain autograd."""
    params, gradients = view.parameters(), []
    for i in range(len(records)):
        outputs = view(params, view.prepare(records.take(slice(i, i + 1))))
        gradients.append(differentiate(value(outputs, i).sum(), params.values()))
    return torch.stack(gradients)


def clip_surrogate(log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """PPO's clipped surrogate objective of each record or token."""
    ratio = (log_probs - old).exp()
    return torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def clipped(records: RecordBatch) -> Callable[[Any, int], Tensor]:
    advantages = (records.advantages - records.advantages.mean()) / (records.advantages.std() + 1e-8)

    def value(outputs: Any, i: int) -> Tensor:
        return clip_surrogate(outputs.log_prob, records.log_probs[i], advantages[i])

    return value


POLICIES = {
    "mlp": {"shared": True},
    "box": {"action": "box", "shared": False},  # its log_std belongs to no layer
    "cnn": {"observation": "image", "shared": True},  # with groups
    "cnns": {"observation": "image", "shared": False},
}


class FullError(Exception):
    """The rollout is full, and `train()` has not begun."""


def fill_buffer(toy: Any, **options: Any) -> whence.RecordBatch:
    """Fill the model's rollout buffer, and return its records; options go to `learn`."""

    def stop(toy: Any) -> None:
        raise FullError

    with pytest.raises(FullError):
        toy.learn(toy.n_steps * toy.n_envs, callback=OnRolloutEnd(stop), **options)
    return snapshot(toy)


class Gradients(torch.optim.Optimizer):
    """An optimiser that keeps the gradient of each step, and takes none."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.0})
        self.steps: list[list[Tensor]] = []

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.steps.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters])
