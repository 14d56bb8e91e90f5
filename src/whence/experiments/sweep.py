"""Sweeps: many comparisons in one directory, run where they are missing, and read."""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol

from whence.errors import RunDirectoryError
from whence.experiments.arms import STANDARD, place_arm
from whence.experiments.cluster import check_place, run_all_on_ray
from whence.experiments.rl.curves import CurveFiles, KeptRun
from whence.experiments.sweepfile import Planned, find_differences
from whence.experiments.workers import check_workers, describe_failure, leave_imported_script, run_all
from whence.metrics import summarise
from whence.runs import RunDirectory, check_content, lock_directory


class Watch(Protocol):
    """What a sweep reports to."""

    def kept(self, planned: Planned) -> None:
        """Called with a run that was finished before."""

    def rounds(self, planned: Planned, done: int) -> None:
        """Called with the rounds that a run under way has done: 0 before the first, and all of them at the end."""

    def ended(self, planned: Planned, failure: str | None) -> None:
        """Called with a run that has ended, and why it failed."""


def run_sweep(
    runs: Sequence[Planned],
    out: Path,
    watch: Watch,
    *,
    workers: int | None = None,
    keep_runs: bool = False,
    on: str = "local",
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
        keep_runs: keep the directories of the runs that are made now, with every round's records and policies.
        on: "local": in processes of this machine; "ray": on the Ray cluster that RAY_ADDRESS names, or on a Ray that is
            started on this machine.

    Returns:
        Why runs failed, by "NAME/ARM/seed_S".

    Raises:
        RunDirectoryError: another sweep is writing to the directory, or it holds a run, a comparison, another run where
            one of these belongs, or a damaged file; nothing was run.
        WhenceError: fewer than one worker, or there is no Ray cluster, and nothing was run or deleted; or the script
            lacks that line.
        Unsupported: Ray is not installed.
    """
    leave_imported_script()
    check_workers(workers)
    check_place(on)
    check_content(out, "sweep")
    with lock_directory(out):
        finished = _find_finished(runs, out)
        todo = [planned for planned in runs if planned not in finished]
        jobs = [(planned.config, planned.run_path(out)) for planned in todo]

        def report(place: int, rounds: int) -> None:
            watch.rounds(todo[place], rounds)

        running = run_all_on_ray(jobs, workers, report) if on == "ray" else closing(run_all(jobs, workers, report))
        with running as ends:  # nothing is deleted before the cluster is there
            for planned in finished:
                watch.kept(planned)
                if not keep_runs and _discard_mark(planned.run_path(out)).exists():  # killed before it was discarded
                    _discard(planned.run_path(out))
            for planned in todo:
                _remove_other_run(planned, out)
            failures = {}
            for place, failure in ends:
                planned = todo[place]
                if failure is None:
                    try:
                        _store_run(planned, out, keep_runs=keep_runs)
                    except Exception as error:  # of this run alone, whatever it is
                        failure = describe_failure(error)
                if failure is not None:
                    failures[planned.name] = failure
                watch.ended(planned, failure)
            return failures


def _find_finished(runs: Sequence[Planned], out: Path) -> list[Planned]:
    """Return the runs whose results are there.

    Raises:
        RunDirectoryError: the results are of a run with other settings, or lack columns that the sweep asks for.
    """
    files = CurveFiles.of_sweep(out)
    stored_runs = files.read()
    finished = []
    for planned in runs:
        stored_run = stored_runs.get((planned.group, planned.label, planned.config.seed))
        if stored_run is not None:
            _check_same_run(planned, stored_run, files.results)
            finished.append(planned)
    return finished


def _check_same_run(planned: Planned, stored_run: KeptRun, path: Path) -> None:
    before, now = stored_run.config.to_json(), planned.config.to_json()
    name = planned.name
    if others := [field for field in now if before[field] != now[field]]:
        raise RunDirectoryError(
            f"{name} in {path} is another run: its {others[0]} is {before[others[0]]!r}, the sweep's "
            f"{now[others[0]]!r}. Choose another directory, or delete its row."
        )
    if missing := [column for column in planned.metrics if column not in stored_run.tables["rounds"].columns]:
        raise RunDirectoryError(
            f"{name} in {path} has no {missing[0]}, which the sweep's `metrics` ask for, and its run is gone. Delete "
            "its row to have the run made again, choose another directory, or leave the name out."
        )


def _remove_other_run(planned: Planned, out: Path) -> None:
    """Remove an unfinished run of another configuration; what is no run of a sweep stays, and is refused later."""
    try:
        experiment = RunDirectory.open(planned.run_path(out)).experiment
    except RunDirectoryError:
        return
    if experiment and experiment != planned.config.to_json():
        with suppress(OSError):
            _remove_run(planned.run_path(out))


def _store_run(planned: Planned, out: Path, *, keep_runs: bool) -> None:
    """Write a finished run's rows, then discard its directory."""
    path = planned.run_path(out)
    if keep_runs:
        _discard_mark(path).unlink(missing_ok=True)
    else:
        _discard_mark(path).touch()
    files = CurveFiles.of_sweep(out)
    files.write(planned.group, planned.label, planned.config, RunDirectory.open(path), more=planned.metrics)
    if not keep_runs:
        _discard(path)


def _discard_mark(path: Path) -> Path:
    """Return the file whose presence says that a run's directory is to be discarded once its results are there."""
    return path.with_name(f"{path.name}.discard")


def _discard(path: Path) -> None:
    """Remove a run whose results are there; what the system refuses to remove is left to the next sweep."""
    with suppress(OSError):
        _remove_run(path)
        _discard_mark(path).unlink()


def _remove_run(path: Path) -> None:
    """Remove a run's directory; killed half-way, it leaves nothing under that name."""
    aside = path.with_name(f".{path.name}.removed")
    shutil.rmtree(aside, ignore_errors=True)  # of a sweep that was killed here
    if path.exists():
        path.rename(aside)
        shutil.rmtree(aside)


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
    files = CurveFiles.of_sweep(out)
    for (group, label, seed), stored_run in files.read().items():
        if others := find_differences(settings.setdefault(group, {}), label, stored_run.config):
            raise RunDirectoryError(
                f"{group}/{label}/seed_{seed} in {files.results} differs from other runs there in {', '.join(others)}, "
                "and cannot be compared with them. Move the one or the others to another directory."
            )
        results.setdefault(group, {}).setdefault(label, {})[seed] = stored_run
    if not results:
        raise RunDirectoryError(f"{out} holds no finished run of a sweep. Run whence sweep FILE --out {out}.")
    for group, labels in results.items():
        firsts = [(label, next(iter(runs.values())).config) for label, runs in labels.items()]
        firsts.sort(key=lambda item: (place_arm(item[1].arm), item[1].drop))
        results[group] = {label: labels[label] for label, _ in firsts}
    return results


def summarise_sweep(results: Results) -> dict[str, Any]:
    """Return the summary of every group that holds the standard arm: `{group: {label: {metric: entry}}}`.

    Entries are those of `summarise`; an arm's seeds need not be as many as the standard's.
    """
    return {
        group: summarise(
            {label: {seed: stored_run.curve for seed, stored_run in runs.items()} for label, runs in labels.items()},
            standard=STANDARD,
        )
        for group, labels in results.items()
        if STANDARD in labels
    }
