"""Judgement of the advantages that a round trained on, record by record (LDA §4.1)."""

from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np
import polars as pl

from whence.core import ReplayError, WhenceError, suggest
from whence.experiments import AnyEnv, OnRecord, estimate_advantages, load_round, read_reward_scale, score_round
from whence.influence import SIGNIFICANT
from whence.runs import RunDirectory
from whence.selection import has_single_actions, measure_by_visits, number_states

Measure: TypeAlias = Literal["auto", "visits", "rollouts"]

SAMPLE = 200
"""Records that fresh rollouts judge where nobody says how many."""

REPEATS = 10
"""From so many visits of a record's state and action on, in the median, visits are what "auto" measures by."""

SHARE = 0.2
"""The share of a round's records in its top and in its bottom band, as LDA's Fig. 3 shades them."""

ROUNDING = 1e-9
"""A measured advantage below this share of the largest value is 0: means of equal returns may differ by rounding."""

COLUMNS = (
    *("record_id", "episode_id", "step", "action", "reward", "value", "advantage", "score", "error"),
    *("position", "band", "mc_advantage", "mc_error", "mc_value", "mc_value_error"),
    *("mismatch", "certain", "measured", "reward_scale"),
)
"""The columns of a judgement, as far as the round has them."""


def judge_advantages(
    run: RunDirectory | str | Path,
    number: int,
    *,
    records: int | None = None,
    continuations: int = 16,
    measure: Measure = "auto",
    env: AnyEnv = None,
    seed: int = 0,
    on_record: OnRecord | None = None,
) -> pl.DataFrame:
    """Measure the advantages of a round's records, and compare them with those that the round trained on.

    Visits: the mean discounted return of the rollout's visits of a record's state and action, minus that of its state.
    They cost nothing, but need states that occur again; a record's own return is in both advantages. Rollouts: fresh
    continuations from the record's rebuilt state; see `estimate_advantages`.

    Values and advantages are in the environment's rewards: those that the round trained on are multiplied by
    `reward_scale`, which is not 1 if VecNormalize scaled rewards. See `whence.experiments.read_reward_scale`.

    Args:
        run: the run, or its directory. A round that trained without scores is scored now, for the return.
        number: the round, from 1.
        records: how many to judge. They are one each, at random, of as many equal bands of the scores. None: all by
            visits, 200 by rollouts.
        continuations: rollouts from each record with its action, and as many with the policy's; at least 2.
        measure: "visits", "rollouts"; or "auto": visits if half of the records share their state and action with at
            least nine others.
        env: the environment, if the run's configuration does not name it; see `replay_episode`.
        seed: seeds the choice of records, environments and actions.
        on_record: called after each record that rollouts have judged.

    Returns:
        A row for each judged record, in the order of ids: `record_id`, `episode_id`, `step`, `action`, `reward`,
        `value`, `advantage`, `score`, `error`; `position` (the share of the round's records that score higher) and
        `band` ("top": the first fifth, "bottom": the last, else "middle"); `mc_advantage` and `mc_error`, `mc_value`
        and `mc_value_error` (null where unknown); `mismatch` (the two advantages differ in sign), `certain` (the
        measured one is further from 0 than two of its errors); `measured`: "visits" or "rollouts"; and `reward_scale`.

    Raises:
        WhenceError: a number is out of range, `measure` is unknown, or visits are asked for and no state occurs twice.
        ReplayError: an episode cannot be played again.
        RunDirectoryError: the round is not there, or its policy cannot be built again.
        InvalidRecords: visits are asked for, and actions are not discrete.
    """
    run = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
    if measure not in get_args(Measure):
        raise WhenceError(f"measure is {measure!r}.{suggest(str(measure), get_args(Measure))}")
    if records is not None and records < 1:
        raise WhenceError(f"records is {records}; it is a number of records to judge, 1 or more.")
    scale = read_reward_scale(run, number)
    table = place_in_bands(read_scored_round(run, number, env))
    in_rewards = [pl.col(name) * scale for name in ("value", "advantage") if name in table.columns]
    table = table.with_columns(*in_rewards, reward_scale=pl.lit(scale))
    visited = None
    if measure != "rollouts":
        visited = measure_visits(run, number, env=env, least=REPEATS if measure == "auto" else 0)
    if visited is not None:
        return _finish(draw_by_score(table, records, seed), visited, "visits")
    placed = table.drop_nulls([name for name in ("episode_id", "step") if name in table.columns])
    chosen = draw_by_score(placed, SAMPLE if records is None else records, seed)
    ids = chosen["record_id"].to_list()
    if not ids:
        raise ReplayError(
            f"No record of round {number} of {run.path} has a score and a known place in an episode. Take a later "
            "round, or measure by visits: measure='visits' (--measure visits)."
        )
    rolled = estimate_advantages(run, number, ids, env=env, continuations=continuations, seed=seed, on_record=on_record)
    return _finish(chosen, rolled, "rollouts")


