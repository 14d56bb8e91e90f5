"""Judgement of the advantages that a round trained on, by the rollout's repeated visits (LDA §4.1)."""

import numpy as np
import polars as pl

from whence.lab.visits import has_single_actions, measure_by_visits
from whence.runs import RunDirectory
from whence.scores import SIGNIFICANT
from whence.stored.agents import AnyEnv, load_round, read_reward_scale

REPEATS = 10
"""From so many visits of a record's state and action on, in the median, visits judge advantages."""

ROUNDING = 1e-9
"""A measured advantage below this share of the largest value is 0: means of equal returns may differ by rounding."""


def measure_visits(
    run: RunDirectory, number: int, *, env: AnyEnv = None, least: float = REPEATS
) -> pl.DataFrame | None:
    """Return what a rollout's repeated visits measure of each record, in the environment's rewards.

    None: a record's state and action have, in the median, less than `least` visits; or actions are not discrete, a
    column is missing, or observations were too large to store (which are observed again if `least` is 0).

    Returns:
        `record_id`, `mc_advantage`, `mc_error` (null where unknown) and `mc_value`.
    """
    stored = run.round("records", number).columns
    if least > 0 and not any(name.split(".")[0] == "observation" for name in stored):
        return None
    _, records = load_round(run, number, env=env)
    needed = (records.rewards, records.values, records.episode_starts, records.env_index)
    if not has_single_actions(records) or any(column is None for column in needed):
        return None
    visited = measure_by_visits(records)
    if np.median(visited.visits) < least:
        return None
    scale = read_reward_scale(run, number)
    rounding = ROUNDING * float(np.abs(np.concatenate([visited.advantages, visited.values])).max(initial=0.0))
    return pl.DataFrame(
        {
            "record_id": records.ids.numpy(),
            "mc_advantage": scale * np.where(np.abs(visited.advantages) <= rounding, 0.0, visited.advantages),
            "mc_error": scale * visited.errors,
            "mc_value": scale * visited.values,
        }
    ).with_columns(pl.col("mc_error").fill_nan(None))


def compare_signs(judged: pl.DataFrame) -> pl.DataFrame:
    """Return a table with `mismatch` and `certain`, from `advantage`, `mc_advantage` and `mc_error`."""
    measured = pl.col("mc_advantage")
    return judged.with_columns(
        mismatch=measured.sign() != pl.col("advantage").cast(pl.Float64).sign(),
        certain=measured.abs() > SIGNIFICANT * pl.col("mc_error"),
    )
