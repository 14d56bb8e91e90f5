"""What the studies of planted causes share: which methods there are, how they are judged, what a line holds."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.stats import rankdata

from studies.shared import write_line
from whence.lab import read_rows
from whence.runs import RunDirectory
from whence.statistics import t_interval

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

LANGUAGE = "arithmetic"
"""The task of `studies.planted.language`."""

RUN_KEYS, SCORE_KEYS = ("case", "seed"), ("case", "seed", "method")
"""What names a line of runs.parquet, and one of scores.parquet."""

SIZES = (50, 200, 1000)
"""The numbers of records of highest score of which a precision is computed."""


def list_missing(out: Path, case: str, seed: int, methods: Sequence[str]) -> list[str]:
    """Return the methods that are not judged yet on a run; none if the run has taught nothing."""
    known = read_rows(out / "runs.parquet", RUN_KEYS).get((case, seed))
    if known is not None and not is_taught(known):
        return []
    done = read_rows(out / "scores.parquet", SCORE_KEYS)
    return [method for method in methods if (case, seed, method) not in done]


def judge_methods(
    out: Path,
    key: Mapping[str, Any],
    missing: Sequence[str],
    score: Callable[[str], Floats],
    measure: Callable[[Floats], Mapping[str, Any]],
) -> None:
    """Judge methods on a run, and write a line of each with the CPU seconds that it took.

    `key` names the run, `score` returns the scores of all records by a method, and `measure` judges scores.
    """
    for method in missing:
        began = time.process_time()
        scores = score(method)
        line = {**key, "method": method, "seconds": time.process_time() - began, **measure(scores)}
        write_line(out / "scores.parquet", line, SCORE_KEYS)


def read_all(directory: RunDirectory) -> pl.DataFrame:
    """Return the records of all rounds, in order."""
    return pl.concat([directory.round("records", number) for number in directory.rounds()], how="diagonal_relaxed")


def score_by_raw(causes: pl.DataFrame) -> Floats:
    """Return the scores of `nearest` by advantages as stored, in place of those that SB3's PPO trains on."""
    advantage = pl.col("advantage").cast(pl.Float64)
    trained = (advantage - advantage.mean().over("round")) / (advantage.std().over("round") + 1e-8)
    return causes.select(pl.col("score") / trained * advantage).to_series().to_numpy()


def is_apart_by_means(changes: Mapping[str, Sequence[float]]) -> bool:
    """Return what `prove` once judged: the interval of the mean change is apart from 0 and both controls' intervals."""
    ends = {variant: t_interval(values) for variant, values in changes.items()}
    (low, high), *controls = (
        [float(ends[variant][end] or 0) for end in ("low", "high")] for variant in ("without", "random", "placebo")
    )
    return all(high < lowest or low > highest for lowest, highest in [(0.0, 0.0), *controls])


def judge(scores: Floats, rigged: Bools) -> dict[str, Any]:
    """Return AUROC and precisions; among equal scores the earlier record ranks higher."""
    order = np.argsort(-scores, kind="stable")
    precisions = {f"precision_{size}": float(rigged[order[:size]].mean()) for size in SIZES}
    return {"auroc": compute_auroc(scores, rigged), **precisions}


def compute_auroc(scores: Floats, rigged: Bools) -> float:
    """Return the probability that a rigged record scores above another; equal scores count half."""
    count, others = int(rigged.sum()), int((~rigged).sum())
    return float((rankdata(scores)[rigged].sum() - count * (count + 1) / 2) / (count * others))


def is_taught(about: Mapping[str, Any]) -> bool:
    """Return whether there is something to ask about: a policy that goes into the region, and a cause."""
    return bool(about["visits"] and about["rigged"])
