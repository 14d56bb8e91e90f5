"""Judgement of the advantages that a round trained on, record by record (LDA §4.1)."""

from typing import Literal, TypeAlias

import numpy as np
import polars as pl

from studies.diagnosis.visits import compare_signs, measure_visits
from whence.runs import RunDirectory
from whence.stored.agents import estimate_advantages, read_reward_scale, score_round

Measure: TypeAlias = Literal["visits", "rollouts"]

SHARE = 0.2
"""The share of a round's records in its top and in its bottom band, as LDA's Fig. 3 shades them."""


def judge_advantages(
    run: RunDirectory, number: int, measure: Measure, *, records: int = 200, continuations: int = 16, seed: int = 0
) -> pl.DataFrame:
    """Measure the advantages of a round's records, and compare them with those that the round trained on.

    Visits: the mean discounted return of the rollout's visits of a record's state and action, minus that of its state.
    They cost nothing, but need states that occur again; a record's own return is in both advantages. Rollouts: fresh
    continuations from the record's rebuilt state; see `estimate_advantages`.

    Values and advantages are in the environment's rewards.

    Args:
        run: the run. A round that trained without scores is scored now, for the return.
        number: the round, from 1.
        measure: visits, of all records; or rollouts.
        records: how many rollouts judge. They are one each, at random, of as many equal bands of the scores.
        continuations: rollouts from each record with its action, and as many with the policy's; at least 2.
        seed: seeds the choice of records, environments and actions.

    Returns:
        A row for each judged record, in the order of ids, with the round's columns; `position` (the share of the
        round's records that score higher) and `band` ("top": the first fifth, "bottom": the last, else "middle");
        `mc_advantage`, `mc_error` and `mc_value` (null where unknown); `mismatch` (the two advantages differ in sign),
        `certain` (the measured one is further from 0 than two of its errors); and `measured`: "visits" or "rollouts".
    """
    scale = read_reward_scale(run, number)
    table = place_in_bands(read_scored_round(run, number)).with_columns(pl.col("value", "advantage") * scale)
    if measure == "visits":
        measured = measure_visits(run, number, least=0)
        assert measured is not None, "visits need discrete actions"
    else:
        table = draw_by_score(table.drop_nulls(["episode_id", "step"]), records, seed)
        ids = table["record_id"].to_list()
        measured = estimate_advantages(run, number, ids, continuations=continuations, seed=seed)
    judged = compare_signs(table.join(measured, on="record_id", how="left"))
    return judged.with_columns(measured=pl.lit(measure)).sort("record_id")


def read_scored_round(run: RunDirectory, number: int) -> pl.DataFrame:
    """Return a round's records that have a score: the stored one, else one for the return that is computed now."""
    table = run.round("records", number)
    if "score" not in table.columns:
        table = table.join(score_round(run, number).to_polars(), on="record_id", maintain_order="left")
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


def draw_by_score(table: pl.DataFrame, count: int, seed: int) -> pl.DataFrame:
    """Return a table of `place_in_bands`, or one record at random of each of `count` equal bands of its scores."""
    if count >= len(table):
        return table
    generator = np.random.default_rng(seed)
    bands = np.array_split(np.argsort(table["position"].to_numpy()), count)
    return table[sorted(int(generator.choice(band)) for band in bands)]
