"""What episodes earned, and how long they were, by the round in which they ended."""

import threading
from functools import lru_cache
from pathlib import Path

import polars as pl

from whence.core import require_file
from whence.page.content.explored_run import stamp_file
from whence.runs import RunDirectory

_READING = threading.Lock()
"""Held while rounds are read: of two requests at once, the later one finds them read."""

_COLUMNS = pl.Schema({"episode_id": pl.Int64, "step": pl.Int64, "reward": pl.Float64, "end": pl.String})


def read_metrics(run: RunDirectory) -> pl.DataFrame:
    """Return a run's metrics; of an agent with the means over the episodes that ended in each round.

    These are `round_return`, of the rewards as the environment paid them, and `round_length`, in steps: null in a round
    in which no episode ended. Episodes that began before the run's first record are left out.
    """
    metrics = run.table("metrics")
    if run.is_language or metrics.is_empty():
        return metrics
    paths = [(number, run.round_path("records", number)) for number in run.rounds()]
    with _READING:
        parts = [_sum_episodes(number, path, stamp_file(path)) for number, path in paths]
    if not parts:
        return metrics
    episodes = (
        pl.concat(parts)
        .group_by("episode_id")
        .agg(pl.col("total", "length").sum(), pl.col("first").min(), pl.col("round").filter("ended").last())
    )
    whole = episodes.filter(pl.col("first") == 0).drop_nulls("round").group_by("round")
    means = whole.agg(round_return=pl.col("total").mean(), round_length=pl.col("length").mean())
    return metrics.join(means, on="round", how="left", maintain_order="left") if len(means) else metrics


@lru_cache(maxsize=20_000)
def _sum_episodes(number: int, path: Path, stamp: tuple[int, int] | None) -> pl.DataFrame:
    """Return a round's part of each episode: its rewards' sum, its steps, the first of them, and whether it ended.

    No rows of a file that is damaged, or lacks these columns. A page that is asked for news reads a round once.
    """
    try:
        table = pl.read_parquet(require_file(path), columns=[*_COLUMNS], glob=False).cast(_COLUMNS)
    except (OSError, pl.exceptions.PanicException, pl.exceptions.PolarsError):
        table = pl.DataFrame(schema=_COLUMNS)
    return (
        table.drop_nulls(["episode_id", "step"])
        .group_by("episode_id")
        .agg(
            total=pl.col("reward").sum(),
            length=pl.len(),
            first=pl.col("step").min(),
            ended=(pl.col("end").fill_null("") != "").any(),
            round=pl.lit(number),
        )
    )
