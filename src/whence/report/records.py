"""The lowest and the highest records of a run's rounds, as JSON for the page's table."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from whence.runs import RunDirectory

ROUNDS = 12
"""Rounds of a run that a page holds at most."""

ENDS = 20
"""Records from either end of a round's scores."""

LONGEST = 240
"""Characters of an observation, an action or a reason that a page holds at most."""

LONGEST_TEXT = 2000
"""Characters of a prompt or a response."""


class Column(NamedTuple):
    """A column of the page's table.

    Attributes:
        key: its name in the run directory.
        name: its heading.
        about: its meaning.
        kind: "score", "keep", "reason", "text" or "".
    """

    key: str
    name: str
    about: str = ""
    kind: str = ""


_SCORE = Column("score", "score", "Influence on the target: above 0, training on the record raises it", "score")
_KEPT = Column("keep", "kept", "Whether the record trained", "keep")
_REASON = Column("reason", "reason", "Why the record was dropped", "reason")

STEPS = (
    Column("record_id", "record", "The step of training at which the record was collected"),
    *(_SCORE, _KEPT),
    Column("env_index", "env", "Index of the environment"),
    Column("episode_id", "episode", "Id of the episode"),
    Column("step", "step", "Position in the episode, from 0"),
    Column("action", "action"),
    Column("observation", "observation", kind="text"),
    Column("advantage", "advantage", "As collected, not normalised"),
    Column("return", "return", "Target of the value function"),
    Column("value", "value", "Estimate of the value function"),
    Column("log_prob", "log-prob", "Log-probability of the action"),
    _REASON,
)
"""Columns where records are steps in an environment."""

RESPONSES = (
    Column("record_id", "record", "The response's number, counted from the start of training"),
    *(_SCORE, _KEPT),
    Column("prompt", "prompt", kind="text"),
    Column("response", "response", kind="text"),
    Column("reward", "reward", "Before any penalty"),
    Column("advantage", "advantage", "Of the last token, whitened over the rollout"),
    Column("weight", "weight", "How much the response trained"),
    Column("divergence", "divergence", "From the start model, in nats, as the penalty estimates it"),
    Column("tokens", "tokens", "Length of the response"),
    Column("log_prob", "log-prob", "Log-probability of the whole response"),
    _REASON,
)
"""Columns where records are responses of a language model."""


def list_columns(runs: Iterable[RunDirectory]) -> tuple[Column, ...]:
    """Return the columns for the records of some runs of one kind."""
    return RESPONSES if any(run.config.get("kind") == "language" for run in runs) else STEPS


def browse_run(run: RunDirectory, label: str) -> dict[str, Any]:
    """Return the part of a run that the table shows.

    Args:
        run: the directory, finished or not.
        label: the run's name.
    """
    return {"label": label, "rounds": [_browse_round(run, number) for number in spread(run.rounds(), ROUNDS)]}


def spread(numbers: list[int], most: int) -> list[int]:
    """Return at most `most` of some numbers: the first, the last, and others evenly between."""
    if len(numbers) <= most:
        return numbers
    return [numbers[at] for at in np.linspace(0, len(numbers) - 1, most).round().astype(int)]


def ends(records: pl.DataFrame) -> pl.DataFrame:
    """Return the records of the lowest and the highest scores, lowest first; without scores, the first records."""
    if "score" not in records.columns:
        return records.head(2 * ENDS)
    ordered = records.sort("score", "record_id")
    return ordered if len(ordered) <= 2 * ENDS else pl.concat([ordered.head(ENDS), ordered.tail(ENDS)])


def short_text(value: Any, longest: int = LONGEST) -> str:
    """Return numbers, lists of numbers or text as one line, cut off after `longest` characters.

    Only as many entries are formatted as the line may hold: an observation may have thousands.
    """
    line = (
        ", ".join(_format_entry(entry) for entry in value[:longest])
        if isinstance(value, list)
        else _format_entry(value)
    )
    return line if len(line) <= longest else line[: longest - 1] + "…"


def _browse_round(run: RunDirectory, number: int) -> dict[str, Any]:
    records = run.round("records", number)
    columns = list_columns([run])
    rows = [_make_row(row, columns) for row in ends(records).iter_rows(named=True)]
    return {"round": number, "records": len(records), "scored": "score" in records.columns, "rows": rows}


def _make_row(record: dict[str, Any], columns: Iterable[Column]) -> list[Any]:
    parts = {name: value for name, value in record.items() if name.split(".")[0] == "observation"}
    values = record | {"observation": _join_observation(parts)}
    return [_make_cell(column.key, values.get(column.key)) for column in columns]


def _join_observation(parts: dict[str, Any]) -> Any:
    if parts.keys() <= {"observation"}:
        return parts.get("observation")
    named = (f"{name.removeprefix('observation.')}: {short_text(value)}" for name, value in parts.items())
    return short_text("; ".join(named))


def _make_cell(name: str, value: Any) -> Any:
    if isinstance(value, float):
        # JSON has no infinities and no NaN, and float32 has no more than these digits.
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if name in ("prompt", "response"):
        return short_text(value, LONGEST_TEXT)
    return short_text(value) if isinstance(value, str | Iterable) else value


def _format_entry(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
