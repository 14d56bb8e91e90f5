"""Sweeps: many comparisons in one directory, run where they are missing, and read.

Two files hold what stays of finished runs, with a row for each: `curves.parquet` has what can be reproduced
(configuration, evaluations, and what happened each round), `timings.parquet` what cannot (microseconds, versions and
the machine).
"""

import math
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from whence.core import RunDirectoryError, WhenceError
from whence.lab.agents.training import make_curve
from whence.lab.cluster import check_start, start_jobs
from whence.lab.efficiency import Curve, summarise
from whence.lab.rowfile import put_row, read_rows
from whence.lab.sweepfile import Planned, find_differences
from whence.lab.workers import describe_failure
from whence.runs import RunDirectory, check_content, lock_directory
from whence.stored import STANDARD, place_arm
from whence.stored.agents import RunConfig

KEYS = ("experiment", "label", "seed")
"""What tells the runs of a sweep apart."""

COLUMNS = (
    *("round", "dropped_share", "negative_share", "episode_return", "train/approx_kl", "train/kl"),
    *("train/learning_rate", "train/update_scale", "train/entropy_loss", "train/clip_fraction"),
)
"""Columns of a run's metrics that its results have, as far as the run has them."""


class Watch(Protocol):
    """What a sweep reports to."""

    def kept(self, planned: Planned) -> None:
        """Called with a run that was finished before."""

    def rounds(self, planned: Planned, done: int) -> None:
        """Called with the rounds that a run under way has done: 0 before the first, and all of them at the end."""

    def ended(self, planned: Planned, failure: str | None) -> None:
        """Called with a run that has ended, and why it failed."""


def run_sweep(
    runs: Sequence[Planned], out: Path, watch: Watch, *, workers: int | None = None, on: str = "local"
) -> dict[str, str]:
    """Run what is not there yet, and keep the results and the timings of each run.

    Finished runs are skipped. A run that fails is reported, and the others go on. Killed at any moment, the sweep
    goes on at the first run without results. A script calls this under `if __name__ == "__main__":`, since the process
    of each run imports the script.

    Args:
        runs: from `read_sweep`.
        out: the directory: `curves.parquet` and `timings.parquet` with a row for each run; `runs/...` are under way.
        watch: called with what happens.
        workers: runs at a time, each in a process with one torch thread; None: one per core.
        on: "local": in processes of this machine; "ray": on the Ray cluster that RAY_ADDRESS names, or on a Ray that is
            started on this machine.

    Returns:
        Why runs failed, by "NAME/ARM/seed_S".

    Raises:
        RunDirectoryError: another sweep is writing to the directory, or it holds a run, a comparison, another run where
            one of these belongs, or a damaged file; nothing was run.
        WhenceError: fewer than one worker, or there is no Ray cluster, and nothing was run or deleted.
        Unsupported: Ray is not installed.
    """
    check_start(workers, on)
    check_content(out, "sweep")
    with lock_directory(out):
        finished = _find_finished(runs, out)
        todo = [planned for planned in runs if planned not in finished]
        jobs = [(planned.config, planned.run_path(out)) for planned in todo]
        failures: dict[str, str] = {}
        with start_jobs(jobs, workers, on, lambda place, rounds: watch.rounds(todo[place], rounds)) as ends:
            for planned in finished:
                watch.kept(planned)
                _discard_run(planned, out)  # A kill may have left it.
            for place, failure in ends:
                planned = todo[place]
                try:
                    if failure is None:
                        _store_run(planned, out)
                except Exception as error:  # of this run alone, whatever it is
                    failure = describe_failure(error)
                if failure is not None:
                    failures[planned.name] = failure
                watch.ended(planned, failure)
        return failures


def _find_finished(runs: Sequence[Planned], out: Path) -> list[Planned]:
    """Return the runs whose results are there; refuse results of a run with other settings."""
    stored_runs = read_runs(out)
    finished = []
    for planned in runs:
        if (stored := stored_runs.get((planned.group, planned.label, planned.config.seed))) is None:
            continue
        before, now = stored.config.to_json(), planned.config.to_json()
        if others := [field for field in now if before[field] != now[field]]:
            raise RunDirectoryError(
                f"{planned.name} in {out} is another run: its {others[0]} is {before[others[0]]!r}, the sweep's "
                f"{now[others[0]]!r}. Choose another directory, or delete its row."
            )
        finished.append(planned)
    return finished


@dataclass(frozen=True, eq=False)
class KeptRun:
    """A finished run of a sweep: configuration, tables `evaluations`, `rounds`, `seconds`, and learning curve."""

    config: RunConfig
    tables: Mapping[str, pl.DataFrame]
    curve: Curve


def _store_run(planned: Planned, out: Path) -> None:
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
        "config": planned.config.to_json(),
        "evaluations": _list_columns(run.table("evaluations")),
        "rounds": _list_columns(metrics.select(name for name in COLUMNS if name in metrics.columns)),
    }
    _parse_run(results, timings)
    put_row(out / "timings.parquet", timings, KEYS)
    put_row(out / "curves.parquet", results, KEYS)
    _discard_run(planned, out)


def _discard_run(planned: Planned, out: Path) -> None:
    shutil.rmtree(planned.run_path(out), ignore_errors=True)


def _list_columns(table: pl.DataFrame) -> dict[str, list[Any]]:
    """Return a table's columns as numbers: null for what is not finite, 1 and 0 for true and false."""
    numbers = table.with_columns(pl.col(pl.Boolean).cast(pl.UInt8))
    return {
        name: [None if isinstance(value, float) and not math.isfinite(value) else value for value in column]
        for name, column in numbers.to_dict().items()
    }


def read_runs(out: Path) -> dict[tuple[str, str, int], KeptRun]:
    """Return a sweep's finished runs by experiment, label and seed; none if there is no file.

    Raises:
        RunDirectoryError: a row is missing, or is none of a whole run.
    """
    results, timings = (read_rows(out / f"{name}.parquet", KEYS) for name in ("curves", "timings"))
    runs: dict[Any, KeptRun] = {}
    for key, row in results.items():
        try:
            runs[key] = _parse_run(row, timings[key])
        except (LookupError, TypeError, ValueError, pl.exceptions.PolarsError) as failure:
            raise RunDirectoryError(
                f"{out / 'curves.parquet'} does not hold a whole run {'{}/{}/seed_{}'.format(*key)} "
                f"({type(failure).__name__}: {failure}). Delete both files' row of it, and the run is made again."
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
    return KeptRun(config, tables, make_curve(config, tables["evaluations"], tables["seconds"]))


Results = Mapping[str, Mapping[str, Mapping[int, KeptRun]]]
"""Finished runs by group, label and seed."""


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
