"""Rollouts whose columns are (steps, environments, ...), as most training loops store them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from whence.core.errors import InvalidRecords
from whence.core.trees import Tree, map_tree

_SINGLE = ("log_probs", "advantages", "values", "returns", "rewards", "episode_starts")
"""Columns of one number per record, which some libraries store with a last axis of length 1."""


def flatten_rollout(columns: Mapping[str, Any]) -> dict[str, Tree]:
    """Return a rollout's columns, by `RecordBatch`'s names, with one axis for steps and environments; see there.

    Raises:
        InvalidRecords: a column does not begin with the axes of `log_probs`.
    """
    if (shape := columns["log_probs"].shape)[1:] == ():
        raise InvalidRecords(f"log_probs came with shape {tuple(shape)}; (steps, environments) is needed.")
    steps, environments = shape[:2]
    flat = {
        name: map_tree(partial(_flatten, name, steps, environments), column)
        for name, column in columns.items()
        if column is not None
    }
    flat["env_index"] = torch.arange(environments).repeat(steps)
    if "episode_starts" in flat:
        starts = torch.as_tensor(flat["episode_starts"]).bool().reshape(steps, environments)
        flat["episode_ids"], flat["steps"] = _number_episodes(starts.cpu())
    return flat


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
