"""Many comparisons in one directory: running what is not there yet, and reading what is."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from whence.errors import RunDirectoryError
from whence.experiments.rl.arms import ARMS
from whence.experiments.rl.config import RunConfig
from whence.experiments.rl.curves import read_curve, write_curve
from whence.experiments.shared import STANDARD
from whence.experiments.sweepfile import Planned, find_differences, make_label
from whence.experiments.workers import check_workers, describe_failure, run_all
from whence.metrics import Curve, summarise
from whence.runs import RunDirectory


class Watch(Protocol):
    """Told how a sweep goes."""

    def kept(self, planned: Planned) -> None:
        """Hear of a run that was finished before."""

    def rounds(self, planned: Planned, done: int) -> None:
        """Hear of the rounds that a run under way has done: 0 before the first, and all of them at the end too."""

    def ended(self, planned: Planned, failure: str | None) -> None:
        """Hear that a run has ended, and why it failed."""


def run_sweep(
    runs: Sequence[Planned], out: Path, watch: Watch, *, workers: int | None = None, keep_runs: bool = False
) -> dict[str, str]:
    """Run what is not there yet, and keep of each run its curve and its timings.

    Finished runs are skipped. A run that fails is told of, and the others go on. Killed at any moment, the sweep goes
    on at the first run without a curve.

    Args:
        runs: from `read_sweep`.
        out: the directory: `curves/NAME/ARM/seed_S.json`, `timings/...`; and `runs/...` of those under way.
        watch: told how it goes.
        workers: runs at a time, each in a process with one torch thread; None: one per core.
        keep_runs: keep the directories of the runs that are made now, with every round's records and policies.

    Returns:
        Why runs failed, by "NAME/ARM/seed_S".

    Raises:
        RunDirectoryError: another sweep is writing to the directory, or it holds another run where one of these
            belongs; nothing was run.
        WhenceError: fewer than one worker.
    """
    check_workers(workers)
    with _held(out):
        done = [planned for planned in runs if _is_kept(planned, out)]
        todo = [planned for planned in runs if planned not in done]
        for planned in done:
            watch.kept(planned)
            if not keep_runs and _mark(planned.run_path(out)).exists():  # killed before it was discarded
                with suppress(OSError):
                    _discard(planned.run_path(out))
        for planned in todo:
            _start_over(planned, out)
        failures = {}
        jobs = [(planned.config, planned.run_path(out)) for planned in todo]
        for place, failure in run_all(jobs, workers, lambda place, rounds: watch.rounds(todo[place], rounds)):
            planned = todo[place]
            if failure is None:
                try:
                    _keep(planned, out, keep_runs=keep_runs)
                except Exception as wrong:  # of this run alone, whatever it is
                    failure = describe_failure(wrong)
            if failure is not None:
                failures[planned.name] = failure
            watch.ended(planned, failure)
        return failures


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """Hold a sweep's directory, so that no second sweep writes there; the system lets go of it after a kill, too."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    except OSError as wrong:
        raise RunDirectoryError(
            f"{out} cannot be written to ({wrong.strerror}: {wrong.filename}). Choose another directory."
        ) from None
    with lock:
        if os.name == "posix":
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunDirectoryError(
                    f"Another sweep is writing to {out}. Wait until it has ended, or choose another directory."
                ) from None
        yield


def _start_over(planned: Planned, out: Path) -> None:
    """Discard what an unfinished run of another configuration left; what is no run of a sweep stays, and is refused."""
    try:
        found = RunDirectory.open(planned.run_path(out)).config
    except RunDirectoryError:
        return
    if "arm" in found and found != planned.config.to_json():
        with suppress(OSError):
            _removed(planned.run_path(out))


def _keep(planned: Planned, out: Path, *, keep_runs: bool) -> None:
    path = planned.run_path(out)
    if keep_runs:
        _mark(path).unlink(missing_ok=True)
    else:
        _mark(path).touch()
    files = planned.file(out, "curves"), planned.file(out, "timings")
    write_curve(planned.config, RunDirectory.open(path), *files, more=planned.metrics)
    if not keep_runs:
        _discard(path)


