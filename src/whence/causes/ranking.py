"""Records of all rounds by what they did to an action or a response: gathered, summed and ranked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
from jaxtyping import Float
from torch import Tensor

from whence.core import WhenceError
from whence.runs import RunDirectory
from whence.scores import Moment, find_moments

PER_ROUND_MOMENTS = 3
"""Moments of one round that a list over rounds holds at most, so that no round fills it."""

NEAREST = 10
"""Examples that a record is compared with: those whose gradients are the most like its own."""

KEYS = ("round", "record_id")
"""The columns that name a record among those of all rounds."""

OnRound = Callable[[int, int], None]
"""Called with the number of rounds that are scored, and of all."""

Score = Callable[[int, pl.DataFrame], Mapping[str, Any]]
"""Returns columns to add to a round's table, `score` among them, by the round's number and table."""


def check_flagged(run: RunDirectory, keys: pl.DataFrame) -> None:
    """Refuse to ask about stored records where none is named."""
    if keys.is_empty():
        raise WhenceError(f"Nothing of {run.path} is flagged. Flag some on its page: whence view {run.path}.")


def score_rounds(
    run: RunDirectory, numbers: Sequence[int], columns: Sequence[str], score: Score, on_round: OnRound | None
) -> pl.DataFrame:
    """Return a row for each record of some rounds: `round`, its columns as far as it has them, and those of `score`."""
    parts = []
    for done, number in enumerate(numbers, start=1):
        table = run.round("records", number)
        added = score(number, table)
        known = [name for name in columns if name in table.columns]
        parts.append(table.select(pl.lit(number, dtype=pl.Int64).alias("round"), *known).with_columns(**added))
        if on_round is not None:
            on_round(done, len(numbers))
    return pl.concat(parts, how="diagonal_relaxed")


def average_nearest(cosines: Float[Tensor, "m n"]) -> Float[Tensor, " n"]:
    """Return the mean cosine of each record with its `NEAREST` nearest examples, or with all if they are fewer."""
    return cosines.topk(min(NEAREST, len(cosines)), dim=0).values.mean(dim=0)


def sum_rounds(causes: pl.DataFrame) -> pl.DataFrame:
    """Return what each round did: `round`, `records`, and the sums `raised` (above 0) and `lowered` (below 0)."""
    score = pl.col("score")
    return (
        causes.group_by("round")
        .agg(
            records=pl.len().cast(pl.Int64),
            raised=score.filter(score > 0).sum(),
            lowered=score.filter(score < 0).sum(),
        )
        .sort("round")
    )


@dataclass(frozen=True)
class RankedMoment:
    """A moment among those of all rounds, whose scores are of the decision in question."""

    round: int
    moment: Moment


def rank_moments(causes: pl.DataFrame, *, lowest: bool, most: int) -> list[RankedMoment]:
    """Return the moments of all rounds that speak for a decision most, or against it.

    Args:
        causes: from `find_causes`.
        lowest: True: those that speak against it; False: those that speak for it.
        most: the largest number of moments.
    """
    ranked = [
        RankedMoment(int(number), moment)
        for (number,), table in causes.group_by("round", maintain_order=True)
        for moment in find_moments(table, lowest=lowest, most=PER_ROUND_MOMENTS)
    ]
    return sorted(ranked, key=lambda entry: (-abs(entry.moment.score), entry.moment.record_id))[:most]


def rank_records(causes: pl.DataFrame, *, lowest: bool, most: int) -> pl.DataFrame:
    """Return the records of all rounds that speak for a response most, or against it; the most first.

    Args:
        causes: from `find_causes`.
        lowest: True: those that speak against it; False: those that speak for it.
        most: the largest number of records.
    """
    score = pl.col("score")
    chosen = causes.filter(score < 0 if lowest else score > 0)
    return chosen.sort("score", "record_id", descending=[not lowest, False]).head(most)
