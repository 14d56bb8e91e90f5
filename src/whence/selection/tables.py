"""Selections in tables: of a round's records, and of its metrics."""

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.core import to_numpy
from whence.scores import Influence
from whence.selection.selections import Selection


def add_selection(table: pl.DataFrame, selection: Selection, influence: Influence | None) -> pl.DataFrame:
    """Return a table of records with `keep`, `weight` and `reason`; and `score` with its errors, if known.

    Args:
        table: a row for each record, in the order of `selection`.
        selection: which records trained, with which weights.
        influence: the records' scores, or None.
    """
    scores = []
    if influence is not None:
        scores = [pl.Series("score", to_numpy(influence.scores)), *influence.list_error_columns()]
    return table.with_columns(
        *scores,
        pl.Series("keep", selection.keep.numpy()),
        pl.Series("weight", selection.weights.numpy()),
        pl.Series("reason", list(selection.reasons), dtype=pl.String),
    )


def read_weights(table: pl.DataFrame) -> NDArray[np.float64]:
    """Return how much each record of a round trained, (n,): 0 for dropped ones, 1 on average for the others.

    Training reads weights as shares, so that their scale says nothing.
    """
    weights = table["weight"] if "weight" in table.columns else table["keep"] if "keep" in table.columns else None
    if weights is None:
        return np.ones(len(table))
    shares = weights.cast(pl.Float64).fill_null(1.0).to_numpy()
    total = shares.sum()
    return shares * np.count_nonzero(shares) / total if total > 0 else shares


def summarise_selection(selection: Selection, influence: Influence | None) -> dict[str, Any]:
    """Return a round's row of the metrics: numbers of records, and quantiles of the scores if there is an influence."""
    trained, total = int(selection.keep.sum()), len(selection.keep)
    row: dict[str, Any] = {"records": total, "kept": trained, "dropped_share": 1 - trained / total}
    if influence is not None:
        scores = influence.scores.double().numpy()
        quantiles = {f"q{level:02d}": float(np.quantile(scores, level / 100)) for level in (0, 5, 25, 50, 75, 95, 100)}
        row |= {"negative_share": float((scores < 0).mean()), "mean": float(scores.mean()), **quantiles}
        if influence.errors is not None:
            row["significant_share"] = float(influence.is_significant().double().mean())
    return row
