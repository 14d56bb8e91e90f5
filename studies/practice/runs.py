"""The results of `studies.practice.run`: a row for each run that is tabulated."""

from pathlib import Path

import numpy as np
import polars as pl

from studies.practice.run import ARM_SEEDS, DEFAULT_RATE, LDA_SEEDS, RATES, SEEDS, TARGETS
from whence.lab import KeptRun, load_sweep

RANGE = 10.0
"""The highest rate that the controller of a target set, over the one at the start, and that over the lowest."""

RESULTS = {"last": "last return", "mean": "mean return"}
RATE_STEPS = tuple(f"lr{rate:g}" for rate in sorted(RATES))
TARGET_STEPS = tuple(f"kl{target:g}" for target in sorted(TARGETS))
STEPS = (*RATE_STEPS, *TARGET_STEPS)
ARMS = ("ppo", "iif", "iif-drop0.5", "random")
REWARDED = "iif-rewarded"


def read_runs(out: Path) -> pl.DataFrame:
    """Return a row for each run: environment, steps, arm, seed, results, and divergence.

    Seeds beyond those that all environments have are left out, but for LDA's script, which has seeds of its own.
    """
    rows = []
    for group, arms in load_sweep(out).items():
        env, _, steps = group.rpartition("-")
        seeds = LDA_SEEDS if steps == "lda" else SEEDS
        rows += [
            {"env": env, "steps": steps, "arm": arm, "seed": seed, **_measure(run, steps)}
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
