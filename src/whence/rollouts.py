"""Rollouts whose columns are (steps, environments, ...), as most training loops store them."""

from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from whence.core import InvalidRecords, RecordBatch, Tree, map_tree

_SINGLE = ("log_probs", "advantages", "values", "returns", "rewards", "episode_starts")
"""Columns of one number per record, which some libraries store with a last axis of length 1."""


def flatten_rollout(
    *,
    observations: Tree,
    actions: Any,
    log_probs: Any,
    advantages: Any,
    values: Any = None,
    returns: Any = None,
    rewards: Any = None,
    episode_starts: Any = None,
    action_masks: Any = None,
    gamma: float | None = None,
    gae_lambda: float | None = None,
) -> RecordBatch:
    """Return the records of a rollout, step by step: those of all environments at step 0, then at step 1, and so on.

    A selection's mask is in the order of `column.flatten(0, 1)`, so `column.flatten(0, 1)[selection.keep]` are the kept
    rows of any column of the rollout. Columns are copied. Those of one number per record may be (steps, environments)
    or (steps, environments, 1).

    Args:
        observations: (steps, environments, ...) array or tensor, or a nested dict of such.
        actions: (steps, environments, ...).
        log_probs: log-probability of the action under the policy that took it.
        advantages: advantage estimates, not normalised; where a library has normalised them, `returns - values`.
        values: value estimates, or None.
        returns: targets of the value function, or None.
        rewards: rewards, or None.
        episode_starts: whether the record is the first of its episode, or None. It gives the records `episode_ids` and
            `steps`; an episode that began before the rollout has an id, and steps of -1.
        action_masks: (steps, environments, ...) True where an action was allowed, or None.
        gamma: discount factor, or None.
        gae_lambda: lambda of the advantage estimator, or None.

    Raises:
        InvalidRecords: a column does not begin with the axes of `log_probs`, or `RecordBatch` refuses it.
    """
    if log_probs.ndim < 2:
        raise InvalidRecords(f"log_probs came with shape {tuple(log_probs.shape)}; (steps, environments) is needed.")
    steps, environments = log_probs.shape[:2]
    columns: dict[str, Tree] = {"observations": observations, "actions": actions, "log_probs": log_probs}
    columns |= {"advantages": advantages, "values": values, "returns": returns, "rewards": rewards}
    columns |= {"episode_starts": episode_starts, "action_masks": action_masks}
    columns = {
        name: map_tree(partial(_flatten, name, steps, environments), column)
        for name, column in columns.items()
        if column is not None
    }
    columns["env_index"] = torch.arange(environments).repeat(steps)
    if episode_starts is not None:
        starts = torch.as_tensor(columns["episode_starts"]).bool().reshape(steps, environments)
        columns["episode_ids"], columns["steps"] = _number_episodes(starts.cpu())
    return RecordBatch(**columns, gamma=gamma, gae_lambda=gae_lambda)


def _flatten(name: str, steps: int, environments: int, column: Any) -> Any:
    shape = tuple(column.shape)
    if shape[:2] != (steps, environments):
        raise InvalidRecords(
            f"`{name}` has shape {shape}, but log_probs begins with ({steps}, {environments}), the steps and the "
            "environments: every column of a rollout needs these two axes first."
        )
    rest = () if name in _SINGLE and shape[2:] == (1,) else shape[2:]
    return column.reshape(steps * environments, *rest)


def _number_episodes(starts: Bool[Tensor, "steps envs"]) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Return each record's episode, numbered from 0, and its step there, -1 where the beginning was not seen."""
    numbers = starts.long().cumsum(0)
    before = (numbers[-1] + 1).cumsum(0) - (numbers[-1] + 1)
    rows = torch.arange(len(starts))[:, None]
    first = torch.where(starts, rows, -1).cummax(0).values
    return (numbers + before).flatten(), torch.where(first < 0, -1, rows - first).flatten()
