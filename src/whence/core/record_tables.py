"""Columns of records in tables: how tensors are written to Polars, and read from it."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.core.errors import InvalidRecords
from whence.core.trees import Tree


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
