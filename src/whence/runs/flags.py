"""Flags that a reader of a run put on its records, each with a note."""

import threading
from pathlib import Path

import polars as pl

from whence.runs.files import read_table, write_table

FLAGS = "flags.parquet"
"""The name of the file in a run directory."""

_WRITING = threading.Lock()


def read_flags(run: str | Path) -> pl.DataFrame:
    """Return the flags of a run directory: `round`, `record_id` and `note`, which may be empty."""
    if not (path := Path(run) / FLAGS).exists():
        return pl.DataFrame(schema={"round": pl.Int64, "record_id": pl.Int64, "note": pl.String})
    return read_table(path)


def write_flag(run: str | Path, number: int, record: int, note: str | None) -> None:
    """Flag a record of a round, in place of its flag if it has one; the note None takes the flag away.

    Raises:
        RunDirectoryError: the directory cannot be written, or its flags cannot be read.
    """
    with _WRITING:
        flags = read_flags(run)
        others = flags.filter((pl.col("round") != number) | (pl.col("record_id") != record))
        added = pl.DataFrame([] if note is None else [(number, record, note)], schema=flags.schema, orient="row")
        write_table(pl.concat([others, added]).sort("round", "record_id"), Path(run) / FLAGS)
