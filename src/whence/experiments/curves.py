"""What is kept of a run that is one of many: two small text files, results apart from timings."""

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from whence.errors import RunDirectoryError
from whence.experiments.arms import ARMS
from whence.experiments.config import RunConfig
from whence.experiments.metrics import Curve
from whence.guards import written_atomically
from whence.runs import RunDirectory

FORMAT, VERSION = "whence-curve", 1

KEPT = ("round", "dropped_share", "negative_share", "episode_return", "train/approx_kl", "train/update_scale")
"""Columns of a run's metrics that are kept, where they are there."""


def curve_of(config: RunConfig, evaluations: pl.DataFrame, timings: pl.DataFrame) -> Curve:
    """Return a run's learning curve and its seconds (process CPU) a round.

    Between evaluations the curve stays at the last one.
    """
    seconds = timings["collection_cpu"] + timings["optimisation_cpu"]
    if ARMS[config.arm].counts_scoring:
        seconds = seconds + timings["scoring_cpu"]
    last = np.searchsorted(evaluations["round"].to_numpy(), np.arange(config.rounds + 1), side="right") - 1
    return Curve(
        returns=evaluations["test_return"].to_numpy()[last],
        standard_errors=evaluations["standard_error"].to_numpy()[last],
        seconds=seconds.to_numpy(),
    )


def write_curve(config: RunConfig, run: RunDirectory, results: Path, timings: Path) -> None:
    """Keep a finished run: what can be reproduced in one file, what cannot in another, written before it.

    Args:
        config: the run.
        run: its directory.
        results: the file for configuration, evaluations and what happened each round; JSON.
        timings: the file for seconds, versions and the machine; JSON.
    """
    metrics = run.table("metrics")
    head = {"format": FORMAT, "version": VERSION}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    _write(
        timings, head | {"machine": machine, "versions": dict(run.versions), "seconds": _columns(run.table("timings"))}
    )
    _write(
        results,
        head
        | {
            "config": config.to_json(),
            "evaluations": _columns(run.table("evaluations")),
            "rounds": _columns(metrics.select(name for name in KEPT if name in metrics.columns)),
        },
    )


def read_curve(results: Path, timings: Path) -> tuple[RunConfig, Mapping[str, pl.DataFrame], Curve]:
    """Return a kept run: its configuration; the tables evaluations, rounds and seconds; its curve.

    Raises:
        RunDirectoryError: a file is missing or is none that `write_curve` wrote.
    """
    found, timed = _read(results), _read(timings)
    try:
        config = RunConfig.from_json(found["config"])
        tables = {
            "evaluations": pl.DataFrame(found["evaluations"]),
            "rounds": pl.DataFrame(found["rounds"]),
            "seconds": pl.DataFrame(timed["seconds"]),
        }
        return config, tables, curve_of(config, tables["evaluations"], tables["seconds"])
    except (KeyError, TypeError, ValueError, IndexError, pl.exceptions.PolarsError) as wrong:
        raise RunDirectoryError(
            f"{results}, with {timings}, does not hold a whole run ({type(wrong).__name__}: {wrong}). Delete both, and "
            "the run is made again."
        ) from wrong


def _columns(table: pl.DataFrame) -> dict[str, list[Any]]:
    return {name: column.to_list() for name, column in table.to_dict().items()}


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
    with written_atomically(path) as temporary:
        temporary.write_text("{\n " + ",\n ".join(parts) + "\n}\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunDirectoryError(
            f"{path} is not there; a kept run has one file of results and one of timings."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as broken:
        raise RunDirectoryError(
            f"{path} is not readable as JSON: {broken}. Delete it, and the run is made again."
        ) from None
    if not isinstance(document, dict) or (document.get("format"), document.get("version")) != (FORMAT, VERSION):
        raise RunDirectoryError(f"{path} is not marked as {FORMAT!r}, version {VERSION}.")
    return document
