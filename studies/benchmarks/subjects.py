"""What the suite asks of a policy, whichever it is: records, a plain pass, and a question for other libraries."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stable_baselines3 import PPO
from torch import Tensor, nn

import whence

MIB = 2**20


@dataclass(frozen=True, eq=False)
class Question:
    """What is asked of another library: the product of each record's gradient with one target's.

    Record i's loss is `-(log_probs * weights[i]).sum()`. The target is the mean over records of
    `(log_probs * target_weights[i]).sum()`. Each tensor's first axis is the records'.

    Attributes:
        model: a module that is called as `model(*inputs)`.
        inputs: tensors, (n, ...).
        actions: (n, ...).
        weights: (n,) or (n, R).
        target_weights: like `weights`.
        log_probs: `log_probs(outputs, actions)` returns a tensor like `weights`.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    actions: Tensor
    weights: Tensor
    target_weights: Tensor
    log_probs: Callable[[Any, Tensor], Tensor]

    def __len__(self) -> int:
        return len(self.weights)


@dataclass(frozen=True, eq=False)
class Subject:
    """A policy that is scored.

    Attributes:
        name: its name in cells.
        policy: what `attribute` takes.
        module: the policy's module.
        records: `records(n)` returns n records.
        plain: `plain(records)` makes one forward and backward pass over records.
        chunk: the most records in one piece of a plain pass; gradients add up.
        scoring: the target and the objective.
        memory: the budget of scoring, in bytes.
        question: `question(n)` asks other libraries for the same scores.
        model: SB3's model; None for a language model.
    """

    name: str
    policy: Any
    module: nn.Module
    records: Callable[[int], whence.RecordBatch]
    plain: Callable[[whence.RecordBatch], None]
    chunk: int
    scoring: Mapping[str, Any]
    memory: int
    question: Callable[[int], Question]
    model: PPO | None = None

    @property
    def parameters(self) -> int:
        """The number of parameters that train."""
        return sum(parameter.numel() for parameter in self.module.parameters() if parameter.requires_grad)


def compute_log_probs(outputs: Tensor, actions: Tensor) -> Tensor:
    """Return (..., ) log-probs of actions (..., ) from logits (..., actions)."""
    return outputs.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
