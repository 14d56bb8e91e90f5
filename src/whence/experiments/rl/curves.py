"""What is kept of a run that is one of many: two small text files, results apart from timings."""

import json
import math
import os
import platform
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from whence import metrics
from whence.errors import RunDirectoryError, WhenceError
from whence.experiments.rl.arms import ARMS
from whence.experiments.rl.config import RunConfig, list_evaluated_rounds
from whence.guards import write_atomically
from whence.metrics import Curve
from whence.runs import RunDirectory

FORMAT, VERSION = "whence-curve", 1

KEPT = (
    *("round", "dropped_share", "negative_share", "held_out_gain", "fell_back"),
    *("episode_return", "train/approx_kl", "train/update_scale"),
)
"""Columns of a run's metrics that are kept, where they are there."""

MORE = (
    *("kept", "mean", "train/entropy_loss", "train/clip_fraction", "train/policy_gradient_loss", "train/value_loss"),
    *("train/explained_variance", "train/update_scale_value"),
)
"""Columns that are kept beside them where that is asked for: every run has nearly all, and most studies read none."""


def make_curve(config: RunConfig, evaluations: pl.DataFrame, timings: pl.DataFrame) -> Curve:
    """Return a run's learning curve and its seconds (process CPU) a round.

    Between evaluations the curve stays at the last one, and reaches nothing.
    """
    seconds = timings["collection_cpu"] + timings["optimisation_cpu"]
    if ARMS[config.arm].counts_scoring:
        seconds = seconds + timings["scoring_cpu"]
    return metrics.make_curve(config.rounds, evaluations, seconds.to_numpy())


def write_curve(
    config: RunConfig, run: RunDirectory, results: Path, timings: Path, *, more: Collection[str] = ()
) -> None:
    """Keep a finished run: what can be reproduced in one file, what cannot in another, written before it.

    Args:
        config: the run.
        run: its directory.
        results: the file for configuration, evaluations and what happened each round; JSON.
        timings: the file for seconds, versions and the machine; JSON.
        more: columns of `MORE` to keep as well; null where the run has none.

    Raises:
        RunDirectoryError: the directory does not hold the whole run; nothing was written.
    """
    metrics = run.table("metrics")
    head = {"format": FORMAT, "version": VERSION}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    timed = head | {"machine": machine, "versions": dict(run.versions), "seconds": _columns(run.table("timings"))}
    found = head | {
        "config": config.to_json(),
        "evaluations": _columns(run.table("evaluations")),
        "rounds": _columns(_kept(metrics, more)),
    }
    try:
        _parsed(found, timed)
    except _BROKEN as wrong:
        raise RunDirectoryError(
            f"{run.path} does not hold a whole run ({_told(wrong)}). Change its settings, or delete it to have it made "
            "again."
        ) from wrong
    _write(timings, timed)
    _write(results, found)


def _kept(metrics: pl.DataFrame, more: Collection[str]) -> pl.DataFrame:
    there = [name for name in (*KEPT, *more) if name in metrics.columns]
    return metrics.select(*there, *(pl.lit(None).alias(name) for name in more if name not in there))


def read_curve(results: Path, timings: Path) -> tuple[RunConfig, Mapping[str, pl.DataFrame], Curve]:
    """Return a kept run: its configuration; the tables evaluations, rounds and seconds; its curve.

    Raises:
        RunDirectoryError: a file is missing, is none that `write_curve` wrote, or lacks some of the run.
    """
    try:
        return _parsed(_read(results), _read(timings))
    except RunDirectoryError:
        raise
    except _BROKEN as wrong:
        raise RunDirectoryError(
            f"{results}, with {timings}, does not hold a whole run ({_told(wrong)}). Delete both, and the run is made "
            "again."
        ) from wrong


_BROKEN = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    pl.exceptions.PolarsError,
)
"""What contents raise that are not a kept run's."""


def _told(wrong: Exception) -> str:
    return str(wrong).rstrip(".") if isinstance(wrong, WhenceError) else f"{type(wrong).__name__}: {wrong}"


def _parsed(found: Mapping[str, Any], timed: Mapping[str, Any]) -> tuple[RunConfig, Mapping[str, pl.DataFrame], Curve]:
    """Return what the two documents hold, checked to be a whole run."""
    config = RunConfig.from_json(found["config"])
    tables = {"evaluations": found["evaluations"], "rounds": found["rounds"], "seconds": timed["seconds"]}
    frames = {name: pl.DataFrame(_checked(name, columns)) for name, columns in tables.items()}
    # First, since no list of rounds is made that the file does not hold.
    if frames["seconds"].height != config.rounds:
        raise WhenceError(f"seconds has {frames['seconds'].height} rows, and the run {config.rounds} rounds")
    each = list(range(1, config.rounds + 1))
    for name, expected in (("evaluations", list_evaluated_rounds(config)), ("rounds", each), ("seconds", each)):
        if frames[name]["round"].to_list() != expected:
            raise WhenceError(f"the rounds of {name} are not those of the run, each once and in order")
    for name, column in frames["seconds"].to_dict().items():
        if column.null_count() or not all(0 <= value < math.inf for value in column):
            raise WhenceError(f"{name} holds what is no time: seconds are finite, and 0 or more")
    return config, frames, make_curve(config, frames["evaluations"], frames["seconds"])


def _checked(name: str, columns: Any) -> dict[str, list[float | None]]:
    """Return a table's columns if they are lists of numbers, where null stands for one that is not finite."""
    kinds = int, float, type(None)
    if not isinstance(columns, dict) or not all(
        isinstance(column, list) and all(type(value) in kinds for value in column) for column in columns.values()
    ):
        raise WhenceError(f"{name} is no table of numbers")
    return columns


def _columns(table: pl.DataFrame) -> dict[str, list[Any]]:
    """Return a table's columns as numbers: null where one is not finite, 1 and 0 for true and false."""
    numbers = table.with_columns(pl.col(pl.Boolean).cast(pl.UInt8))
    return {
        name: [None if isinstance(value, float) and not math.isfinite(value) else value for value in column]
        for name, column in numbers.to_dict().items()
    }


def _write(path: Path, document: Mapping[str, Any]) -> None:
    # A line for each column: a change of one shows as one.
    parts = []
    for key, value in document.items():
        if isinstance(value, Mapping) and all(isinstance(column, list) for column in value.values()):
            rows = ",\n  ".join(
                f"{json.dumps(name)}: {json.dumps(column, allow_nan=False)}" for name, column in value.items()
            )
            parts.append(f"{json.dumps(key)}: {{\n  {rows}\n }}")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    with write_atomically(path) as temporary:
        temporary.write_text("{\n " + ",\n ".join(parts) + "\n}\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunDirectoryError(
            f"{path} is not there; a kept run has one file of results and one of timings."
        ) from None
    except (OSError, RecursionError, ValueError) as broken:
        raise RunDirectoryError(
            f"{path} is not readable as JSON: {broken}. Delete it, and the run is made again."
        ) from None
    if not isinstance(document, dict) or (document.get("format"), document.get("version")) != (FORMAT, VERSION):
        raise RunDirectoryError(f"{path} is not marked as {FORMAT!r}, version {VERSION}.")
    return document
