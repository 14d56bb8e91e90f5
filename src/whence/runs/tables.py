"""A run's tables that change: rows of rounds, a reader's flags, and the texts of a language model's tokens."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from whence.core import explain_write_errors
from whence.runs.files import read_table, write_table

FLAGS = "flags"
"""The name of the table of the records that a reader flagged, each with a note."""

VOCABULARY = "vocabulary.parquet"
"""The file of the texts of a language model's tokens, by which pages show what stands in a run as ids."""


class RowTable:
    """One table of a run, in one file, which is written anew for each row: of 5,000 rows in 12 ms.

    Args:
        path: its file.
        write: writes a table to a path.
    """

    def __init__(self, path: Path, write: Callable[[pl.DataFrame, Path], None] = write_table) -> None:
        self._path, self._write = path, write
        self._rows: pl.DataFrame | None = None

    def read(self) -> pl.DataFrame:
        """Read all rows; there is none if nothing was written yet."""
        return read_table(self._path) if self._path.exists() else pl.DataFrame()

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row in the place of those of its round and later ones."""
        rows = self.read() if self._rows is None else self._rows
        added = pl.DataFrame([dict(row)], infer_schema_length=None)
        before = [] if rows.is_empty() else [rows.filter(pl.col("round") < row["round"])]
        self.replace(pl.concat([*before, added], how="diagonal_relaxed", rechunk=True))

    def keep(self, rounds: Collection[int]) -> None:
        """Delete the rows of all rounds but these."""
        rows = self.read()
        if not rows.is_empty() and not rows["round"].is_in(list(rounds)).all():
            self.replace(rows.filter(pl.col("round").is_in(list(rounds))))

    def remove(self) -> None:
        """Delete the file."""
        with explain_write_errors(self._path):
            self._path.unlink(missing_ok=True)
        self._rows = None

    def replace(self, rows: pl.DataFrame) -> None:
        """Write other rows in the place of all."""
        self._write(rows, self._path)
        self._rows = rows


_WRITING = threading.Lock()


def read_flags(run: str | Path) -> pl.DataFrame:
    """Return the flags of a run directory: `round`, `record_id` and `note`, which may be empty."""
    flags = RowTable(Path(run) / f"{FLAGS}.parquet").read()
    return flags if flags.width else pl.DataFrame(schema={"round": pl.Int64, "record_id": pl.Int64, "note": pl.String})


def write_flag(run: str | Path, number: int, record: int, note: str | None) -> None:
    """Flag a record of a round, in place of its flag if it has one; the note None takes the flag away.

    Raises:
        RunDirectoryError: the directory cannot be written, or its flags cannot be read.
    """
    with _WRITING:
        flags = read_flags(run)
        others = flags.filter((pl.col("round") != number) | (pl.col("record_id") != record))
        added = pl.DataFrame([] if note is None else [(number, record, note)], schema=flags.schema, orient="row")
        rows = pl.concat([others, added]).sort("round", "record_id")
        RowTable(Path(run) / f"{FLAGS}.parquet").replace(rows)


def read_vocabulary(run: Path) -> list[str]:
    """Return the text of each token id; nothing if the run holds none."""
    texts = RowTable(run / VOCABULARY).read()
    return texts["text"].to_list() if texts.width else []


def write_vocabulary(run: Path, texts: Sequence[str]) -> None:
    """Write the text of each token id."""
    write_table(pl.DataFrame({"text": list(texts)}, schema={"text": pl.String}), run / VOCABULARY)
