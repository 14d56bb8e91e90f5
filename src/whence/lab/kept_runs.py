"""What a sweep keeps of its finished runs, of which there may be hundreds: a row of each in two files.

`curves.parquet` has what can be reproduced (configuration, evaluations, and what happened each round),
`timings.parquet` what cannot (microseconds, versions and the machine).

Such a file has a row for each of some keys, and is rewritten whole when a row is added. Names whose values are all
texts, or all numbers, are columns. A table of numbers, `{name: list}`, is a column of lists for each of its names,
"table/name". The rest of a row is JSON, in the column "rest".
"""

import json
import math
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from whence.core import RunDirectoryError, WhenceError, flush_to_disk, require_file, write_atomically
from whence.lab.agents import RunConfig, digest_sources, make_curve
from whence.lab.arms import STANDARD, place_arm
from whence.lab.efficiency import Curve, summarise
from whence.lab.plans import Planned, find_differences
from whence.runs import RunDirectory, list_changes

Row = Mapping[str, Any]

_REST = "rest"

KEYS = ("experiment", "label", "seed")
"""What tells the runs of a sweep apart."""

COLUMNS = (
    *("round", "dropped_share", "negative_share", "episode_return", "train/approx_kl", "train/kl"),
    *("train/learning_rate", "train/update_scale", "train/entropy_loss", "train/clip_fraction"),
)
"""Columns of a run's metrics that its results have, as far as the run has them."""


@dataclass(frozen=True, eq=False)
class KeptRun:
    """A finished run of a sweep: configuration, tables `evaluations`, `rounds`, `seconds`, and learning curve.

    `contents` are the digests of what was run; see `digest_sources`.
    """

    config: RunConfig
    tables: Mapping[str, pl.DataFrame]
    curve: Curve
    contents: Mapping[str, str] = field(default_factory=dict)


Results = Mapping[str, Mapping[str, Mapping[int, KeptRun]]]
"""Finished runs by group, label and seed."""


def find_finished(runs: Sequence[Planned], out: Path) -> list[Planned]:
    """Return the runs of a sweep that are kept already; refuse those in whose place others are kept."""
    kept_runs = read_runs(out)
    finished = []
    for planned in runs:
        if (stored := kept_runs.get((planned.group, planned.label, planned.config.seed))) is None:
            continue
        assert isinstance(planned.config, RunConfig)
        now = {**planned.config.to_json(), "contents": digest_sources(planned.config)}
        if changes := list_changes({**stored.config.to_json(), "contents": stored.contents}, now):
            raise RunDirectoryError(
                f"{planned.name} in {out} is another run: {changes[0]}. Choose another directory, or delete its row."
            )
        finished.append(planned)
    return finished


def keep_run(planned: Planned, out: Path) -> None:
    """Write a finished run's two rows, that of the timings first, then discard its directory."""
    run = RunDirectory.open(planned.run_path(out))
    head = {"experiment": planned.group, "label": planned.label, "seed": planned.config.seed}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"
    timings = head | {
        "machine": f"{machine}, Python {platform.python_version()}",
        "versions": dict(run.versions),
        # Whole microseconds need a third of the room, and are as good.
        "microseconds": _list_columns(
            run.table("timings").with_columns((pl.exclude("round") * 1e6).round().cast(pl.Int64))
        ),
    }
    metrics = run.table("metrics")
    results = head | {
        **({"contents": contents} if (contents := run.config.get("contents")) else {}),
        "config": planned.config.to_json(),
        "evaluations": _list_columns(run.table("evaluations")),
        "rounds": _list_columns(metrics.select(name for name in COLUMNS if name in metrics.columns)),
    }
    _parse_run(results, timings)
    put_row(out / "timings.parquet", timings, KEYS)
    put_row(out / "curves.parquet", results, KEYS)
    flush_to_disk(out)  # else a power cut could take the rows, too
    shutil.rmtree(planned.run_path(out), ignore_errors=True)


def _list_columns(table: pl.DataFrame) -> dict[str, list[Any]]:
    """Return a table's columns as numbers: null for what is not finite, 1 and 0 for true and false."""
    numbers = table.with_columns(pl.col(pl.Boolean).cast(pl.UInt8))
    return {
        name: [None if isinstance(value, float) and not math.isfinite(value) else value for value in column]
        for name, column in numbers.to_dict().items()
    }


def read_runs(out: Path) -> dict[tuple[Any, ...], KeptRun]:
    """Return a sweep's finished runs by experiment, label and seed; none without a file. Parts of runs are refused."""
    results, timings = (read_rows(out / f"{name}.parquet", KEYS) for name in ("curves", "timings"))
    runs: dict[Any, KeptRun] = {}
    for key, row in results.items():
        try:
            runs[key] = _parse_run(row, timings[key])
        except (LookupError, TypeError, ValueError, pl.exceptions.PolarsError) as failure:
            raise RunDirectoryError(
                f"{out / 'curves.parquet'} does not hold a whole run {'{}/{}/seed_{}'.format(*key)} "
                f"({type(failure).__name__}: {failure}). Delete its row there and in timings.parquet, or both "
                "files: the same sweep makes the run again."
            ) from failure
    return runs


