"""What the studies of planted causes share: which methods there are, how scores are judged, what a line holds."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.stats import rankdata

from whence.runs import RunDirectory

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

PLAIN = ("advantage", "advantage x action", "influence", "nearest")
STUDIED = ("nearest-trained", "similar", "similar-hidden", "direction", "clusters", "hidden")
METHODS = (*PLAIN, *STUDIED)
"""Methods in the worlds of `studies.planted.worlds`; for those that are studied see `studies.planted.finders`."""

LANGUAGE = "arithmetic"
LANGUAGE_PLAIN = ("advantage", "advantage x answer", "influence", "nearest", "bm25")
LANGUAGE_STUDIED = ("embedding", "nearest-trained", "nearest of all", "direction", "clusters", "hidden")
LANGUAGE_METHODS = (*LANGUAGE_PLAIN, *LANGUAGE_STUDIED)
"""The task of `studies.planted.language`, and the methods there."""

RUN_KEYS, SCORE_KEYS = ("case", "seed"), ("case", "seed", "method")
"""What names a line of runs.parquet, and one of scores.parquet."""

SIZES = (50, 200, 1000)
"""The numbers of records of highest score of which a precision is computed."""


def read_all(directory: RunDirectory) -> pl.DataFrame:
    """Return the records of all rounds, in order."""
    return pl.concat([directory.round("records", number) for number in directory.rounds()], how="diagonal_relaxed")


def judge(scores: Floats, rigged: Bools) -> dict[str, Any]:
    """Return AUROC and precisions; among equal scores the earlier record ranks higher."""
    order = np.argsort(-scores, kind="stable")
    return {
        "auroc": compute_auroc(scores, rigged),
        **{f"precision_{size}": float(rigged[order[:size]].mean()) for size in SIZES},
    }


def compute_auroc(scores: Floats, rigged: Bools) -> float:
    """Return the probability that a rigged record scores above another; equal scores count half."""
    count, others = int(rigged.sum()), int((~rigged).sum())
    return float((rankdata(scores)[rigged].sum() - count * (count + 1) / 2) / (count * others))


def is_taught(about: Mapping[str, Any]) -> bool:
    """Return whether there is something to ask about: a policy that goes into the region, and a cause."""
    return bool(about["visits"] and about["rigged"])
