"""Would recorded rounds have told how to set PPO? Rounds of `studies.practice.run`'s environments, at the defaults.

Run: `python -m studies.tuning.run results/tuning [--seeds 0,1] [--only cartpole] [--workers 2]`. PPO is trained at
SB3's defaults in an environment of the study of practice, ten rounds of it are recorded, and
`studies.tuning.candidates` tries other settings on them. A line is written for each run: means over orders and halves
by round, candidate and scale. A finished run is not made again. Tables: `python -m studies.tuning.tables`, which holds
them against what training with those settings really gave.
"""

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import torch
import typer

from studies.practice.run import WORLDS, configure_world
from studies.stored import round_numbers
from studies.tuning.candidates import measure_run
from whence import experiments
from whence.experiments.rowfile import put_row, read_rows
from whence.runs import RunDirectory
from whence.runs.files import lock_directory

ROUNDS = 10
RUNS = Path("out/tuning")
KEY = ("env", "seed")


@dataclass(frozen=True)
class Job:
    """A training run whose rounds are tried again."""

    env: str
    seed: int

    @property
    def recorded(self) -> list[int]:
        """The rounds that are recorded: evenly spread, the first not among them."""
        rounds = WORLDS[self.env].rounds
        return sorted({int(number) for number in np.linspace(2, rounds, ROUNDS).round()})


def study_run(job: Job, out: Path, runs: Path) -> float:
    """Train a run where that is not done and try other settings on its rounds; return the seconds of the latter."""
    torch.set_num_threads(1)
    directory = runs / job.env / f"seed_{job.seed}"
    config = replace(configure_world(job.env), seed=job.seed, arm="ppo", eval_episodes=0)
    experiments.run(config, directory, recordings=job.recorded)
    began = time.perf_counter()
    rows = pl.DataFrame(measure_run(RunDirectory.open(directory)))
    seconds = time.perf_counter() - began
    means = rows.group_by("round", "candidate", "scale", maintain_order=True).agg(
        pl.col("gain", "gain_by_returns", "plain", "kl").mean()
    )
    line = {"env": job.env, "seed": job.seed, "seconds": seconds, "trials": means.to_dict(as_series=False)}
    with lock_directory(out, wait=True):
        put_row(out / "trials.parquet", round_numbers(line), KEY)
    return seconds


def read_trials(out: Path) -> list[dict[str, Any]]:
    """Return the lines that are written."""
    return list(read_rows(out / "trials.parquet", KEY).values())


def list_jobs(names: Sequence[str], seeds: Sequence[int], out: Path) -> list[Job]:
    """Return the jobs that are not done."""
    done = {(line["env"], line["seed"]) for line in read_trials(out)}
    return [Job(name, seed) for seed in seeds for name in names if (name, seed) not in done]


def main(
    out: Annotated[Path, typer.Argument(help="Directory of the results.")] = Path("results/tuning"),
    runs: Annotated[Path, typer.Option(help="Where training runs are kept.")] = RUNS,
    only: Annotated[str, typer.Option(help="Environments, separated by commas.")] = ",".join(WORLDS),
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    workers: Annotated[int, typer.Option(help="Runs at a time.")] = 2,
) -> None:
    """Run what is not there yet."""
    out.mkdir(parents=True, exist_ok=True)
    jobs = list_jobs(only.split(","), [int(seed) for seed in seeds.split(",")], out)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(study_run, job, out, runs): job for job in jobs}
        for future in as_completed(futures):
            print(f"{futures[future]}: {future.result():.0f} s", flush=True)


if __name__ == "__main__":
    typer.run(main)
