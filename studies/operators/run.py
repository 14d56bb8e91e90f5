"""Train and judge runs with one planted fault each.

Run: `python -m studies.operators.run results/operators --runs out/operators [--only Hopper] [--workers 2]`, in an
environment with the packages of `studies/healthy/requirements.txt`. PPO is trained on each environment with each
operator, in four copies, with a recorder that changes nothing. A finished run is not trained again, and one that fails
is reported while the others go on. Each run has a touched.json: the share of the steps that its fault
changed; how much it changed the rewards, as a share of their sizes; and where it is. Then findings and rivals are asked
about each finished run that was not judged yet, and tables.md is written. `--no-train` and `--no-judge` leave one out;
`--again findings` asks a method about all runs again.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from studies.operators.cells import COPIES, ROUNDS, STEPS, Cell, list_cells, make_model, read_play
from studies.operators.judging import KEYS, judge
from studies.operators.operators import OPERATORS
from studies.operators.tables import HEALTHY, ROWS, write_tables
from studies.shared import Out, Row, Runs, Workers, report, run_jobs, write_line
from whence.core import write_atomically
from whence.lab import read_rows
from whence.sb3 import InfluenceCallback


def train(cell: Cell, runs: Path) -> str:
    """Train and record a run, where that is not done; return a word on it."""
    path, operator = cell.place_run(runs), OPERATORS[cell.operator]
    if (path / "done").exists():
        return "is there"
    began = time.process_time()
    torch.set_num_threads(1)
    sample, traits = read_play(cell.environment, runs)
    if missing := set(operator.needs.split()) - traits:
        return f"cannot be planted: {', '.join(sorted(missing))}"
    model = make_model(cell, sample)
    model.learn(ROUNDS * STEPS * COPIES, callback=InfluenceCallback(run=path, save_every=0, overwrite=True))
    tallies, faults = model.env.get_attr("tally"), model.env.get_attr("_fault")  # type: ignore[union-attr]
    model.env.close()  # type: ignore[union-attr]
    total = {name: sum(tally[name] for tally in tallies) for name in tallies[0]}
    row: dict[str, Any] = {
        **cell._asdict(),
        "steps": 1.0 if operator.setting else total["touched"] / total["steps"],
        "rewards": total["changed"] / total["due"] if total["due"] else float(total["changed"] > 0),
        "place": faults[0].describe(),
        "seconds": time.process_time() - began,
    }
    with write_atomically(path / "touched.json") as temporary:
        temporary.write_text(json.dumps(row), encoding="utf-8")
    (path / "done").touch()
    return f"{row['seconds']:.0f} CPU s, touches {row['steps']:.1%} of steps, changes rewards by {row['rewards']:.1%}"


def try_training(cell: Cell, runs: Path) -> None:
    """Train a run, and say if that fails: others go on."""
    try:
        word = train(cell, runs)
    except Exception as failure:  # a package's environment may raise anything, and faults are hard on learners
        word = f"failed: {type(failure).__name__} {failure}"
    report(*cell, word)


def try_judging(cell: Cell, known: Row, runs: Path, out: Path) -> None:
    """Judge a run and write its row, and say if that fails: others go on."""
    try:
        write_line(out / ROWS, judge(cell, runs, known), KEYS)
        report(*cell, "judged")
    except Exception as failure:  # detectors are on trial here too
        report(*cell, f"was not judged: {type(failure).__name__} {failure}")


def main(
    out: Out,
    runs: Runs = Path("out/operators"),
    only: Annotated[str, typer.Option(help="Runs whose folder and name have this.")] = "",
    workers: Workers = 2,
    trains: Annotated[bool, typer.Option("--train/--no-train", help="Train what is not there.")] = True,
    judges: Annotated[bool, typer.Option("--judge/--no-judge", help="Judge what is there, and write tables.")] = True,
    again: Annotated[
        str, typer.Option(help="A method that is asked about all runs again, or `seen` by findings.")
    ] = "",
    healthy: Annotated[Path, typer.Option(help="Results of healthy runs.")] = HEALTHY,
) -> None:
    """Train what is not there yet, judge what was not judged yet, and write tables.md."""
    out, runs = out.resolve(), runs.resolve()
    cells = [cell for cell in list_cells() if only in str(cell.place_run(Path()))]
    if trains:
        jobs = [(cell,) for cell in cells if not (cell.place_run(runs) / "done").exists()]
        run_jobs(try_training, jobs, runs, workers=workers)
    if judges:
        rows = read_rows(out / ROWS, KEYS)
        done = [cell for cell in cells if (cell.place_run(runs) / "done").exists() and (again or (*cell,) not in rows)]
        known = [{name: said for name, said in rows.get((*cell,), {}).items() if name != again} for cell in done]
        run_jobs(try_judging, zip(done, known, strict=True), runs, out, workers=workers)
        write_tables(out, healthy)


if __name__ == "__main__":
    typer.run(main)
