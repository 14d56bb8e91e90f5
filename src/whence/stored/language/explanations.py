"""A response's score, taken apart by the response's tokens and by the target's rows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
import torch

from whence.core import RunDirectoryError
from whence.llm.base import list_tokens
from whence.llm.scores import evaluate_rows, score_target_rows, score_tokens, split_mean
from whence.llm.text import split_text
from whence.runs import RunDirectory
from whence.stored.language.rounds import RebuiltRound, rebuild_round

NEARLY = 0.01
"""Of a round's largest score: a score that is computed again and differs by more is said to differ."""


@dataclass(frozen=True)
class Explanation:
    """A response's score, taken apart.

    Attributes:
        row: the response's row of the round's records.
        tokens: the text that each token of the response adds.
        parts: the part of the score that each token contributes.
        log_probs: of each token, under the round's policy.
        entropies: of what could have stood there, in nats.
        pulls: the target's rows, the largest part first, with `part`, `prompt` and `response`, and for rows of the
            round their `record` and `advantage`. Above 0, training on the response raises the row's term.
        note: how a score that was computed again differs from the stored one; None: it does not.
    """

    row: Mapping[str, Any]
    tokens: list[str]
    parts: list[float]
    log_probs: list[float]
    entropies: list[float]
    pulls: pl.DataFrame
    note: str | None


def explain_response(run: RunDirectory, number: int, record: int) -> Explanation:
    """Return a response's tokens with their parts of its score, and the target's rows that it pulls at.

    They are computed by the round's policy, which is built again.

    Args:
        run: the run's directory.
        number: the round.
        record: the response's record id.

    Raises:
        RunDirectoryError: the round or the record is not there.
        WhenceError: the round cannot be built again.
    """
    table = run.round("records", number)
    places = (table["record_id"] == record).arg_true()
    if not len(places):
        raise RunDirectoryError(f"Round {number} of {run.path} has no record {record}.")
    position = int(places[0])
    row, rebuilt = table.row(position, named=True), rebuild_round(run, number)
    alone = rebuilt.rows.take(slice(position, position + 1))
    if run.config.get("leave_one_out") == "row" and rebuilt.scoring.target.rows is rebuilt.rows:  # type: ignore[attr-defined]
        rebuilt = _leave_out(rebuilt, position)
    scoring = rebuilt.scoring
    settings: Any = {name: getattr(scoring, name) for name in ("objective", "temperature", "chunk_size")}
    parts = score_tokens(rebuilt.model, alone, target=scoring.target, **settings)
    products = score_target_rows(rebuilt.model, alone, 0, target=scoring.target, **settings)
    pulls = _describe_target_rows(rebuilt).with_columns(part=pl.Series(products.tolist())).sort("part", descending=True)
    tokens = split_text(rebuilt.tokenizer, row["response_ids"])
    note = _compare(run, table, row, float(products.sum()))
    outputs = evaluate_rows(rebuilt.model, alone, scoring.temperature, 1, with_entropy=True)
    assert outputs.entropy is not None
    columns = (parts, outputs.log_prob, outputs.entropy)
    part, log_prob, entropy = (column[0, : len(tokens)].tolist() for column in columns)
    return Explanation(row, tokens, part, log_prob, entropy, pulls, note)


def _leave_out(rebuilt: RebuiltRound, position: int) -> RebuiltRound:
    """Return a round, and its target, without one of the rows."""
    others = torch.arange(len(rebuilt.rows)) != position
    rows, target = rebuilt.rows.take(others), rebuilt.scoring.target
    scoring = replace(rebuilt.scoring, target=replace(target, rows=rows))  # type: ignore[type-var]
    return replace(rebuilt, table=rebuilt.table.filter(pl.Series(others.numpy())), rows=rows, scoring=scoring)


def _describe_target_rows(rebuilt: RebuiltRound) -> pl.DataFrame:
    """Return record, prompt, response and advantage of the target's rows; of demonstrations the texts alone."""
    rows, _ = split_mean(rebuilt.scoring.target, rebuilt.rows)
    if rows is rebuilt.rows:
        return rebuilt.table.select(pl.col("record_id").alias("record"), "prompt", "response", "advantage")
    texts = {
        name: [rebuilt.tokenizer.decode(ids, skip_special_tokens=True) for ids in column.to_list()]
        for name, column in zip(("prompt", "response"), list_tokens(rows)[:2], strict=True)
    }
    return pl.DataFrame(texts).with_columns(record=pl.lit(None, pl.Int64), advantage=pl.lit(None, pl.Float64))


def _compare(run: RunDirectory, table: pl.DataFrame, row: Mapping[str, Any], score: float) -> str | None:
    if row.get("score") is None or abs(score - row["score"]) <= NEARLY * table["score"].abs().max():  # type: ignore[operator]
        return None
    if run.config.get("select") == "in_step":
        return (
            f"Before the round's steps the score is {score:.4g}. {row['score']:.4g} was stored: the run scored each "
            "response in its own first step, by a gradient of the target that was known before."
        )
    return (
        f"Computed again, the score is {score:.4g}, and {row['score']:.4g} was stored: the run had another precision, "
        "device or version, or its model or data have changed since."
    )
