"""What the study of rounds has written: `rounds/KIND.parquet`, a row for each round."""

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from studies.shared import Row, read_list, write_line
from whence.lab import read_rows

ROUND = ("env", "optimizer", "seed", "round")
"""What tells the rounds of a study apart; their rows are in this order."""


def read_rounds(out: Path, kind: str) -> list[Row]:
    """Return what is written about rounds; `kind`: "round" or "intervention"."""
    return read_list(out / "rounds" / f"{kind}.parquet", ROUND)


def read_frame(out: Path, kind: str, name: str) -> pl.DataFrame:
    """Return the rows that rounds have by a name as one table, with the round and its `group`."""
    contents = read_rounds(out, kind)
    abouts = [{"group": f"{row['env']}-{row['optimizer']}", **{key: row[key] for key in ROUND}} for row in contents]
    rows = [about | row for about, content in zip(abouts, contents, strict=True) for row in content[name]]
    return pl.DataFrame(rows, infer_schema_length=None)


def is_written(out: Path, kind: str, about: Row) -> bool:
    """Return whether the round that `about` names is written."""
    return tuple(about[name] for name in ROUND) in read_rows(out / "rounds" / f"{kind}.parquet", ROUND)


def write_round(out: Path, kind: str, content: Mapping[str, object]) -> None:
    """Write what is said about one round, in place of what was there."""
    write_line(out / "rounds" / f"{kind}.parquet", content, ROUND)