def _parse_run(results: Mapping[str, Any], timings: Mapping[str, Any]) -> KeptRun:
    """Return what the two rows of a run hold; refuse those that are not of a whole run."""
    config = RunConfig.from_json(results["config"])
    columns = {"evaluations": results["evaluations"], "rounds": results["rounds"], "seconds": timings["microseconds"]}
    tables = {name: pl.DataFrame(table) for name, table in columns.items()}
    tables["seconds"] = tables["seconds"].with_columns(pl.exclude("round") / 1e6)
    if tables["rounds"].height != config.rounds:
        raise WhenceError(f"it has {tables['rounds'].height} rounds, and its configuration {config.rounds}")
    curve = make_curve(config, tables["evaluations"], tables["seconds"])
    return KeptRun(config, tables, curve, results.get("contents") or {})


def load_sweep(out: Path) -> Results:
    """Return the finished runs below a sweep's directory.

    Raises:
        RunDirectoryError: there is none, a file cannot be read, or runs of one experiment differ in more than arm,
            share to drop and seed.
    """
    results: dict[str, dict[str, dict[int, KeptRun]]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for (group, label, seed), stored in read_runs(out).items():
        if others := find_differences(settings.setdefault(group, {}), label, stored.config):
            raise RunDirectoryError(
                f"{group}/{label}/seed_{seed} in {out} differs from other runs there in {', '.join(others)}, and "
                "cannot be compared with them. Move the one or the others to another directory."
            )
        results.setdefault(group, {}).setdefault(label, {})[seed] = stored
    if not results:
        raise RunDirectoryError(f"{out} holds no finished run of a sweep. Run whence sweep FILE --out {out}.")

    def place(labelled: tuple[str, Mapping[int, KeptRun]]) -> tuple[float, float]:
        config = next(iter(labelled[1].values())).config
        return place_arm(config.arm), config.drop

    return {group: dict(sorted(labels.items(), key=place)) for group, labels in results.items()}


def summarise_sweep(results: Results) -> dict[str, Any]:
    """Return the summary of every group that holds the standard arm: `{group: {label: {metric: entry}}}`.

    Entries are those of `summarise`; an arm's seeds need not be as many as the standard's.
    """
    return {
        group: summarise(
            {label: {seed: stored.curve for seed, stored in runs.items()} for label, runs in labels.items()},
            standard=STANDARD,
        )
        for group, labels in results.items()
        if STANDARD in labels
    }


def read_rows(path: Path, keys: Sequence[str]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return a file's rows by the values of some of their names, in their order; none if there is no such file.

    Values of `keys` are texts or whole numbers, and together belong to one row. Others raise a `RunDirectoryError`.
    """
    if not path.exists():
        return {}
    try:
        table = pl.read_parquet(require_file(path), glob=False)
        rows = [_unpack_row(packed) for packed in table.iter_rows(named=True)]
        return {tuple(row[name] for name in keys): row for row in rows}
    except (OSError, LookupError, TypeError, ValueError, pl.exceptions.PolarsError) as failure:
        raise RunDirectoryError(
            f"{path} cannot be read as rows with {', '.join(keys)} ({type(failure).__name__}: {failure}). Restore it, "
            "or delete curves.parquet and timings.parquet: the same sweep makes the runs again."
        ) from None


def put_row(path: Path, row: Row, keys: Sequence[str]) -> None:
    """Put a row, whose values are as JSON has them, into a file, in place of the one with the same keys.

    The file is replaced whole, so that a reader sees all of the old one or all of the new one. Whoever writes holds the
    lock of the directory, since the last of two writers would undo what the first has put.
    """
    by_key: dict[tuple[Any, ...], Row] = {**read_rows(path, keys)}
    by_key[tuple(row[name] for name in keys)] = row
    write_rows(path, [by_key[key] for key in sorted(by_key)])


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a file of these rows."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _pack(name, [row.get(name) for row in rows]) for name in names}
    series = [each for packed in columns.values() for each in packed]
    rest = [{name: value for name, value in row.items() if not columns[name]} for row in rows]
    if any(rest):
        series.append(pl.Series(_REST, [json.dumps(values, allow_nan=False) for values in rest], pl.String))
    with write_atomically(path) as temporary:
        pl.DataFrame(series).write_parquet(temporary, compression="zstd", compression_level=19)


def _pack(name: str, values: Sequence[Any]) -> list[pl.Series]:
    """Return the columns of a name's values, with null where a table lacks one; none if the values are JSON."""
    types = {type(value) for value in values}
    if len(types) == 1 and types <= {str, int, float, bool}:
        return [pl.Series(name, values)]
    if not all(isinstance(value, dict) and value and all(map(_is_numeric, value.values())) for value in values):
        return []
    series = []
    for column in dict.fromkeys(column for table in values for column in table):
        lists = [table.get(column) for table in values]
        is_whole = all(type(entry) is not float for entries in lists for entry in entries or ())
        dtype = pl.List(pl.Int64 if is_whole else pl.Float64)
        series.append(pl.Series(f"{name}/{column}", lists, dtype, strict=False))
    return series


def _is_numeric(column: Any) -> bool:
    return isinstance(column, list) and {type(entry) for entry in column} <= {int, float, type(None)}


def _unpack_row(packed: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for label, value in packed.items():
        name, is_list, column = label.partition("/")
        if is_list:
            table = row.setdefault(name, {})
            if value is not None:
                table[column] = value
        elif label != _REST:
            row[name] = value
    row |= json.loads(packed.get(_REST, "{}"))
    return row
