"""Tables with one row a round: a file, and if it is long, a short one for the latest rows."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from whence.core import explain_write_errors
from whence.runs.files import read_table

LATEST = 256
"""Rows from which on a table has a second file, and that this one holds at most."""


class RowTable:
    """One table of a run.

    Args:
        path: its file; the second one is `NAME.latest.parquet`, and rows that both hold count once.
        write: writes a table to a path.
    """

    def __init__(self, path: Path, write: Callable[[pl.DataFrame, Path], None]) -> None:
        self._path, self._write = path, write
        self._latest_path = path.with_suffix(".latest.parquet")
        self._rows: pl.DataFrame | None = None
        self._latest = pl.DataFrame()

    def read(self) -> pl.DataFrame:
        """Read all rows; there is none if nothing was written yet."""
        # In this order, since a writer may join the files meanwhile.
        latest, rows = (
            read_table(each) if each.exists() else pl.DataFrame() for each in (self._latest_path, self._path)
        )
        if not (rows.is_empty() or latest.is_empty()):
            latest = latest.filter(pl.col("round") > rows["round"].max())
        return _join(rows, latest)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row in the place of those of its round and later ones."""
        added, number = pl.DataFrame([dict(row)], infer_schema_length=None), row["round"]
        rows = self._rows
        if rows is None or len(rows) < LATEST or rows["round"].max() >= number or len(self._latest) >= LATEST:
            before = self.read() if rows is None else _join(rows, self._latest)
            self.replace(_join(_select_before(before, number), added))
        else:
            latest = _join(_select_before(self._latest, number), added)
            self._write(latest, self._latest_path)
            self._latest = latest

    def keep(self, rounds: Collection[int]) -> None:
        """Delete the rows of all rounds but these."""
        rows = self.read()
        if not rows.is_empty() and not rows["round"].is_in(list(rounds)).all():
            self.replace(rows.filter(pl.col("round").is_in(list(rounds))))

    def join_files(self) -> None:
        """Write all rows to the one file, if rows were appended to the other one."""
        if self._rows is not None and self._latest_path.exists():
            self.replace(_join(self._rows, self._latest))

    def remove(self) -> None:
        """Delete both files."""
        with explain_write_errors(self._path):
            self._path.unlink(missing_ok=True)
            self._latest_path.unlink(missing_ok=True)
        self._rows, self._latest = None, pl.DataFrame()

    def replace(self, rows: pl.DataFrame) -> None:
        """Write these rows in the place of all others."""
        self._write(rows, self._path)
        self._latest_path.unlink(missing_ok=True)  # killed before, its rows count once
        self._rows, self._latest = rows, pl.DataFrame()


def _select_before(rows: pl.DataFrame, number: int) -> pl.DataFrame:
    return rows if rows.is_empty() else rows.filter(pl.col("round") < number)


def _join(*tables: pl.DataFrame) -> pl.DataFrame:
    parts = [table for table in tables if not table.is_empty()]
    return pl.concat(parts, how="diagonal_relaxed", rechunk=True) if parts else pl.DataFrame()
