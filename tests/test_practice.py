"""The study of practice: what it trains, in which order, and what is made of its results."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy import stats

from whence.experiments.rl.config import RunConfig

ROOT = Path(__file__).parent.parent


@pytest.fixture
def study(monkeypatch):
    """The modules of the study."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import practice, practice_tables

    return practice, practice_tables


def test_rates_and_targets_of_all_seeds_come_before_the_other_settings(study, monkeypatch):
    practice, _ = study
    # Settings are checked against a live environment, which takes long for so many.
    monkeypatch.setattr(practice, "configure_world", lambda name, **settings: RunConfig(name, "ppo", 0))
    planned = practice.plan_study(["cartpole", "acrobot"], [0, 1, practice.FEW])
    main = {f"{env}-{steps.name}" for env in ("cartpole", "acrobot") for steps in practice.list_steps()}
    is_main = [run.group in main for run in planned]
    assert is_main == sorted(is_main, reverse=True)
    assert [run.config.seed for run, first in zip(planned, is_main, strict=True) if first] == sorted(
        run.config.seed for run, first in zip(planned, is_main, strict=True) if first
    )
    assert {run.config.seed for run, first in zip(planned, is_main, strict=True) if not first} == {0, 1}


def test_the_probability_of_improvement_is_mann_whitneys_over_the_pairs(study):
    _, tables = study
    rng = np.random.default_rng(0)
    one = [rng.integers(5, size=size).astype(float) for size in (4, 7)]
    other = [rng.integers(5, size=size).astype(float) for size in (4, 7)]
    expected = [stats.mannwhitneyu(a, b).statistic / (a.size * b.size) for a, b in zip(one, other, strict=True)]
    assert tables.probability_of_improvement(one, other) == pytest.approx(np.mean(expected), abs=1e-12)
    assert tables.probability_of_improvement([np.ones(2)], [np.ones(3)]) == 0.5
    assert tables.probability_of_improvement([np.ones(2)], [np.zeros(3)]) == 1


def test_a_seeds_best_rate_is_chosen_by_the_other_seeds(study):
    _, tables = study
    low, high = tables.RATE_STEPS[:2]
    # By its own result seed 0 would take the first rate, by the others' the second.
    results = [(0, low, 9.0), (0, high, 1.0), (1, low, 2.0), (1, high, 3.0), (2, low, 2.0), (2, high, 3.0)]
    runs = pl.DataFrame(
        [{"env": "a", "arm": "ppo", "seed": seed, "steps": steps, "last": last} for seed, steps, last in results]
    )
    best = tables.choose_best(runs, "ppo", "last").filter(pl.col("seed") == 0)
    assert best["steps"].to_list() == [high]
    assert best["last"].to_list() == [1.0]


def test_one_seed_makes_no_comparison(study, monkeypatch):
    _, tables = study
    monkeypatch.setattr(tables, "REPEATS", 20)
    runs = pl.DataFrame({"env": ["a", "a", "b"], "seed": [0, 1, 0], "last": [1.0, 2.0, 3.0]})
    assert tables.compare(runs, runs) is None
    answer = tables.compare(runs.filter(pl.col("env") == "a"), runs)
    assert (answer["environments"], answer["runs"], answer["difference"]["mean"]) == (1, 2, 0)
