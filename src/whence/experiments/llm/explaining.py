"""Parts of a response's score: by its tokens, and by the target's rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from whence.errors import RunDirectoryError
from whence.experiments.llm.language_rebuilding import RebuiltRound, rebuild_round
from whence.llm.base import list_tokens
from whence.llm.scores import score_target_rows, score_tokens, split_mean
from whence.llm.text import split_text
from whence.runs import RunDirectory

NEARLY = 0.01
"""Of a round's largest score: a score that is computed again and differs by more is said to differ."""


@dataclass(frozen=True)
class Explanation:
    """A response's score, taken apart.

    Attributes:
        row: the response's row of the round's records.
        tokens: the text that each token of the response adds.
        parts: the part of the score that each token contributes.
        pulls: the target's rows, the largest part first, with `part`, `prompt` and `response`, and for rows of the
            round their `record` and `advantage`. Above 0, training on the response raises the row's term.
        note: how a score that was computed again differs from the stored one; None: it does not.
    """

    row: Mapping[str, Any]
    tokens: list[str]
    parts: list[float]
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
    scoring = rebuilt.scoring
    settings: Any = {name: getattr(scoring, name) for name in ("objective", "temperature", "chunk_size")}
    parts = score_tokens(rebuilt.model, alone, target=scoring.target, **settings)[0].tolist()
    products = score_target_rows(rebuilt.model, alone, 0, target=scoring.target, **settings)
    pulls = _describe_target_rows(rebuilt).with_columns(part=pl.Series(products.tolist())).sort("part", descending=True)
    tokens = split_text(rebuilt.tokenizer, row["response_ids"])
    return Explanation(row, tokens, parts[: len(tokens)], pulls, _compare(table, row, float(products.sum())))


def _describe_target_rows(rebuilt: RebuiltRound) -> pl.DataFrame:
    """Return record, prompt, response and advantage of the target's rows; of demonstrations the texts alone."""
    rows, _ = split_mean(rebuilt.scoring.target, rebuilt.rows)
    if rows is rebuilt.rows:
        return rebuilt.table.select(pl.col("record_id").alias("record"), "prompt", "response", "advantage")
    texts = {
        name: [rebuilt.tokenizer.decode(ids, skip_special_tokens=True) for ids in column.to_list()]
        for name, column in zip(("prompt", "response"), list_tokens(rows), strict=True)
    }
    return pl.DataFrame(texts).with_columns(record=pl.lit(None, pl.Int64), advantage=pl.lit(None, pl.Float64))


def _compare(table: pl.DataFrame, row: Mapping[str, Any], score: float) -> str | None:
    if row.get("score") is None or abs(score - row["score"]) <= NEARLY * table["score"].abs().max():  # type: ignore[operator]
        return None
    return (
        f"Computed again, the score is {score:.4g}, and {row['score']:.4g} was stored: the run had another precision, "
        "device or version, or its model or data have changed since."
    )
