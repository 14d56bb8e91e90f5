"""The tables of results/doorkey: returns of training and of the last policy, by arm, over the seeds that all arms have.

Run: `python -m studies.practice.doorkey results/doorkey`. A run's training return is the mean over its rounds of the
mean return of the episodes that ended in the round; its final return is the test return of the last policy. The share
kept is of the rounds after the warm-up. An arm's difference is from the same seed of another arm.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from studies.markdown import cell, table
from studies.practice.tables import write_text
from whence.lab import KeptRun, load_sweep
from whence.statistics import t_interval

CONTROLS: Mapping[str, str] = {"dtv": "random-dtv-loo", "dtv-loo": "random-dtv-loo", "iif": "random"}
"""The arm that drops at random, for each arm that is compared with one."""


def average_training(run: KeptRun) -> float:
    """Return the mean return of training over a run's rounds."""
    return float(run.tables["rounds"]["episode_return"].mean())  # type: ignore[arg-type]


def read_final(run: KeptRun) -> float:
    """Return the test return of a run's last policy."""
    return float(run.tables["evaluations"]["test_return"][-1])


def average_kept(run: KeptRun) -> float:
    """Return the share of the records that trained, in a mean round after the warm-up."""
    return 1 - float(run.tables["rounds"]["dropped_share"][run.config.warmup :].mean())  # type: ignore[arg-type]


MEASURES: Mapping[str, Callable[[KeptRun], float]] = {"training return": average_training, "final return": read_final}

Runs = Mapping[str, Mapping[int, KeptRun]]


def tabulate_arms(runs: Runs, measure: Callable[[KeptRun], float]) -> str:
    """Return each arm's mean with its 95% t interval over the seeds of all arms, and its differences from others."""
    seeds = sorted(set.intersection(*({*by_seed} for by_seed in runs.values())))
    values = {arm: [measure(by_seed[seed]) for seed in seeds] for arm, by_seed in runs.items()}

    def subtract(arm: str, other: str | None) -> str:
        if other not in values or other == arm:
            return "–"
        return cell(t_interval([a - b for a, b in zip(values[arm], values[other], strict=True)]))

    rows = [
        [
            arm,
            str(len(seeds)),
            cell(t_interval(values[arm])),
            subtract(arm, "ppo"),
            subtract(arm, CONTROLS.get(arm)),
            cell(t_interval([average_kept(by_seed[seed]) for seed in seeds]), percent=True),
        ]
        for arm, by_seed in runs.items()
        if seeds
    ]
    return table([["arm", "seeds", "mean", "less ppo's", "less the control's", "share kept"], *rows])


def tabulate_runs(runs: Runs) -> str:
    """Return every run that is there, by seed."""
    rows = [
        [str(seed), arm, *(f"{measure(run):.3f}" for measure in MEASURES.values()), f"{average_kept(run):.0%}"]
        for seed in sorted({seed for by_seed in runs.values() for seed in by_seed})
        for arm, by_seed in runs.items()
        if (run := by_seed.get(seed)) is not None
    ]
    return table([["seed", "arm", *MEASURES, "share kept"], *rows])


def write_tables(out: Path) -> None:
    """Write tables.md."""
    (runs,) = load_sweep(out).values()
    parts = ["# DoorKey-8x8: tables\n\nWritten by `python -m studies.practice.doorkey results/doorkey`.\n"]
    for name, measure in MEASURES.items():
        parts += [f"## By the {name}\n", tabulate_arms(runs, measure), ""]
    parts += ["## The runs\n", tabulate_runs(runs), ""]
    write_text(out / "tables.md", "\n".join(parts))


def main(out: Annotated[Path, typer.Argument(help="Directory of the runs.")] = Path("results/doorkey")) -> None:
    """Write the tables of the runs that are there."""
    write_tables(out)


if __name__ == "__main__":
    typer.run(main)
