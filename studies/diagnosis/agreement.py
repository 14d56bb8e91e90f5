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


def summarise_judgement(judged: pl.DataFrame, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Any]:
    """Return what a judgement says of a round, in JSON types.

    Args:
        judged: a table of `judge_advantages`.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        `records`, `measured`; `bands` (see `compare_bands`); `difference`: the share of wrong signs in the bottom band
        minus that in the top one; `spearman`: of influence with the product of the measured and the trained advantage,
        and `partial`: the same with the size of the trained advantage held fixed. The last three are "mean", "low" and
        "high" each, None where there is none.
    """
    statistic = _make_statistic(judged)
    observed = statistic(np.arange(len(judged)))
    lows, highs = _bootstrap(judged, statistic, resamples, seed)
    entries: list[dict[str, float | None]] = [
        {name: None if np.isnan(value) else float(value) for name, value in zip(_ENDS, row, strict=True)}
        for row in zip(observed, lows, highs, strict=True)
    ]
    shares, (difference, spearman, partial) = entries[: len(BANDS)], entries[len(BANDS) :]
    bands = compare_bands(judged).to_dicts()
    for row in bands:
        row |= {name: shares[BANDS.index(row["band"])][name] for name in ("low", "high")}
    measured = judged["measured"][0] if len(judged) else None
    return {
        **{"records": len(judged), "measured": measured, "bands": bands},
        **{"difference": difference, "spearman": spearman, "partial": partial},
    }


def compare_bands(judged: pl.DataFrame) -> pl.DataFrame:
    """Return a row for each band of influence, the highest first.

    Returns:
        `band`, `records`, `mismatch` (the share of wrong signs), `expected` (that share in records of any band whose
        advantages are of the same size, by tenths), `tied` (the share that is measured as exactly 0, which counts as
        wrong), `certain` (the share measured beyond two errors of 0), `certain_mismatch` (of these, the share of wrong
        signs), and means of `distance` (|measured - trained|), `product` (measured * trained) and `size` (|trained|).
    """
    size, measured = pl.col("advantage").abs(), pl.col("mc_advantage")
    certain = pl.col("certain").fill_null(False)
    bands = (
        judged.with_columns(pl.Series("expected", _expect_by_size(judged)))
        .group_by("band")
        .agg(
            pl.len().cast(pl.Int64).alias("records"),
            pl.col("mismatch").mean(),
            pl.col("expected").mean(),
            tied=(measured == 0).mean(),
            certain=certain.mean(),
            certain_mismatch=pl.col("mismatch").filter(certain).mean(),
            distance=(measured - pl.col("advantage")).abs().mean(),
            product=(measured * pl.col("advantage")).mean(),
            size=size.mean(),
        )
    )
    order = pl.DataFrame({"band": BANDS})
    return order.join(bands, on="band", how="inner", maintain_order="left")


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


def _bootstrap(judged: pl.DataFrame, statistic: Statistic, resamples: int, seed: int) -> tuple[Numbers, Numbers]:
    """Return the ends of a statistic's 95% intervals, from resampled episodes; NaN if there is one episode."""
    episodes = judged["episode_id"] if "episode_id" in judged.columns else judged["record_id"]
    numbers = episodes.fill_null(-1).to_numpy()
    members = [np.flatnonzero(numbers == episode) for episode in np.unique(numbers)]
    count = len(statistic(np.arange(len(judged))))
    if len(members) < 2:
        return np.full(count, np.nan), np.full(count, np.nan)
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(resamples):
        sample = generator.integers(len(members), size=len(members))
        rows.append(statistic(np.concatenate([members[episode] for episode in sample])))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice")
        low, high = np.nanquantile(np.asarray(rows, dtype=np.float64), [0.025, 0.975], axis=0)
    return low, high


def _expect_by_size(judged: pl.DataFrame) -> Numbers:
    """Return, for each record, the share of wrong signs among all records whose advantages are of about its size."""
    numbers = _number_bins(judged["advantage"].abs().to_numpy(), BINS)
    wrong = judged["mismatch"].to_numpy().astype(float)
    shares: Numbers = np.bincount(numbers, weights=wrong) / np.maximum(np.bincount(numbers), 1)
    return shares[numbers]


def _number_bins(values: NDArray[Any], bins: int) -> NDArray[np.int64]:
    """Return each value's bin, of about equally many values; equal values are in one bin."""
    if len(values) == 0:
        return np.zeros(0, np.int64)
    edges = np.unique(np.quantile(values, np.linspace(0, 1, bins + 1)[1:-1]))
    return np.searchsorted(edges, values, side="right")


def _spearman(one: Numbers, other: Numbers) -> float:
    if len(one) < 2 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return float("nan")
    return float(scipy.stats.spearmanr(one, other).statistic)
