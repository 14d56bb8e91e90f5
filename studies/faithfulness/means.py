"""Means over seeds of what a study found, of rounds that were chosen and seeds that were drawn."""

from collections.abc import Sequence
from typing import Any

import polars as pl

from whence.statistics import t_interval


def over_seeds(rows: pl.DataFrame, column: str, whole: str | None = None) -> dict[str, Any]:
    """Return the mean over seeds of a column's mean over the rounds of a seed, and its 95% t interval.

    Args:
        rows: one for each seed and round; those without the figure are passed over.
        column: to take the mean of.
        whole: column whose mean over the same rounds that of a seed is divided by; None: by nothing.
    """
    known = rows.drop_nulls([column] if whole is None else [column, whole])
    column_mean = pl.col(column).mean()
    means = known.group_by("seed", maintain_order=True).agg(
        mean=column_mean if whole is None else column_mean / pl.col(whole).mean()
    )
    values = [value for value in means["mean"].to_list() if value is not None and abs(value) < float("inf")]
    return {**t_interval(values), "seeds": len(values), "rounds": len(known)}


def means_of(rows: pl.DataFrame, by: Sequence[str], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return `over_seeds` of some columns for the rows of each group."""
    return [
        dict(zip(by, key, strict=True)) | {name: over_seeds(group, name) for name in columns}
        for key, group in rows.group_by(by, maintain_order=True)
    ]
