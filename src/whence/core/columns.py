"""Columns of records: trees of tensors, flattened from rollouts, written to Polars and read from it."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

from whence.core.errors import InvalidRecords

Tree: TypeAlias = Any  # a tensor, or a (nested) dict, tuple or list of trees; the first axis is the records'

_SINGLE = ("log_probs", "advantages", "values", "returns", "rewards", "episode_starts")
"""Columns of one number per record, which some libraries store with a last axis of length 1."""


def map_tree(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Apply `function` to every tensor of a tree of dicts, tuples and lists."""
    if isinstance(tree, Mapping):
        return {key: map_tree(function, branch) for key, branch in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map_tree(function, branch) for branch in tree)
    return function(tree)


def named_leaves(tree: Tree, name: str = "") -> list[tuple[str, Tensor]]:
    """List a tree's tensors with their dotted names."""
    if isinstance(tree, Mapping):
        branches = list(tree.items())
    elif isinstance(tree, tuple | list):
        branches = list(enumerate(tree))
    else:
        return [(name, tree)]
    return [leaf for key, branch in branches for leaf in named_leaves(branch, f"{name}.{key}" if name else str(key))]


def take(tree: Tree, index: Tensor | slice | int) -> Tree:
    """Take the records at `index` from every tensor, or array, of a tree; of one record, without their axis."""
    return map_tree(lambda tensor: tensor[index], tree)


def flatten_rollout(columns: Mapping[str, Any]) -> dict[str, Tree]:
    """Return a rollout's columns as `RecordBatch` has them, see there; other axes raise an `InvalidRecords`."""
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


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as an array; bfloat16, which NumPy lacks, becomes float32."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


def read_numbers(name: str, column: pl.Series) -> NDArray[Any]:
    """Return a column as an array of a dtype that torch has."""
    array = np.asarray(column.to_numpy())
    if array.dtype.kind not in "biuf":
        raise InvalidRecords(f"The column `{name}` holds {column.dtype} or nulls; numbers of one shape are needed.")
    return array.astype(np.int64) if array.dtype in (np.uint16, np.uint32, np.uint64) else array  # torch has few


def read_observations(table: pl.DataFrame, space: Any, name: str) -> Tree:
    """Return the observations of a table's column, or of its columns NAME.KEY as a nested dict."""
    if name in table.columns:
        array = read_numbers(name, table[name])
        shape = getattr(space, "shape", None)
        # SB3 gives a Discrete observation no axis of its own, except inside a Dict.
        if shape is None or (shape == () and name == "observation"):
            return array
        if array.size != len(array) * math.prod(shape or (1,)):
            raise InvalidRecords(f"The column `{name}` holds {table[name].dtype}; observations of {space} are needed.")
        return array.reshape(len(array), *(shape or (1,)))
    keys = dict.fromkeys(
        column.removeprefix(f"{name}.").split(".")[0] for column in table.columns if column.startswith(f"{name}.")
    )
    spaces = getattr(space, "spaces", None)
    names = list(keys) if spaces is None else list(spaces)
    if not keys or any(key not in keys for key in names):
        raise InvalidRecords(
            f"The table has no column `{name}`: observations of more than 4 KiB a record are not stored. Rebuild them "
            "with whence.stored.load_round(run, round), or collect anew with whence.sb3.collect(model)."
        )
    return {key: read_observations(table, None if spaces is None else spaces[key], f"{name}.{key}") for key in names}


def add_observations(table: pl.DataFrame, columns: Mapping[str, Tensor | NDArray[Any]]) -> pl.DataFrame:
    """Return a table of records with columns of observations, unless those of one record take more than 4 KiB."""
    if sum(column[0].nbytes for column in columns.values()) > 4096:
        return table
    return table.with_columns(make_series(name, column) for name, column in columns.items())


def make_series(name: str, column: Tensor | NDArray[Any]) -> pl.Series:
    """Return a column of a table, one number per record or an array of fixed size."""
    array = (to_numpy(column) if isinstance(column, Tensor) else column).reshape(len(column), -1)
    return pl.Series(name, array[:, 0] if array.shape[1] == 1 else array)
