"""Run directories as they are found: whole, half-written, damaged or foreign."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from whence.errors import RunDirectoryError, WhenceError, first_line
from whence.runs import RunDirectory, Table

_NUMBERS: dict[str, Any] = {
    **dict.fromkeys(("record_id", "env_index", "episode_id", "step", "tokens"), pl.Int64),
    **dict.fromkeys(("score", "error", "weight", "value", "advantage", "return", "reward", "log_prob"), pl.Float64),
    "divergence": pl.Float64,
    "keep": pl.Boolean,
}
"""Columns that the page computes with."""

_TEXTS = ("reason", "prompt", "response")

FOREIGN = (
    *(AttributeError, IndexError, KeyError, OSError, OverflowError, RuntimeError, TypeError, ValueError),
    pl.exceptions.PolarsError,
)
"""What files that whence did not write may make a computation raise."""


def open_run(path: str | Path) -> tuple[RunDirectory, list[str]]:
    """Open what there is of a run, and say what is not.

    Args:
        path: the directory; its config.json may be missing or damaged if there are tables or rounds.

    Returns:
        The run, and a sentence for each thing that is missing.

    Raises:
        RunDirectoryError: nothing in the directory is a run's.
    """
    path = Path(path)
    try:
        return RunDirectory.open(path), []
    except RunDirectoryError as refusal:
        tables = [path / name for name in ("metrics.parquet", "evaluations.parquet")]
        if not (any((path / "records").glob("round_*.parquet")) or any(table.exists() for table in tables)):
            raise
        note = f"{refusal} The page shows the tables and records that are there."
        return RunDirectory(path, _salvage_config(path), {}), [note]


def _salvage_config(path: Path) -> dict[str, Any]:
    """Return the configuration in a file of another format or version, as far as it is one."""
    try:
        document = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        return {}
    config = document.get("config") if isinstance(document, dict) else None
    return config if isinstance(config, dict) else {}


def read_table(run: RunDirectory, name: Table, notes: list[str] | None = None) -> pl.DataFrame:
    """Read a table of a run, with its column `round` in whole numbers; empty, and a note, if it cannot be read."""
    try:
        table = run.table(name)
    except (WhenceError, OSError) as refusal:
        _add_note(notes, first_line(refusal))
        return pl.DataFrame()
    if table.is_empty():
        return table
    if "round" not in table.columns or not _is_number(table.schema["round"]):
        _add_note(notes, f"{run.path / f'{name}.parquet'} has no column of round numbers, so it is left out.")
        return pl.DataFrame()
    return table.with_columns(pl.col("round").cast(pl.Int64, strict=False)).drop_nulls("round")


def locate_records(run: RunDirectory, number: int) -> Path:
    """Return the file of a round's records.

    Raises:
        RunDirectoryError: the round has none.
    """
    path = run.round_path("records", number)
    if not path.is_file():
        numbers = run.rounds()
        there = f"rounds {numbers[0]} to {numbers[-1]}" if numbers else "no rounds"
        raise RunDirectoryError(f"Round {number} is not there; {run.path} holds records of {there}.")
    return path


def scan_records(run: RunDirectory, number: int, notes: list[str] | None = None) -> pl.LazyFrame:
    """Return a round's records, unread, with the types that the page computes with.

    A column of another type that no cast turns into the needed one is left out, with a note. Records without an id are
    numbered from 0.

    Args:
        run: the run.
        number: the round.
        notes: gets a sentence for each thing that is wrong.

    Raises:
        RunDirectoryError: the round is not there or cannot be read.
    """
    path = locate_records(run, number)
    with explain_parquet(path):
        schema = pl.read_parquet_schema(path)
        frame = pl.scan_parquet(path, glob=False)
    return normalise_records(frame, schema, notes)


def normalise_records(frame: pl.LazyFrame, schema: Any, notes: list[str] | None = None) -> pl.LazyFrame:
    """Return records with the types that the page computes with; see `scan_records`."""
    casts, wrong = [], []
    for name, kind in schema.items():
        needed = _NUMBERS.get(name, pl.String if name in _TEXTS else None)
        if needed is None or kind == needed:
            continue
        if _is_number(kind) or (kind == pl.String and needed != pl.Boolean):
            casts.append(pl.col(name).cast(needed, strict=False))
        else:
            wrong.append(name)
    if wrong:
        _add_note(notes, f"The records' columns {', '.join(wrong)} have other types than whence writes; left out.")
    frame = frame.drop(wrong).with_columns(casts) if wrong or casts else frame
    if "score" in schema and "score" not in wrong:
        frame = frame.with_columns(pl.when(pl.col("score").is_finite()).then(pl.col("score")).alias("score"))
    if "record_id" not in schema or "record_id" in wrong:
        frame = frame.with_row_index("record_id").with_columns(pl.col("record_id").cast(pl.Int64))
        _add_note(notes, "The records have no ids; they are numbered from 0.")
    return frame


@contextmanager
def explain_parquet(path: Path) -> Iterator[None]:
    """Turn Polars' errors on a file into a `RunDirectoryError` that names it."""
    try:
        yield
    except (pl.exceptions.PanicException, pl.exceptions.PolarsError, OSError) as broken:
        raise RunDirectoryError(f"{path} cannot be read as Parquet: {first_line(broken)}") from None


def attempt(compute: Callable[[], Any], notes: list[str], failure: str, otherwise: Any = None) -> Any:
    """Return what `compute` returns; if the run's files make it fail, add a note and return `otherwise`.

    Args:
        compute: takes nothing.
        notes: gets the note.
        failure: what cannot be shown, as the start of a sentence: "The strip cannot be drawn".
        otherwise: returned instead.
    """
    try:
        return compute()
    except FOREIGN as error:
        _add_note(notes, f"{failure}: {first_line(error)}")
        return otherwise


def _is_number(kind: Any) -> bool:
    return bool(kind == pl.Boolean or kind.is_numeric())


def _add_note(notes: list[str] | None, note: str) -> None:
    if notes is not None and note not in notes:
        notes.append(note)