def _finish(chosen: pl.DataFrame, measured: pl.DataFrame, name: str) -> pl.DataFrame:
    """Return the chosen records with what was measured of them, and the two advantages compared."""
    judged = compare_signs(chosen.join(measured, on="record_id", how="left")).with_columns(measured=pl.lit(name))
    return judged.select(column for column in COLUMNS if column in judged.columns).sort("record_id")


def read_scored_round(run: RunDirectory, number: int, env: AnyEnv = None) -> pl.DataFrame:
    """Return a round's records that have a score: the stored one, else one for the return that is computed now.

    Raises:
        WhenceError: the run is a language model's.
        RunDirectoryError: see `whence.experiments.load_round`.
    """
    if run.is_language:
        raise WhenceError(f"{run.path} is a language-model run: it has no states from which to measure an advantage.")
    table = run.round("records", number)
    if "score" not in table.columns:
        table = table.join(score_round(run, number, env=env).to_polars(), on="record_id", maintain_order="left")
    return table.drop_nulls("score")


def place_in_bands(table: pl.DataFrame) -> pl.DataFrame:
    """Return records with `position`, the share of records that score higher, and `band`.

    Among equal scores the lower id comes last, as among those to drop.
    """
    order = np.lexsort((-table["record_id"].to_numpy(), -table["score"].to_numpy()))
    position = np.empty(len(table))
    position[order] = np.arange(len(table)) / max(len(table), 1)
    # In whole records, since 4/5 has no exact binary form.
    ends = round(SHARE * len(table))
    ranks = np.argsort(order)
    band = np.select([ranks < ends, ranks >= len(table) - ends], ["top", "bottom"], "middle")
    return table.with_columns(pl.Series("position", position), pl.Series("band", band))


def draw_by_score(table: pl.DataFrame, count: int | None, seed: int) -> pl.DataFrame:
    """Return a table of `place_in_bands`, or one record at random of each of `count` equal bands of its scores."""
    if count is None or count >= len(table):
        return table
    generator = np.random.default_rng(seed)
    bands = np.array_split(np.argsort(table["position"].to_numpy()), count)
    return table[sorted(int(generator.choice(band)) for band in bands)]


def measure_visits(run: RunDirectory, number: int, *, env: AnyEnv = None, least: float = 0) -> pl.DataFrame | None:
    """Return what a rollout's repeated visits measure of each record; None if they are too few.

    They are too few if a record's state and action have, in the median, less than `least` visits. If that is above 0,
    None is returned as well if observations were too large to store, actions are not discrete, or a column is missing.

    Returns:
        `record_id`, `mc_advantage`, `mc_error`, `mc_value`, and `mc_value_error`, which is null.

    Raises:
        InvalidRecords: `least` is 0, and the records lack what is needed.
        WhenceError: `least` is 0, and no state occurs twice.
    """
    stored = run.round("records", number).columns
    if least > 0 and not any(name.split(".")[0] == "observation" for name in stored):
        return None
    _, records = load_round(run, number, env=env)
    needed = (records.rewards, records.values, records.episode_starts, records.env_index)
    if least > 0 and not (has_single_actions(records) and all(column is not None for column in needed)):
        return None
    visited = measure_by_visits(records)
    if least == 0 and len(np.unique(number_states(records))) == len(records):
        raise WhenceError(
            f"No state occurs twice in round {number} of {run.path}, so that visits measure no advantage. Measure by "
            "fresh rollouts: measure='rollouts' (--measure rollouts)."
        )
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
    ).with_columns(pl.col("mc_error").fill_nan(None), mc_value_error=pl.lit(None, pl.Float64))


def compare_signs(judged: pl.DataFrame) -> pl.DataFrame:
    """Return a table with `mismatch` and `certain`, from `advantage`, `mc_advantage` and `mc_error`."""
    measured = pl.col("mc_advantage")
    return judged.with_columns(
        mismatch=measured.sign() != pl.col("advantage").cast(pl.Float64).sign(),
        certain=measured.abs() > SIGNIFICANT * pl.col("mc_error"),
    )
