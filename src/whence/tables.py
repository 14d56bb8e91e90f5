"""What a rule made of a round, as columns and rows of a run's tables."""

from typing import Any

import numpy as np
import polars as pl

from whence.influence import Influence
from whence.records import to_numpy
from whence.selection import Selection


def add_selection(table: pl.DataFrame, selection: Selection, influence: Influence | None) -> pl.DataFrame:
    """Add to a table of records what became of each: `score`, where there is one, `keep`, `weight` and `reason`."""
    scores = [] if influence is None else [pl.Series("score", to_numpy(influence.scores))]
    return table.with_columns(
        *scores,
        pl.Series("keep", selection.keep.numpy()),
        pl.Series("weight", selection.weights.numpy()),
        pl.Series("reason", list(selection.reasons), dtype=pl.String),
    )


def summarise_selection(selection: Selection, influence: Influence | None) -> dict[str, Any]:
    """Return a round's row of the metrics: how many records were kept, and quantiles of the scores, where there are."""
    kept, total = int(selection.keep.sum()), len(selection.keep)
    row: dict[str, Any] = {"records": total, "kept": kept, "dropped_share": 1 - kept / total}
    if influence is not None:
        scores = influence.scores.double().numpy()
        quantiles = {f"q{level:02d}": float(np.quantile(scores, level / 100)) for level in (0, 5, 25, 50, 75, 95, 100)}
        row |= {"negative_share": float((scores < 0).mean()), "mean": float(scores.mean()), **quantiles}
    return row
