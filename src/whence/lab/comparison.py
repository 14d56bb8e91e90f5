"""Comparisons and sweeps: planned runs of several arms and seeds, made where they are missing, and measured."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from whence.core import WhenceError, check_flag, explain_write_errors, preserve_rng_state, require_file, write_json
from whence.lab.arms import STANDARD
from whence.lab.cluster import check_start, start_jobs
from whence.lab.efficiency import Curve, summarise
from whence.lab.kept_runs import find_finished, keep_run
from whence.lab.plans import AnyConfig, Planned, read_config, runner_of
from whence.lab.workers import describe_failure
from whence.runs import RunDirectory, Table, check_content, lock_directory


class Watch(Protocol):
    """What runs report to."""

    def kept(self, planned: Planned) -> None:
        """Called with a run that was finished before."""
        return

    def rounds(self, planned: Planned, done: int) -> None:
        """Called with the rounds that a run under way has done: 0 before the first, and all of them at the end."""
        return

    def ended(self, planned: Planned, failure: str | None) -> None:
        """Called with a run that has ended, and why it failed."""
        return


class _NoWatch(Watch):
    """Shows nothing."""


@contextmanager
def _start_runs(
    runs: Sequence[Planned], out: Path, watch: Watch, workers: int | None, on: str, *, deletes: bool = False
) -> Iterator[Iterator[tuple[Planned, str | None]]]:
    """Check the settings of runs, then lock their directory and yield each run as it ends, with why it failed.

    Nothing is written before all settings were checked and there is a place to run.
    """
    # Seeds are checked alike. To prepare may take long, and each worker would do it.
    distinct = {json.dumps(replace(each.config, seed=0).to_json(), sort_keys=True): each.config for each in runs}
    for config in distinct.values():
        runner_of(config).prepare(config)
        if deletes and on == "local":  # another machine may have other devices
            with preserve_rng_state():
                runner_of(config).check(config)
    jobs = [(planned.config, planned.run_path(out)) for planned in runs]
    ongoing = start_jobs(jobs, workers, on, lambda place, rounds: watch.rounds(runs[place], rounds))
    with lock_directory(out), ongoing as ends:
        yield ((runs[place], failure) for place, failure in ends)


@dataclass(frozen=True, eq=False)
class Comparison:
    """A finished comparison.

    Attributes:
        path: its directory; `comparison.json` lists the runs, which are in `runs/ARM/seed_S`.
        configs: the runs.
        trust: see `RunDirectory.open`.
        summary: `{env: {arm: {metric: {"mean", "low", "high", "per_seed", "null", ...}}}}`; see `summarise`.
    """

    path: Path
    configs: Sequence[AnyConfig]
    summary: Mapping[str, Any]
    trust: bool = False

    def table(self, name: Table) -> pl.DataFrame:
        """Return one of the runs' tables, all runs below each other, with columns `arm` and `seed`."""
        parts = [
            self.run(config).table(name).with_columns(arm=pl.lit(config.arm), seed=pl.lit(config.seed))
            for config in self.configs
        ]
        return pl.concat(parts, how="diagonal")

    def run(self, config: AnyConfig) -> RunDirectory:
        """Return the directory of one of the runs."""
        return RunDirectory.open(run_path(self.path, config), trust=self.trust)


def run_path(path: Path, config: AnyConfig) -> Path:
    """Return the directory of one run of a comparison."""
    return Planned(None, config.arm, config).run_path(path)


