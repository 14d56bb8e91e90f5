"""Conditions on records, in SQL, over the columns of a table and the axes of its observations."""

from collections.abc import Sequence

import polars as pl

from whence.core import WhenceError, first_line
from whence.scores import read_axes

EXAMPLE = '"action = 2 and advantage < 0"'


def select_where(
    records: pl.DataFrame, where: str, names: Sequence[str] | None = None, option: str = "--where"
) -> pl.Series:
    """Return for which records a condition holds; `names` are those of the observation's axes.

    A condition that is none over the columns is refused, as `option`, by a message that lists them.
    """
    axes = read_axes(records, names)
    plain = records.drop(name for name in records.columns if name.split(".")[0] in ("observation", "raw_observation"))
    table = plain.with_columns(pl.Series(name, values) for name, values in axes.items())
    try:
        holds = table.select(pl.sql_expr(where).alias("holds"))["holds"]
        if holds.dtype != pl.Boolean or len(holds) != len(table):
            raise pl.exceptions.InvalidOperationError("it is not true or false of each record")
        return holds.fill_null(False)
    except pl.exceptions.PolarsError as refusal:
        raise WhenceError(
            f"{option} is {where!r}: {first_line(refusal)}. Write a condition in SQL, such as {EXAMPLE}, over "
            f"{', '.join(table.columns)}; names with spaces in double quotes."
        ) from None
