"""Whether a training broke, and in which round, by tests of its policies: fresh episodes that no finding has seen.

Run: `python -m studies.collapse.evaluate results/collapse [--runs out/collapse] [--only hopper]`. The policies of the
first five rounds, of the best five and of the last five are tested by twenty episodes each. Where findings say that it
broke, so are those of eleven rounds around the drop; the round is where two levels fit their returns best.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from scipy import stats

from studies.collapse.worlds import SEEDS, WORLDS, make_env
from studies.shared import Only, Out, Row, Runs, Workers, report, run_jobs, write_line
from whence.core import named_tensors
from whence.findings import LEAST_DEPTH, find_drop, read_returns
from whence.findings.drops import split_in_two
from whence.lab import read_rows
from whence.runs import RunDirectory
from whence.stored.agents import load_agent, load_policy, measure_returns

KEYS = ("name", "seed")

AROUND, EPISODES = 5, 20

PART = 5
"""Rounds whose policies are tested at the beginning, at the best and at the end."""

SURE = 0.01
"""The p-value of Mann and Whitney's test below which the policies of some rounds are worse than those of others."""

Test = Callable[[int], float]


def choose_best(returns: Any) -> int:
    """Return the place of the first of those neighbouring rounds that have the highest mean return."""
    known = np.flatnonzero(np.isfinite(returns))
    return int(known[int(np.convolve(returns[known], np.ones(PART), "valid").argmax())])


def has_fallen(first: Sequence[float], best: Sequence[float], last: Sequence[float]) -> bool:
    """Return whether tests say that a training learned, and lost a third of it or more, neither by chance."""
    learned, lost = (stats.mannwhitneyu(best, each, alternative="greater").pvalue < SURE for each in (first, last))
    share = (np.mean(best) - np.mean(last)) / max(np.mean(best) - np.mean(first), 1e-12)
    return bool(learned and lost and share >= LEAST_DEPTH)


def make_test(run: RunDirectory, name: str) -> Test:
    """Return a function that tests the policy of a round, and returns the mean return."""
    env = partial(make_env, name)
    model = load_agent(run, 1, env=env)

    def test(number: int) -> float:
        load_policy(run, number, model)
        with measure_returns(run, model, number, episodes=EPISODES, seed=number, env=env) as measure:
            return measure({key: each.clone() for key, each in named_tensors(model.policy).items()}, 0)

    return test


def find_true_round(test: Test, drop: int, last: int) -> Row:
    """Return the tests around a drop, and the round from which they are lower."""
    numbers = range(max(1, drop - AROUND), min(last, drop + AROUND) + 1)
    tests = [*map(test, numbers)]
    return {"rounds": [*numbers], "tests": tests, "true_round": numbers[split_in_two(np.array(tests))]}


def evaluate(name: str, seed: int, runs: Path, out: Path) -> None:
    """Write the test returns of a training."""
    torch.set_num_threads(1)
    run = RunDirectory.open(runs / f"{name}-{seed}")
    rounds, returns = read_returns(run)
    drop, last, test = find_drop(rounds, returns), max(run.rounds("policies")), make_test(run, name)
    parts = [1, int(rounds[choose_best(returns)]), last - PART + 1]
    tests = [[*map(test, range(begin, begin + PART))] for begin in parts]
    row = {"name": name, "seed": seed, "parts": parts, "part_tests": tests, "fell": has_fallen(*tests)}
    row |= {"drop": None, "rounds": [], "tests": [], "true_round": None}
    if drop is not None and drop.depth >= LEAST_DEPTH:
        row |= {"drop": drop.round, **find_true_round(test, drop.round, last)}
    write_line(out / "evaluations.parquet", row, KEYS)
    report(name, seed, row["fell"], row["drop"], row["true_round"])


def main(out: Out, runs: Runs = Path("out/collapse"), only: Only = "", workers: Workers = 1) -> None:
    """Test what was not tested yet; where the environment itself is changed, the true round is known."""
    runs, out = runs.resolve(), out.resolve()
    done = {*read_rows(out / "evaluations.parquet", KEYS)}
    jobs = [
        (name, seed)
        for name, world in WORLDS.items()
        for seed in SEEDS[world.kind]
        if name.startswith(only) and (name, seed) not in done and (runs / f"{name}-{seed}" / "done").exists()
    ]
    jobs = [(name, seed) for name, seed in jobs if WORLDS[name].kind != "planted" or WORLDS[name].change is None]
    run_jobs(evaluate, jobs, runs, out, workers=workers)


if __name__ == "__main__":
    typer.run(main)
