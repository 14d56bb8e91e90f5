"""The tables of results/doorkey: returns of training and of the last policy, by arm, over the seeds that all arms have.

Run: `python -m studies.practice.doorkey results/doorkey`. A run's training return is the mean over its rounds of the
mean return of the episodes that ended in the round; its final return is the test return of the last policy. The share
kept is of the rounds after the warm-up. An arm's difference is from the same seed of another arm.
"""

from collections.abc import Callable, Mapping

import typer

from studies.shared import Out, mean_cell, table, write_page
from whence.lab import KeptRun, load_sweep

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
        return mean_cell([a - b for a, b in zip(values[arm], values[other], strict=True)])

    lines = [["arm", "seeds", "mean", "less ppo's", "less the control's", "share kept"]]
    for arm, by_seed in runs.items():
        kept = mean_cell([average_kept(by_seed[seed]) for seed in seeds], percent=True)
        differences = subtract(arm, "ppo"), subtract(arm, CONTROLS.get(arm))
        lines.append([arm, str(len(seeds)), mean_cell(values[arm]), *differences, kept])
    return table(lines)


def tabulate_runs(runs: Runs) -> str:
    """Return every run that is there, by seed."""
    lines = [["seed", "arm", *MEASURES, "share kept"]]
    for seed in sorted({seed for by_seed in runs.values() for seed in by_seed}):
        for arm, run in ((arm, by_seed[seed]) for arm, by_seed in runs.items() if seed in by_seed):
            returns = (f"{measure(run):.3f}" for measure in MEASURES.values())
            lines.append([str(seed), arm, *returns, f"{average_kept(run):.0%}"])
    return table(lines)


def write_tables(out: Out) -> None:
    """Write tables.md."""
    (runs,) = load_sweep(out).values()
    parts = ["# DoorKey-8x8: tables\n\nWritten by `python -m studies.practice.doorkey results/doorkey`."]
    for name, measure in MEASURES.items():
        parts += [f"## By the {name}", tabulate_arms(runs, measure)]
    write_page(out / "tables.md", *parts, "## The runs", tabulate_runs(runs))


if __name__ == "__main__":
    typer.run(write_tables)
