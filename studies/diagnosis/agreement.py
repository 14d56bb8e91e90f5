"""A judgement's verdict: how often advantages were wrong where records harm, with its uncertainty.

Each function takes a table of `judge_advantages`. Intervals are percentiles of a bootstrap over episodes, since the
records of an episode share what happened in it. They do not cover what episodes share: the policy, and, if visits were
what measured, the returns of these visits.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl
import scipy
from numpy.typing import NDArray

BANDS = ("top", "middle", "bottom")
"""A fifth of a round's records that scores highest, three fifths, and the fifth that scores lowest."""

RESAMPLES = 1000
"""Resamples of the bootstrap."""

BINS = 10
"""Bins of the advantages' sizes."""

_ENDS = ("mean", "low", "high")

Numbers = NDArray[np.float64]

Statistic = Callable[[NDArray[np.int64]], Sequence[float]]
"""Takes the positions of some records, and returns numbers; NaN where they have none."""


def summarise_judgement(judged: pl.DataFrame, *, resamples: int = RESAMPLES) -> dict[str, Any]:
    """Return what a judgement says of a round, in JSON types.

    Returns:
        `records`; `bands` (see `compare_bands`), whose `low` and `high` are the interval of `mismatch`; `difference`:
        the share of wrong signs in the bottom band minus that in the top one; `spearman`: of influence with the product
        of the measured and the trained advantage, and `partial`: the same with the size of the trained advantage held
        fixed. The last three are "mean", "low" and "high" each, None where there is none.
    """
    statistic = _make_statistic(judged)
    ends = np.vstack([statistic(np.arange(len(judged))), *_bootstrap(judged, statistic, resamples)]).T
    entries = [
        {name: None if np.isnan(value) else float(value) for name, value in zip(_ENDS, row, strict=True)}
        for row in ends
    ]
    shares = dict(zip(BANDS, entries, strict=False))
    bands = [row | {name: shares[row["band"]][name] for name in _ENDS[1:]} for row in compare_bands(judged).to_dicts()]
    names = ("difference", "spearman", "partial")
    return {"records": len(judged), "bands": bands, **dict(zip(names, entries[len(BANDS) :], strict=True))}


def compare_bands(judged: pl.DataFrame) -> pl.DataFrame:
    """Return a row for each band of influence, the highest first.

    Returns:
        `band`, `records`, `mismatch` (the share of wrong signs), `expected` (that share in records of any band whose
        advantages are of the same size, by tenths), `certain` (the share measured beyond two errors of 0),
        `certain_mismatch` (of these, the share of wrong signs), and `size`: the mean of |trained|.
    """
    certain = pl.col("certain").fill_null(False)
    bands = (
        judged.with_columns(pl.Series("expected", _expect_by_size(judged)))
        .group_by("band")
        .agg(
            pl.len().cast(pl.Int64).alias("records"),
            pl.col("mismatch", "expected").mean(),
            certain=certain.mean(),
            certain_mismatch=pl.col("mismatch").filter(certain).mean(),
            size=pl.col("advantage").abs().mean(),
        )
    )
    return pl.DataFrame({"band": BANDS}).join(bands, on="band", how="inner", maintain_order="left")


def partial_spearman(one: Numbers, other: Numbers, fixed: Numbers) -> float:
    """Return Spearman's correlation of two columns with a third held fixed; NaN if a column does not vary.

    The correlation of what is left of the two columns' ranks after a straight line in the third's ranks.
    """
    ranks = [scipy.stats.rankdata(column) for column in (one, other, fixed)]
    if len(one) < 2 or min(np.ptp(column) for column in ranks) == 0:
        return float("nan")
    (r12, r13), r23 = np.corrcoef(ranks)[0, 1:], np.corrcoef(ranks)[1, 2]
    scale = (1 - r13**2) * (1 - r23**2)
    return float((r12 - r13 * r23) / np.sqrt(scale)) if scale > 0 else float("nan")


def _make_statistic(judged: pl.DataFrame) -> Statistic:
    """Return a function of positions: the bands' shares of wrong signs, their difference, and the two correlations."""
    score, trained, measured = (
        judged[name].cast(pl.Float64).to_numpy() for name in ("score", "advantage", "mc_advantage")
    )
    wrong, band = judged["mismatch"].to_numpy().astype(float), judged["band"].to_numpy()
    in_band = [band == name for name in BANDS]

    def compute(index: NDArray[np.int64]) -> Sequence[float]:
        chosen = (wrong[index[inside[index]]] for inside in in_band)
        shares = [float(each.mean()) if each.size else float("nan") for each in chosen]
        product = (measured * trained)[index]
        correlations = [
            _spearman(score[index], product),
            partial_spearman(score[index], product, np.abs(trained)[index]),
        ]
        return [*shares, shares[-1] - shares[0], *correlations]

    return compute


def _bootstrap(judged: pl.DataFrame, statistic: Statistic, resamples: int) -> tuple[Numbers, Numbers]:
    """Return the ends of a statistic's 95% intervals, from resampled episodes; NaN if there is one episode."""
    numbers = judged["episode_id"].fill_null(-1).to_numpy()
    members = [np.flatnonzero(numbers == episode) for episode in np.unique(numbers)]
    if len(members) < 2:
        unknown = np.full(len(BANDS) + 3, np.nan)
        return unknown, unknown
    generator, rows = np.random.default_rng(0), []
    for _ in range(resamples):
        sample = generator.integers(len(members), size=len(members))
        rows.append(statistic(np.concatenate([members[episode] for episode in sample])))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice")
        low, high = np.nanquantile(np.asarray(rows, dtype=np.float64), [0.025, 0.975], axis=0)
    return low, high


def _expect_by_size(judged: pl.DataFrame) -> Numbers:
    """Return, for each record, the share of wrong signs among all records whose advantages are of about its size."""
    sizes = judged["advantage"].abs().to_numpy()
    # Bins hold about equally many values; equal values are in one bin.
    edges = np.unique(np.quantile(sizes, np.linspace(0, 1, BINS + 1)[1:-1]))
    numbers = np.searchsorted(edges, sizes, side="right")
    wrong = judged["mismatch"].to_numpy().astype(float)
    shares: Numbers = np.bincount(numbers, weights=wrong) / np.maximum(np.bincount(numbers), 1)
    return shares[numbers]


def _spearman(one: Numbers, other: Numbers) -> float:
    if len(one) < 2 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return float("nan")
    return float(scipy.stats.spearmanr(one, other).statistic)
