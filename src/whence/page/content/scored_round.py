"""One round's records with their scores, which are computed when the round is looked at if training computed none."""

from contextlib import suppress
from typing import NamedTuple

import polars as pl

from whence.core import RunDirectoryError, WhenceError, first_line
from whence.runs import RunDirectory
from whence.scores import is_significant
from whence.stored.agents import AnyEnv, score_round, show_taken_actions


class Round(NamedTuple):
    """The records of a round as the page shows them.

    Attributes:
        table: its records, with scores if they were stored or could be computed, and whether they differ from 0.
        scored: whether there is a score.
        notes: what is missing, and what was computed on demand.
    """

    table: pl.DataFrame
    scored: bool
    notes: list[str]


def read_round(run: RunDirectory, number: int, *, env: AnyEnv, can_score: bool) -> Round:
    """Return a round's records, scored on demand if they were not.

    A round whose file is damaged has no records, and a note.
    """
    notes: list[str] = []
    try:
        table = run.round("records", number)
    except RunDirectoryError as broken:
        return Round(pl.DataFrame(schema={"record_id": pl.Int64}), False, [str(broken)])
    if "score" not in table.columns and can_score and len(table):
        table = _add_scores(run, table, number, env, notes)
    elif "score" not in table.columns:
        notes.append(
            "No response of this round was scored. To see scores, train with the rule `ScoreAll()`, which keeps all "
            "responses, or give the rollouts to `whence llm score`."
        )
    with suppress(ValueError, KeyError, TypeError, WhenceError):  # a space that is not stored in this way
        table = show_taken_actions(run, table)
    if "score" in table.columns:  # JSON has no NaN
        table = table.with_columns(score=pl.when(pl.col("score").is_finite()).then(pl.col("score")))
    if {"score", "tokens"} <= {*table.columns}:
        table = table.with_columns(score_per_token=pl.col("score") / pl.col("tokens").clip(lower_bound=1))
    if {"score", "error"} <= {*table.columns}:
        pairs = table.select("score", "error").iter_rows()
        table = table.with_columns(differs=pl.Series([is_significant(*pair) for pair in pairs], dtype=pl.Boolean))
    return Round(table, "score" in table.columns, notes)


def _add_scores(run: RunDirectory, table: pl.DataFrame, number: int, env: AnyEnv, notes: list[str]) -> pl.DataFrame:
    try:
        scores = score_round(run, number, env=env).to_polars()
    except Exception as refusal:
        notes.append(f"Nothing was scored in this round, and scoring it now failed: {first_line(refusal)}")
        return table
    notes.append(
        "Nothing was scored while this round trained. These scores were computed now, for the return, by the policy "
        "that collected the round."
    )
    return table.join(scores, on="record_id", how="left", maintain_order="left")
