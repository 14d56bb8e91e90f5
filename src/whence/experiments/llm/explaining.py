"""Parts of a response's score: by its tokens, and by the target's rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from whence.errors import RunDirectoryError
from whence.experiments.llm.language_rebuilding import RebuiltRound, rebuild_round
from whence.llm.scores.language_targets import split_mean
from whence.llm.scores.token_scores import score_target_rows, score_tokens
from whence.llm.text.generation import split_text
from whence.runs import RunDirectory

NEARLY = 0.01
"""Of a round's largest score: a score that is computed again and differs by more is said to differ."""


@dataclass(frozen=True)
class Pull:
    """A row of the target, and what training on the explained response does to it.

    Attributes:
        part: the part of the response's score; above 0, training on the response raises this row's term.
        record: the row's record id in the round; None: it is a demonstration.
        prompt: its prompt.
        response: its response.
        advantage: the advantage of its last token; None for a demonstration.
    """

    part: float
    record: int | None
    prompt: str
    response: str
    advantage: float | None


@dataclass(frozen=True)
class Explanation:
    """A response's score, taken apart.

    Attributes:
        row: the response's row of the round's records.
        tokens: the text that each token of the response adds.
        parts: the part of the score that each token contributes.
        pulls: the target's rows, the largest part first; None: they were not computed.
        notes: what is missing or differs, in sentences.
    """

    row: Mapping[str, Any]
    tokens: list[str]
    parts: list[float]
    pulls: list[Pull] | None
    notes: list[str]


def explain_response(run: RunDirectory, number: int, record: int, *, pulls: bool = True) -> Explanation:
    """Return a response's tokens with their parts of its score, and the target's rows that it pulls at.

    They are computed by the round's policy, which is built again.

    Args:
        run: the run's directory.
        number: the round.
        record: the response's record id.
        pulls: whether the parts of the target's rows are computed: a pass over them.

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
    tokens, parts = split_text(rebuilt.tokenizer, row["response_ids"]), _score_tokens(rebuilt, position)
    pulled = _list_pulls(rebuilt, position) if pulls else None
    notes = _compare(table, row, sum(parts) if pulled is None else sum(pull.part for pull in pulled))
    return Explanation(row, tokens, parts, pulled, notes)


def _score_tokens(rebuilt: RebuiltRound, position: int) -> list[float]:
    alone = rebuilt.rows.take(slice(position, position + 1))
    parts: list[float] = score_tokens(
        rebuilt.model,
        alone,
        target=rebuilt.target,
        objective=rebuilt.objective,
        temperature=rebuilt.temperature,
        memory=rebuilt.memory,
        chunk_size=rebuilt.chunk_size,
    )[0].tolist()
    return parts[: len(rebuilt.table["response_ids"][position])]


def _list_pulls(rebuilt: RebuiltRound, position: int) -> list[Pull]:
    """Return the target's rows, the largest part first."""
    products = score_target_rows(
        rebuilt.model,
        rebuilt.rows.take(slice(position, position + 1)),
        0,
        target=rebuilt.target,
        objective=rebuilt.objective,
        temperature=rebuilt.temperature,
        memory=rebuilt.memory,
        chunk_size=rebuilt.chunk_size,
    ).tolist()
    rows, _ = split_mean(rebuilt.target, rebuilt.rows)
    if rows is rebuilt.rows:
        columns = rebuilt.table.select("record_id", "prompt", "response", "advantage").rows()
    else:
        columns = [(None, *_decode(rebuilt.tokenizer, rows, at), None) for at in range(len(rows))]
    pulls = [Pull(product, *column) for product, column in zip(products, columns, strict=True)]
    return sorted(pulls, key=lambda pull: -pull.part)


def _decode(tokenizer: Any, rows: Any, position: int) -> tuple[str, str]:
    """Return the texts of a row's prompt and response."""
    columns = rows.observations
    ids, mask = columns["input_ids"][position], columns["attention_mask"][position].bool()
    width = columns["response_mask"].shape[1]
    prompt, response = ids[:-width][mask[:-width]], ids[-width:][mask[-width:]]
    return tokenizer.decode(prompt, skip_special_tokens=True), tokenizer.decode(response, skip_special_tokens=True)


def _compare(table: pl.DataFrame, row: Mapping[str, Any], score: float) -> list[str]:
    """Say if a score that was computed again is not the stored one."""
    if row.get("score") is None:
        return []
    largest: Any = table["score"].abs().max()
    if abs(score - row["score"]) <= NEARLY * largest:
        return []
    return [
        f"Computed again, the score is {score:.4g}, and {row['score']:.4g} was stored: the run had another precision, "
        "device or version, or its model or data have changed since."
    ]
