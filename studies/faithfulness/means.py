"""Means over seeds of what a study has measured, of rounds that were chosen."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from whence.lab.efficiency import t_interval

Entry = dict[str, Any]


def over_seeds(rows: pl.DataFrame, column: str, whole: str | None = None) -> Entry:
    """Return the mean over seeds of a column's mean over the rounds of a seed, and its 95% t interval.

    Args:
        rows: one for each seed and round; those without the figure are passed over.
        column: to take the mean of.
        whole: column whose mean over the same rounds that of a seed is divided by; None: by nothing.
    """
    known = rows.drop_nulls([column] if whole is None else [column, whole])
    mean = pl.col(column).mean() if whole is None else pl.col(column).mean() / pl.col(whole).mean()
    means = known.group_by("seed", maintain_order=True).agg(mean=mean)["mean"]
    values = [value for value in means if value is not None and abs(value) < float("inf")]
    return {**t_interval(values), "seeds": len(values), "rounds": len(known)}


def means_of(rows: pl.DataFrame, by: Sequence[str], *columns: str) -> dict[tuple[Any, ...], dict[str, Entry]]:
    """Return `over_seeds` of some columns for the rows of each group, by the group's values."""
    groups = [] if rows.is_empty() else rows.group_by(by, maintain_order=True)
    return {key: {name: over_seeds(group, name) for name in columns} for key, group in groups}
