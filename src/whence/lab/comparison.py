"""Several arms over several seeds, run in worker processes and measured against each other."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from whence.core import WhenceError, explain_write_errors, write_json
from whence.lab.cluster import check_start, start_jobs
from whence.lab.efficiency import Curve, summarise
from whence.lab.workers import AnyConfig, read_config, runner_of
from whence.runs import RunDirectory, Table, check_content, lock_directory
from whence.stored import STANDARD

Progress = Callable[[AnyConfig, int], None]
"""Called with a run and the number of its rounds that are done."""


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
    return path / "runs" / config.arm / f"seed_{config.seed}"


def compare(
    configs: Sequence[AnyConfig],
    path: Path,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    on: str = "local",
    progress: Progress = lambda config, rounds: None,
) -> Comparison:
    """Run what is not yet finished, then measure all arms against `ppo` and write `summary.json`.

    Each run has a process with one torch thread; results do not depend on how many there are. A process imports the
    script that called this, so a script calls it under `if __name__ == "__main__":`. A comparison that was interrupted
    goes on where it was when it is started again: finished runs are not repeated, and the others go on. The settings of
    all runs are checked before the first one starts.

    Args:
        configs: from `plan`.
        path: the directory.
        workers: processes at a time; None: one per core.
        overwrite: delete these runs where the directory holds them, or others in their place, and start anew.
        on: "local": in processes of this machine; "ray": on the Ray cluster that RAY_ADDRESS names, or on a Ray that is
            started on this machine.
        progress: called after every round.

    Raises:
        WhenceError: the standard arm is missing, a run's settings are refused or there is no Ray cluster, and nothing
            was run or deleted; or a run failed.
        Unsupported: Ray is not installed.
        RunDirectoryError: the directory holds runs of another configuration, or is that of a run or a sweep, and
            nothing was run; or another process is writing to it.
    """
    check_start(workers, on)
    if STANDARD not in (arms := list(dict.fromkeys(config.arm for config in configs))):
        raise WhenceError(
            f"The arms {', '.join(arms)} lack {STANDARD!r}, which the others are measured against. Add it."
        )
    check_content(path, "comparison")
    todo = [each for each in configs if overwrite or not runner_of(each).is_finished(each, run_path(path, each))]
    for number, config in enumerate(todo):
        if replace(config, seed=0) not in [replace(other, seed=0) for other in todo[:number]]:
            runner_of(config).prepare(config)
    jobs = [(config, run_path(path, config)) for config in todo]
    running = start_jobs(jobs, workers, on, lambda place, rounds: progress(todo[place], rounds))
    with lock_directory(path), running as ends:  # nothing is deleted before the cluster is there
        if overwrite:
            with explain_write_errors(path):
                (path / "comparison.json").unlink(missing_ok=True)
            for config in configs:
                description = {"experiment": config.to_json()}
                RunDirectory.create(run_path(path, config), description, overwrite=True).release()
        for config in configs:
            progress(config, 0 if config in todo else config.rounds)
        for place, failure in ends:
            if failure is not None:
                config = todo[place]
                raise WhenceError(
                    f"The run of arm {config.arm}, seed {config.seed}, failed: {failure}. Finished runs are kept."
                )
        curves: dict[str, dict[int, Curve]] = {}
        for config in configs:
            curve = runner_of(config).read_curve(config, run_path(path, config))
            curves.setdefault(config.arm, {})[config.seed] = curve
        finished = Comparison(path, configs, {configs[0].env: summarise(curves, standard=STANDARD)})
        with explain_write_errors(path):  # killed between the two files, it holds no figures of other runs
            (path / "comparison.json").unlink(missing_ok=True)
        write_json(path / "summary.json", finished.summary)
        write_json(path / "comparison.json", [config.to_json() for config in configs])
        return finished


def load_comparison(path: Path, *, trust: bool = False) -> Comparison:
    """Read a finished comparison: its runs, as `comparison.json` lists them, and `summary.json`; with `trust` in them.

    Raises:
        WhenceError: there is none, or a file is damaged.
    """
    file = path / "comparison.json"
    try:
        configs = [read_config(config) for config in json.loads(file.read_text(encoding="utf-8"))]
        if outside := [config.arm for config in configs if Path(config.arm).name != config.arm]:
            raise ValueError(f"{outside[0]!r} is no arm")
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WhenceError(f"{file} is not there: {path} holds no finished comparison. Run whence compare.") from None
    except (OSError, TypeError, ValueError) as failure:
        raise WhenceError(
            f"{file} does not list the runs of a comparison ({failure}). Restore it, or give the same whence compare "
            "again: finished runs are not repeated."
        ) from None
    return Comparison(path, configs, summary, trust)
