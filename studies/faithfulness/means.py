"""Means of what a study has measured: over seeds, whose rounds were chosen, or over rounds and seeds together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from scipy import stats

from whence.efficiency import t_interval

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


def over_rounds(values: Sequence[float | None], wholes: Sequence[float] | None = None) -> Entry:
    """Return the mean over rounds and seeds and its 95% bootstrap interval; nulls are rounds without the figure.

    Args:
        values: one for each round.
        wholes: the mean is divided by that of these; then there is none if the interval of theirs holds 0.
    """
    pairs = [(value, 1.0 if wholes is None else wholes[at]) for at, value in enumerate(values) if value is not None]
    known = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    entry: Entry = {"mean": None, "low": None, "high": None, "rounds": known.shape[1]}
    if wholes is not None:
        whole = over_rounds(known[1].tolist())
        if whole["mean"] is None or (whole["low"] or whole["mean"]) <= 0:
            return entry
    if not entry["rounds"]:
        return entry

    def ratio(values: Any, wholes: Any, axis: int = -1) -> Any:
        return values.sum(axis) / wholes.sum(axis)

    entry["mean"] = float(known[0].mean()) if wholes is None else float(ratio(*known))
    if entry["rounds"] > 1 and np.ptp(known[0]) > 0:
        sample, statistic = ((known[0],), np.mean) if wholes is None else (known, ratio)
        settings = {"paired": wholes is not None, "method": "percentile", "random_state": np.random.default_rng(0)}
        interval = stats.bootstrap(sample, statistic, **settings).confidence_interval
        entry |= {"low": interval.low, "high": interval.high}
    return entry
