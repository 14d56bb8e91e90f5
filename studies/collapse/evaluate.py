"""In which round a run broke, by tests of its policies: fresh episodes that no finding has seen.

Run: `python -m studies.collapse.evaluate results/collapse [--runs out/collapse] [--only hopper]`. Policies of eleven
rounds around the drop are tested by twenty episodes each; the round is where two levels fit their returns best.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
import typer

from studies.collapse.run import has_broken
from studies.collapse.worlds import SEEDS, WORLDS, make_env
from studies.shared import Only, Out, Runs, report, write_line
from whence.core import named_tensors
from whence.findings import find_drop, read_returns
from whence.findings.drops import split_in_two
from whence.lab import read_rows
from whence.runs import RunDirectory
from whence.stored.agents import load_agent, load_policy, measure_returns

KEYS = ("name",)

AROUND, EPISODES = 5, 20


def evaluate(name: str, path: Path, out: Path) -> None:
    """Write the test returns of the policies around a drop, and the round from which they are lower."""
    run, env = RunDirectory.open(path), partial(make_env, name)
    drop = find_drop(*read_returns(run))
    assert drop is not None
    last = max(run.rounds("policies"))
    numbers = range(max(1, drop.round - AROUND), min(last, drop.round + AROUND) + 1)
    model = load_agent(run, numbers[0], env=env)
    tests = []
    for number in numbers:
        load_policy(run, number, model)
        with measure_returns(run, model, number, episodes=EPISODES, seed=0, env=env) as measure:
            tests.append(measure({key: each.clone() for key, each in named_tensors(model.policy).items()}, 0))
    true_round = numbers[split_in_two(np.array(tests))]
    row = {"name": name, "drop": drop.round, "rounds": [*numbers], "tests": tests, "true_round": true_round}
    write_line(out / "evaluations.parquet", row, KEYS)
    report(name, drop.round, true_round)


def main(out: Out, runs: Runs = Path("out/collapse"), only: Only = "") -> None:
    """Test what was not tested yet."""
    torch.set_num_threads(1)
    done = {key[0] for key in read_rows(out / "evaluations.parquet", KEYS)}
    for name, world in WORLDS.items():
        is_changed = world.change is not None and world.kind == "planted"  # whose round is known
        if world.kind == "healthy" or is_changed or name in done or not name.startswith(only):
            continue
        for seed in SEEDS[world.kind]:
            if has_broken(path := runs.resolve() / f"{name}-{seed}"):
                evaluate(name, path, out)
                break


if __name__ == "__main__":
    typer.run(main)
