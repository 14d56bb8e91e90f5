"""Parquet files of runs: a row each, by keys, rewritten whole when a row is added.

Names whose values are all texts, or all numbers, are columns. A table of numbers, `{name: list}`, is a column of lists
for each of its names, "table/name". The rest of a row is JSON, in the column "rest".
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from whence.core import RunDirectoryError, write_atomically

Row = Mapping[str, Any]

_REST = "rest"


def read_rows(path: Path, keys: Sequence[str]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return a file's rows by the values of some of their names, in their order; none if there is no such file.

    Args:
        path: the file.
        keys: names whose values are texts or whole numbers, and together belong to one row alone.

    Raises:
        RunDirectoryError: the file cannot be read, or has other keys.
    """
    if not path.exists():
        return {}
    try:
        table = pl.read_parquet(path, glob=False)
        rows = [_unpack_row(packed) for packed in table.iter_rows(named=True)]
        return {tuple(row[name] for name in keys): row for row in rows}
    except (OSError, LookupError, TypeError, ValueError, pl.exceptions.PolarsError) as failure:
        raise RunDirectoryError(
            f"{path} cannot be read as rows with {', '.join(keys)} ({type(failure).__name__}: {failure}). Restore it."
        ) from None


def put_row(path: Path, row: Row, keys: Sequence[str]) -> None:
    """Put a row, whose values are as JSON has them, into a file, in place of the one with the same keys.

    The file is replaced whole, so that a reader sees all of the old one or all of the new one. Whoever writes holds
    the lock of the directory, since the last of two writers would undo what the first has put.

    Raises:
        RunDirectoryError: see `read_rows`.
    """
    by_key: dict[tuple[Any, ...], Row] = {**read_rows(path, keys)}
    by_key[tuple(row[name] for name in keys)] = row
    write_rows(path, [by_key[key] for key in sorted(by_key)])


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a file of these rows."""
    columns: dict[str, pl.Series] = {}
    packed: set[str] = set()
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        types = {type(value) for value in values}
        if len(types) == 1 and types <= {str, int, float, bool}:
            columns[name] = pl.Series(name, values)
        elif all(map(_is_table, values)):
            columns |= _pack_tables(name, values)
        else:
            continue
        packed.add(name)
    rest = [{name: value for name, value in row.items() if name not in packed} for row in rows]
    if any(rest):
        columns[_REST] = pl.Series(_REST, [json.dumps(values, allow_nan=False) for values in rest], pl.String)
    with write_atomically(path) as temporary:
        pl.DataFrame(list(columns.values())).write_parquet(temporary, compression="zstd", compression_level=19)


def _is_table(value: Any) -> bool:
    columns = value.values() if isinstance(value, dict) and value else [None]
    return all(
        isinstance(column, list) and {type(entry) for entry in column} <= {int, float, type(None)} for column in columns
    )


def _pack_tables(name: str, tables: Sequence[Any]) -> dict[str, pl.Series]:
    """Return the columns of lists of a name's tables; null where a table lacks the column."""
    columns = {}
    for column in dict.fromkeys(column for table in tables for column in table):
        lists = [table.get(column) for table in tables]
        is_whole = all(type(entry) is not float for values in lists for entry in values or ())
        label = f"{name}/{column}"
        columns[label] = pl.Series(label, lists, pl.List(pl.Int64 if is_whole else pl.Float64), strict=False)
    return columns


def _unpack_row(packed: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for label, value in packed.items():
        name, is_list, column = label.partition("/")
        if is_list:
            table = row.setdefault(name, {})
            if value is not None:
                table[column] = value
        elif label != _REST:
            row[name] = value
    row |= json.loads(packed.get(_REST, "{}"))
    return row
