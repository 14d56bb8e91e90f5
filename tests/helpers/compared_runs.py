"""A comparison written by hand, and the records of its rounds."""

import numpy as np
import polars as pl

from helpers.explored_runs import table_of
from whence.lab import Comparison
from whence.lab.agents import RunConfig
from whence.lab.comparison import run_path
from whence.lab.efficiency import Curve, summarise
from whence.runs import RunDirectory

HOSTILE = "<script>alert(1)</script>\"'&</title><img src=x onerror=alert(2)>"


def by_hand(path, *, env="Some-v0", arms=("ppo", "iif"), env_kwargs=None, scored=("iif",), seeds=(0, 1)) -> Comparison:
    """A comparison of two rounds whose numbers are known, without any training."""
    configs = [
        RunConfig(env=env, arm=arm, seed=seed, rounds=2, env_kwargs=env_kwargs or {}) for seed in seeds for arm in arms
    ]
    curves = {}
    for number, config in enumerate(configs):
        directory = RunDirectory.create(run_path(path, config), config.to_json(), versions={"torch": HOSTILE})
        returns = [0.0, 1.0 + number, 2.0 + number]
        for k, value in enumerate(returns):
            directory.append("evaluations", {"round": k, "test_return": value, "standard_error": 0.1, "episodes": 2})
        for k in (1, 2):
            row = {"round": k, "dropped_share": 0.1 * number, "train/entropy_loss": -0.5 * k, "train/approx_kl": 0.01}
            if config.arm in scored:
                row |= {f"q{level:02d}": level * 1.0 + number for level in (0, 5, 25, 50, 75, 95, 100)} | {"mean": 0.5}
            directory.append("metrics", row)
            stages = {"collection_cpu": 1.0, "scoring_cpu": 2.0 * number, "optimisation_cpu": 3.0}
            directory.append("timings", {"round": k, **stages})
        curves.setdefault(config.arm, {})[config.seed] = Curve(np.array(returns), np.full(3, 0.1), np.ones(2))
    return Comparison(path, configs, {env: summarise(curves)})


def records_of(n=60, *, scored=True, reason="too low", **columns) -> pl.DataFrame:
    """A round's records as a run without errors of scores holds them, of states with a number."""
    table = table_of(n, reward=None, error=None, weight=None, **{"observation": np.arange(n) % 16, **columns})
    table = table.with_columns(pl.when("keep").then(None).otherwise(pl.lit(reason)).alias("reason"))
    return table if scored else table.drop("score")


def run_of(path, config, rounds=(), **columns) -> RunDirectory:
    """A run's directory with the same records in each of its rounds."""
    directory = RunDirectory.create(path, config)
    for number in rounds:
        directory.write_round("records", number, records_of(**columns))
        directory.append("metrics", {"round": number, "timestep": 60 * number, "dropped_share": 0.25, "mean": 0.1})
    return directory
