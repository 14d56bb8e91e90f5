"""The results of `studies.practice.run`: a row for each run that is tabulated."""

from itertools import takewhile
from pathlib import Path

import numpy as np
import polars as pl

from studies.practice.run import ARM_SEEDS, DEFAULT_RATE, DROP, RATES, SEEDS, TARGETS, WORLDS, list_arms, list_steps
from whence.experiments import KeptRun, Results, RunConfig, load_sweep, make_label

RANGE = 10.0
"""The highest rate that the controller of a target set, over the one at the start, and that over the lowest."""

RESULTS = {"last": "last return", "mean": "mean return"}
RATE_STEPS = tuple(f"lr{rate:g}" for rate in sorted(RATES))
TARGET_STEPS = tuple(f"kl{target:g}" for target in sorted(TARGETS))
STEPS = (*RATE_STEPS, *TARGET_STEPS)
ARMS = ("ppo", "iif", "iif-drop0.5", "random")
REWARDED = "iif-rewarded"


def count_seeds(sweep: Results, name: str) -> int:
    """Return the seeds, 0 and those after it, of which an environment has all planned runs at rates and targets."""
    return len(list(takewhile(lambda seed: _is_complete(sweep, name, seed), range(SEEDS[name]))))


def _is_complete(sweep: Results, name: str, seed: int) -> bool:
    return all(
        seed in sweep.get(f"{name}-{steps.name}", {}).get(make_label(RunConfig(name, arm, seed, drop=drop), DROP), {})
        for steps in list_steps()
        for arm, drop in list_arms(name, seed, steps)
    )


def read_runs(out: Path) -> pl.DataFrame:
    """Return a row for each run: environment, steps, arm, seed, results, divergence, and whether it is pooled.

    Those seeds of an environment are read that are complete: runs of the next one are kept until it is, too. Those are
    pooled that are complete in every environment. LDA's script has seeds of its own.
    """
    sweep = load_sweep(out)
    complete = {name: count_seeds(sweep, name) for name in WORLDS}
    rows = []
    for group, arms in sweep.items():
        env, _, steps = group.rpartition("-")
        seeds = SEEDS[env] if steps == "lda" else complete[env]
        shared = SEEDS[env] if steps == "lda" else min(complete.values())
        rows += [
            {"env": env, "steps": steps, "arm": arm, "seed": seed, **_measure(run, steps), "pooled": seed < shared}
            for arm, runs in arms.items()
            for seed, run in runs.items()
            if seed < min(seeds, ARM_SEEDS.get((run.config.arm, run.config.drop), seeds))
        ]
    return pl.DataFrame(rows)


def _measure(run: KeptRun, steps: str) -> dict[str, float | bool]:
    returns = run.tables["evaluations"]["test_return"].to_list()
    rounds = run.tables["rounds"]
    name = "train/kl" if "train/kl" in rounds.columns else "train/approx_kl"
    divergences = rounds[name].to_numpy()
    tail = divergences[len(rounds) // 10 :]
    tail = tail[np.isfinite(tail)]
    _, _, target_text = steps.partition("kl")
    target = float(target_text or "nan")
    whole = rounds["dropped_share"].to_numpy() == 0
    rates = rounds["train/learning_rate"].drop_nulls().to_numpy()
    return {
        "first": returns[0],
        "last": returns[-1],
        "mean": float(np.mean(returns[1:])),
        "kl": float(np.median(tail)),
        "within": float(np.mean((tail > target / 1.5) & (tail < target * 1.5))),
        "first_kl": float(divergences[0]),
        "whole": float(np.mean(whole)),
        "first_whole": bool(whole[0]),
        "rate": float(np.median(rates)),
        "lowest": float(np.mean(rates < 1.01 * DEFAULT_RATE / RANGE)),
        "highest": float(np.mean(rates > 0.99 * DEFAULT_RATE * RANGE)),
    }


def scale_results(runs: pl.DataFrame) -> pl.DataFrame:
    """Return the runs with each result scaled in its environment, by `ppo` and `iif` at the rates and targets."""
    main = runs.filter(pl.col("steps").is_in(STEPS), pl.col("arm").is_in(["ppo", "iif"]))
    means = main.group_by("env", "steps", "arm").agg(pl.col(*RESULTS).mean().name.prefix("best "))
    best = means.group_by("env").agg(pl.col("^best .*$").max())
    zero = runs.group_by("env").agg(zero=pl.col("first").mean())
    scaled = runs.join(best, on="env").join(zero, on="env")
    shares = [(pl.col(name) - pl.col("zero")) / (pl.col(f"best {name}") - pl.col("zero")) for name in RESULTS]
    # Polars adds up in any order.
    return scaled.with_columns(share.round(9) for share in shares).drop("^best .*$", "zero")


def pick(runs: pl.DataFrame, arm: str, steps: str) -> pl.DataFrame:
    """Return the runs of an arm at one size of step."""
    return runs.filter(pl.col("arm") == arm, pl.col("steps") == steps)
