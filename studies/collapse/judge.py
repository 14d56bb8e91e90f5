"""What is said of each training: that it broke, when, and what was unusual before; and what two rivals say.

Run: `python -m studies.collapse.judge results/collapse [--runs out/collapse] [--only planted]`. Rivals read the metrics
that Stable-Baselines3 logs: thresholds on them, as somebody sets who reads logs, and rldoctor (`pip install
rldoctor==0.2.0`), which is left out where it is not installed.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import typer

from studies.collapse.worlds import SEEDS, WORLDS
from studies.shared import Only, Out, Row, Runs, report, write_line
from whence.findings import LEAST_DEPTH, find, find_drop, read_returns
from whence.runs import RunDirectory

KEYS = ("name", "seed")

LINES = 3
"""Lines in which a cause has to be."""


def judge(run: RunDirectory) -> Row:
    """Return what findings say of a run, in their order."""
    began = time.process_time()
    lines = [{"kind": one.kind, "rank": one.rank, "title": one.title, "round": one.round} for one in find(run)]
    seconds = time.process_time() - began
    drop = find_drop(*read_returns(run))
    about = None if drop is None or drop.depth < LEAST_DEPTH else {"round": drop.round, "depth": drop.depth}
    return {"lines": lines, "drop": about, "rounds": len(run.rounds()), "seconds": seconds}


def read_thresholds(metrics: pl.DataFrame) -> dict[str, Any]:
    """Return what thresholds say: whether the logged return ends below two thirds of its best rise, and of what.

    The lines are those metrics that leave their usual range in any round: a divergence above 0.1 nats, a clipped share
    above a half, what the critic explains below −1, an entropy below a tenth of the first.
    """
    returns = metrics["episode_return"].drop_nulls().to_numpy()
    worst = {
        "divergence": _first(metrics, "train/approx_kl", lambda values: values > 0.1),
        "clipped share": _first(metrics, "train/clip_fraction", lambda values: values > 0.5),
        "explained variance": _first(metrics, "train/explained_variance", lambda values: values < -1),
        "entropy": _first(metrics, "train/entropy_loss", lambda values: -values < -0.1 * values[0]),
    }
    broke = len(returns) > 1 and returns[-1] < returns[0] + 2 / 3 * (returns.max() - returns[0])
    fell = np.flatnonzero(returns >= returns[0] + 2 / 3 * (returns.max() - returns[0]))
    at = int(fell[-1]) + 2 if broke and len(fell) else None
    return {"drop": at, "lines": sorted((name for name in worst if worst[name]), key=lambda name: worst[name] or 0)}


def _first(metrics: pl.DataFrame, name: str, holds: Any) -> int | None:
    if name not in metrics.columns:
        return None
    values = metrics[name].cast(pl.Float64).fill_null(np.nan).to_numpy()
    places = np.flatnonzero(holds(values))
    return int(places[0]) + 1 if len(places) else None


def ask_doctor(metrics: pl.DataFrame) -> Sequence[str] | None:
    """Return the titles of rldoctor's findings on a run's metrics; None: it is not installed."""
    try:
        from rl_doctor import diagnose, run_from_records
    except ImportError:
        return None
    names = {
        "reward_mean": pl.col("episode_return"),
        "entropy": -pl.col("train/entropy_loss"),
        "kl": pl.col("train/approx_kl"),
        "pg_clipfrac": pl.col("train/clip_fraction"),
        "value_explained_var": pl.col("train/explained_variance"),
        "lr": pl.col("train/learning_rate"),
        "step": pl.col("round"),
    }
    rows = metrics.select(column.cast(pl.Float64).alias(name) for name, column in names.items()).to_dicts()
    return [f"{one.severity.name}: {one.title}" for one in diagnose(run_from_records(rows)).findings]


def main(out: Out, runs: Runs = Path("out/collapse"), only: Only = "") -> None:
    """Judge all finished runs anew."""
    for name, world in WORLDS.items():
        for seed in SEEDS[world.kind]:
            path = runs.resolve() / f"{name}-{seed}"
            if not name.startswith(only) or not (path / "done").exists():
                continue
            run = RunDirectory.open(path)
            metrics = run.table("metrics").sort("round")
            rivals = {"thresholds": read_thresholds(metrics), "rldoctor": ask_doctor(metrics)}
            about = {"name": name, "seed": seed, "kind": world.kind, **judge(run), **rivals}
            write_line(out / "runs.parquet", about, KEYS)
            report(name, seed, about["drop"])


if __name__ == "__main__":
    typer.run(main)
