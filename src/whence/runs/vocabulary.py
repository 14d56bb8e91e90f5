"""The texts of a language model's tokens, by which pages show what stands in a run as ids."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from whence.runs.files import read_table, write_table

VOCABULARY = "vocabulary.parquet"
"""The name of the file in a run directory."""


def read_vocabulary(run: Path) -> list[str]:
    """Return the text of each token id; nothing if the run holds none."""
    path = run / VOCABULARY
    texts: list[str] = read_table(path)["text"].to_list() if path.exists() else []
    return texts


def write_vocabulary(run: Path, texts: Sequence[str]) -> None:
    """Write the text of each token id."""
    write_table(pl.DataFrame({"text": list(texts)}, schema={"text": pl.String}), run / VOCABULARY)