def compare(
    configs: Sequence[AnyConfig],
    path: Path,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    on: str = "local",
    watch: Watch | None = None,
) -> Comparison:
    """Run what is not yet finished, then measure all arms against `ppo` and write `summary.json`.

    Each run has a process with one torch thread; results do not depend on how many there are. A process imports the
    script that called this, so a script calls it under `if __name__ == "__main__":`. A comparison that was interrupted
    goes on where it was when it is started again: finished runs are not repeated, and the others go on. The settings of
    all runs are checked before the first one starts.

    Args:
        configs: from `plan_comparison`.
        path: the directory.
        workers: processes at a time; None: one per core.
        overwrite: delete these runs where the directory holds them, or others in their place, and start anew.
        on: "local": in processes of this machine; "ray": on the Ray cluster that RAY_ADDRESS names, or on a Ray that is
            started on this machine.
        watch: called with what happens.

    Raises:
        WhenceError: the standard arm is missing, a run's settings are refused or there is no Ray cluster, and nothing
            was run or deleted; or a run failed.
        Unsupported: Ray is not installed.
        RunDirectoryError: the directory holds runs of another configuration, or is that of a run or a sweep, and
            nothing was run; or another process is writing to it.
    """
    check_start(workers, on)
    check_flag("overwrite", overwrite)
    if STANDARD not in (arms := list(dict.fromkeys(config.arm for config in configs))):
        raise WhenceError(
            f"The arms {', '.join(arms)} lack {STANDARD!r}, which the others are measured against. Add it."
        )
    check_content(path, "comparison")
    runs, watch = [Planned(None, config.arm, config) for config in configs], watch or _NoWatch()
    todo = [
        each for each in runs if overwrite or not runner_of(each.config).is_finished(each.config, each.run_path(path))
    ]
    with _start_runs(todo, path, watch, workers, on, deletes=overwrite) as ended_runs:
        if overwrite:  # nothing is deleted before the cluster is there
            with explain_write_errors(path):
                (path / "comparison.json").unlink(missing_ok=True)
            for planned in runs:
                description = {"experiment": planned.config.to_json()}
                RunDirectory.create(planned.run_path(path), description, overwrite=True).release()
        for planned in runs:
            if planned not in todo:
                watch.kept(planned)
        for planned, failure in ended_runs:
            if failure is not None:
                raise WhenceError(
                    f"The run of arm {planned.label}, seed {planned.config.seed}, failed: {failure}. Finished runs are "
                    "kept."
                )
            watch.ended(planned, None)
        curves: dict[str, dict[int, Curve]] = {arm: {} for arm in arms}
        for planned in runs:
            curve = runner_of(planned.config).read_curve(planned.config, planned.run_path(path))
            curves[planned.label][planned.config.seed] = curve
        summary = {configs[0].env: summarise(curves, standard=STANDARD)}
        with explain_write_errors(path):  # killed between the two files, it holds no figures of other runs
            (path / "comparison.json").unlink(missing_ok=True)
        write_json(path / "summary.json", summary)
        write_json(path / "comparison.json", [config.to_json() for config in configs])
    return Comparison(path, configs, summary)


def load_comparison(path: Path, *, trust: bool = False) -> Comparison:
    """Read a finished comparison, with `trust` in its runs; a `WhenceError` if there is none, or it is damaged."""
    file = path / "comparison.json"
    try:
        configs = [read_config(config) for config in json.loads(require_file(file).read_text(encoding="utf-8"))]
        if outside := [config.arm for config in configs if Path(config.arm).name != config.arm]:
            raise ValueError(f"{outside[0]!r} is no arm")
        file = path / "summary.json"
        summary = json.loads(require_file(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WhenceError(f"{file} is not there: {path} holds no finished comparison. Run whence compare.") from None
    except (OSError, TypeError, ValueError) as failure:
        raise WhenceError(
            f"{file} is no such file of a comparison ({failure}). Restore it, or give the same whence compare again: "
            "finished runs are not repeated."
        ) from None
    return Comparison(path, configs, summary, trust)


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
        workers: processes at a time; as in `compare`.
        on: "local" or "ray"; as in `compare`.

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
    finished = find_finished(runs, out)
    todo, failures = [planned for planned in runs if planned not in finished], dict[str, str]()
    with _start_runs(todo, out, watch, workers, on) as ended_runs:
        for planned in finished:
            watch.kept(planned)
            shutil.rmtree(planned.run_path(out), ignore_errors=True)  # A kill may have left it.
        for planned, failure in ended_runs:
            try:
                if failure is None:
                    keep_run(planned, out)
            except Exception as error:  # of this run alone, whatever it is
                failure = describe_failure(error)
            if failure is not None:
                failures[planned.name] = failure
            watch.ended(planned, failure)
    return failures
