"""Files of rollouts as trainers write them, read step by step in one form.

- TRL (`log_completions=True`): `completions_00012.parquet` with step, prompt, completion, a column for each reward
  function, and advantage.
- verl (`trainer.rollout_data_dir`): `12.jsonl` with input, output, score, step, and what the reward function returned.
- Any other: Parquet or JSON lines with a prompt, a response and a reward, and if there are: step, group, advantage.
"""

import io
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import polars as pl
from pyarrow import ArrowException, parquet

from whence.core import WhenceError, first_line

ROUND = 4096
"""Rows of a round at most: a longer step becomes several."""

NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "prompt": ("prompt", "input"),
        "response": ("response", "completion", "output"),
        "reward": ("reward", "score"),
        "step": ("step", "global_step"),
        "group": ("group", "group_id", "uid"),
        "advantage": ("advantage",),
        "prompt_ids": ("prompt_ids",),
        "response_ids": ("response_ids",),
    }
)
"""What is read of a row, and the columns that hold it by the names of trainers, the first one that is there."""

_NEEDED = "prompt", "response"
_SUFFIXES = ".parquet", ".jsonl", ".json", ".ndjson"


def read_steps(path: Path, columns: Mapping[str, str] = MappingProxyType({})) -> Iterator[pl.DataFrame]:
    """Yield the rows of each step, in the order of the files' numbers and of their rows; a long step in parts.

    The columns are those of `NAMES`, as far as they are there, with `reward.NAME` for each of several reward functions
    and `info.NAME` for all others. No part of a step divides consecutive rows of one group, or of one prompt.

    Args:
        path: a file, or a folder of them.
        columns: names of columns that hold what `NAMES` lists, where they are others.

    Raises:
        WhenceError: there are no rollouts; or a file cannot be read, or lacks a column.
    """
    rest: pl.DataFrame | None = None
    for file in list_files(path):
        for batch in _read_batches(file):
            table = _rename(batch, columns, file)
            rest = table if rest is None else pl.concat([rest, table], how="diagonal_relaxed")
            *steps, rest = _split(rest)
            yield from steps
        if rest is not None and "step" not in rest.columns:  # a file is a step
            yield rest
            rest = None
    if rest is not None and not rest.is_empty():
        yield rest


def list_files(path: Path) -> list[Path]:
    """Return a file, or the files of rollouts in a folder, in the order of the numbers in their names."""
    if path.is_file() and path.suffix in _SUFFIXES:
        return [path]
    files = [file for file in path.glob("*") if file.suffix in _SUFFIXES] if path.is_dir() else []
    if not files:
        raise WhenceError(
            f"{path} holds no rollouts: a Parquet file or one of JSON lines is needed, or a folder of them "
            f"({', '.join(f'*{suffix}' for suffix in _SUFFIXES)})."
        )
    return sorted(files, key=lambda file: ([int(number) for number in re.findall(r"\d+", file.stem)], file.name))


def _read_batches(file: Path) -> Iterator[pl.DataFrame]:
    """Yield a file's rows, some thousands at a time, so that a large file is never in memory as a whole."""
    try:
        if file.suffix == ".parquet":
            for batch in parquet.ParquetFile(file).iter_batches(ROUND):  # Polars would read whole groups of rows
                yield pl.DataFrame(pl.from_arrow(batch))
            return
        with file.open("rb") as lines:
            while chunk := b"".join(islice(lines, ROUND)):
                yield pl.read_ndjson(io.BytesIO(chunk), infer_schema_length=None)
    except (OSError, ArrowException, pl.exceptions.PanicException, pl.exceptions.PolarsError) as broken:
        kind = "Parquet" if file.suffix == ".parquet" else "JSON lines"
        raise WhenceError(f"{file} cannot be read as {kind}: {first_line(broken)}") from None


def _rename(table: pl.DataFrame, columns: Mapping[str, str], file: Path) -> pl.DataFrame:
    """Return a file's table with the columns of `NAMES`, `reward.NAME` and `info.NAME`."""
    sources = {}
    for name, usual in NAMES.items():
        source = columns.get(name) or next((each for each in usual if each in table.columns), None)
        if (source is not None and source not in table.columns) or (source is None and name in _NEEDED):
            raise WhenceError(
                f"{file} has no column {source or ' or '.join(usual)!r} for the {name}; it has: "
                f"{', '.join(table.columns)}. Name the right one: --column {name}=NAME."
            )
        if source is not None:
            sources[name] = source
    others = [name for name in table.columns if name not in sources.values()]
    parts: list[str] = []
    if "reward" not in sources:  # TRL's: a column for each function
        parts = [name for name in others if table.schema[name].is_numeric()]
        if not parts and "advantage" not in sources:
            raise WhenceError(f"{file} has no reward among its columns: {', '.join(table.columns)}. See --column.")
    renamed = [pl.col(source).alias(name) for name, source in sources.items()]
    if parts:
        renamed.append(pl.sum_horizontal(pl.col(name).fill_nan(None) for name in parts).alias("reward"))
    renamed += [pl.col(name).alias(f"reward.{name}") for name in parts if len(parts) > 1]
    renamed += [pl.col(name).alias(f"info.{name}") for name in others if name not in parts]
    return table.select(renamed)


def _split(table: pl.DataFrame) -> list[pl.DataFrame]:
    """Return the steps of a table in parts of at most `ROUND` rows, if groups allow; more rows may follow the last."""
    by = [name for name in ("step",) if name in table.columns]
    steps = table.with_columns(_run=pl.struct(by).rle_id() if by else 0).partition_by(
        "_run", include_key=False, maintain_order=True
    )
    parts: list[pl.DataFrame] = []
    for step in steps:
        while len(step) > ROUND:
            place = _find_cut(step)
            parts.append(step.head(place))
            step = step.slice(place)
        parts.append(step)
    return parts


def _find_cut(step: pl.DataFrame) -> int:
    """Return the last place up to `ROUND` at which a group, or a prompt, ends; `ROUND` where there is none."""
    column = step["group" if "group" in step.columns else "prompt"].head(ROUND + 1)
    runs: Any = column.rle_id()
    place = int((runs == runs[-1]).arg_max() or 0)
    return place or ROUND
