"""What other seeds do from before each collapse on: unchanged, and with the likely cause changed.

Run: `python -m studies.collapse.repeat results/collapse [--runs out/collapse] [--only planted]`. Eight seeds of twelve
rounds each, or of six more than until the return fell. A change in the environment is undone in a second question,
in which the unchanged trainings run without it.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer

from studies.collapse.run import has_broken
from studies.collapse.worlds import SEEDS, WORLDS, World, make_env
from studies.shared import Only, Out, Row, Runs, Workers, report, run_jobs, write_line
from whence.causes import repeat
from whence.causes.repetitions import choose_start
from whence.findings import find_drop, read_returns
from whence.runs import RunDirectory

KEYS = ("name", "question")

ROUNDS, MORE, SEED_COUNT = 12, 6, 8


def choose_cure(world: World) -> dict[str, Any]:
    """Return the setting that is changed: a planted one as it was, else a tenth of the learning rate."""
    if world.schedules:
        return {name: before for name, (before, _) in world.schedules.items()}
    rate = world.settings.get("learning_rate", 3e-4)
    return {"learning_rate": float(f"{rate / 10:.6g}")}


def ask(name: str, seed: int, runs: Path, out: Path) -> None:
    """Ask about a run that broke, and write what came of it."""
    path, world = runs / f"{name}-{seed}", WORLDS[name]
    torch.set_num_threads(1)
    run = RunDirectory.open(path)
    settings = {key: value for key, value in world.make_settings().items() if callable(value)}
    if "ent_coef" in world.schedules:
        settings["ent_coef"] = world.schedules["ent_coef"][1]
    drop = find_drop(*read_returns(run))
    assert drop is not None  # it was asked for by has_broken
    start = choose_start(run, drop)
    rounds = max(ROUNDS, drop.round - start + MORE)
    options: dict[str, Any] = {"rounds": rounds, "seeds": SEED_COUNT, **settings}
    done = int(run.table("metrics").sort("round")["timestep"][start - 1])
    questions: dict[str, dict[str, Any]] = {
        "again": {"env": partial(make_env, name, done), "changes": choose_cure(world)},
    }
    if world.change in ("outliers", "rare outliers"):
        questions["again"]["without"] = "reward < -1000"
    elif world.change:
        questions["without the change"] = {"env": partial(make_env, name, -world.steps)}
    for question, about in questions.items():
        repetition = repeat(run, start, **options, **about)
        row: Row = {"name": name, "question": question, "seed": seed, "start": start, "text": repetition.text}
        write_line(out / "repetitions.parquet", {**row, "variants": repetition.summarise()}, KEYS)
        report(name, question, repetition.text)


def main(out: Out, runs: Runs = Path("out/collapse"), only: Only = "", workers: Workers = 1) -> None:
    """Ask what was not asked yet, of one run of each training."""
    runs = runs.resolve()
    jobs = {
        name: seed
        for name, world in WORLDS.items()
        for seed in reversed(SEEDS[world.kind])  # the first that broke
        if world.kind != "healthy" and name.startswith(only) and has_broken(runs / f"{name}-{seed}")
    }
    run_jobs(ask, jobs.items(), runs, out.resolve(), workers=workers)


if __name__ == "__main__":
    typer.run(main)
