"""The lowest and the highest records of a run's rounds, as JSON for the page's table."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import polars as pl

from whence.runs import RunDirectory

ROUNDS = 12
"""Rounds of a run that a page holds at most."""

ENDS = 20
"""Records from either end of a round's scores."""

LONGEST = 240
"""Characters of an observation, an action or a reason that a page holds at most."""

COLUMNS = (
    *("record_id", "score", "keep", "env_index", "episode_id", "step", "action", "observation"),
    *("advantage", "return", "value", "log_prob", "reason"),
)
"""The columns of a round's rows, by the names they have in the run directory."""


def browsed(run: RunDirectory, label: str) -> dict[str, Any]:
    """Return what the table shows of one run.

    Args:
        run: the directory, finished or not.
        label: what the run is called.
    """
    return {"label": label, "rounds": [_round(run, number) for number in spread(run.rounds(), ROUNDS)]}


def spread(numbers: list[int], most: int) -> list[int]:
    """Return at most `most` of some numbers: the first, the last, and what lies evenly between."""
    if len(numbers) <= most:
        return numbers
    return [numbers[at] for at in np.linspace(0, len(numbers) - 1, most).round().astype(int)]


def ends(records: pl.DataFrame) -> pl.DataFrame:
    """Return the records of the lowest and the highest scores, lowest first; without scores, the first records."""
    if "score" not in records.columns:
        return records.head(2 * ENDS)
    ordered = records.sort("score", "record_id")
    return ordered if len(ordered) <= 2 * ENDS else pl.concat([ordered.head(ENDS), ordered.tail(ENDS)])


def short_text(value: Any) -> str:
    """Return numbers, lists of numbers or text as one short line, its end cut off where it is longer than a page holds.

    Nothing is written out that would be cut off: an observation may hold thousands of numbers.
    """
    line = ", ".join(_entry(entry) for entry in value[:LONGEST]) if isinstance(value, list) else _entry(value)
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def _round(run: RunDirectory, number: int) -> dict[str, Any]:
    records = run.round("records", number)
    rows = [_row(row) for row in ends(records).iter_rows(named=True)]
    return {"round": number, "records": len(records), "scored": "score" in records.columns, "rows": rows}


def _row(record: dict[str, Any]) -> list[Any]:
    whole = {name: value for name, value in record.items() if name.split(".")[0] == "observation"}
    shown = record | {"observation": _observation(whole)}
    return [_cell(name, shown.get(name)) for name in COLUMNS]


def _observation(parts: dict[str, Any]) -> Any:
    if parts.keys() <= {"observation"}:
        return parts.get("observation")
    named = (f"{name.removeprefix('observation.')}: {short_text(value)}" for name, value in parts.items())
    return short_text("; ".join(named))


def _cell(name: str, value: Any) -> Any:
    if isinstance(value, float):
        # JSON knows no other floats, and float32 has no more than these digits.
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return short_text(value) if isinstance(value, str | Iterable) else value


def _entry(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