def _mark(path: Path) -> Path:
    """Return the file that says of a run's directory that it is to be discarded once there is a curve."""
    return path.with_name(f"{path.name}.discard")


def _discard(path: Path) -> None:
    _removed(path)
    _mark(path).unlink()


def _removed(path: Path) -> None:
    """Remove a run's directory; killed half-way, it leaves nothing under that name."""
    aside = path.with_name(f".{path.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)  # of a sweep that was killed here
    if path.exists():
        path.rename(aside)
        shutil.rmtree(aside)


def _is_kept(planned: Planned, out: Path) -> bool:
    results = planned.file(out, "curves")
    if not results.exists():
        return False
    found, tables, _ = read_curve(results, planned.file(out, "timings"))
    before, now = found.to_json(), planned.config.to_json()
    if others := [name for name in now if before[name] != now[name]]:
        raise RunDirectoryError(
            f"{results} is of another run: its {others[0]} is {before[others[0]]!r}, the sweep's {now[others[0]]!r}. "
            "Choose another directory, or delete the file."
        )
    if lacking := [name for name in planned.metrics if name not in tables["rounds"].columns]:
        raise RunDirectoryError(
            f"{results} was kept without {lacking[0]}, which the sweep's `metrics` ask for, and its run is gone. "
            "Delete the file to have the run made again, choose another directory, or leave the name out."
        )
    return True


@dataclass(frozen=True, eq=False)
class KeptRun:
    """A run of a sweep, as its files hold it: configuration, tables `evaluations`, `rounds`, `seconds`, and curve."""

    config: RunConfig
    tables: Mapping[str, pl.DataFrame]
    curve: Curve


Results = Mapping[str, Mapping[str, Mapping[int, KeptRun]]]
"""Finished runs by group, label and seed."""


def load_sweep(out: Path) -> Results:
    """Return the finished runs below a sweep's directory.

    Raises:
        RunDirectoryError: there is none, a file cannot be read or is not where its run belongs, or runs of one name
            differ in more than arm, share to drop and seed.
    """
    found: dict[str, dict[str, dict[int, KeptRun]]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for results in sorted((out / "curves").glob("*/*/seed_*.json")):
        group, label = results.parts[-3:-1]
        config, tables, curve = read_curve(results, out / "timings" / group / label / results.name)
        _check_place(results, label, config)
        if others := find_differences(settings.setdefault(group, {}), label, config):
            raise RunDirectoryError(
                f"{results} differs from other runs of {group!r} in {', '.join(others)}, and cannot be compared with "
                "them. Move the one or the others to another directory."
            )
        found.setdefault(group, {}).setdefault(label, {})[config.seed] = KeptRun(config, tables, curve)
    if not found:
        raise RunDirectoryError(f"{out} holds no finished run of a sweep. Run whence sweep FILE --out {out}.")
    order = {arm: place for place, arm in enumerate(ARMS)}
    return {
        group: dict(sorted(labels.items(), key=lambda item: _place(item[1], order))) for group, labels in found.items()
    }


def _check_place(results: Path, label: str, config: RunConfig) -> None:
    """Refuse a curve that lies where another arm's, share's or seed's belongs."""
    labels = make_label(config, config.drop), make_label(config, None)
    if label not in labels or results.stem != f"seed_{config.seed}":
        raise RunDirectoryError(
            f"{results} is of the arm {config.arm}, drop {config.drop} and seed {config.seed}, which belongs at "
            f"{' or '.join(labels)}, seed_{config.seed}.json. Move it there, or delete it."
        )


def _place(runs: Mapping[int, KeptRun], order: Mapping[str, int]) -> tuple[int, float]:
    config = next(iter(runs.values())).config
    return order[config.arm], config.drop


def summarise_sweep(results: Results) -> dict[str, Any]:
    """Return the summary of every group that holds the standard arm: `{group: {label: {metric: entry}}}`.

    Entries are those of `summarise`; an arm's seeds need not be as many as the standard's.
    """
    return {
        group: summarise(
            {label: {seed: kept.curve for seed, kept in runs.items()} for label, runs in labels.items()},
            standard=STANDARD,
        )
        for group, labels in results.items()
        if STANDARD in labels
    }
