"""Which planted faults are named: by findings, and by rivals on the same records.

Run: `python -m studies.hunt.run results/hunt [--only lander]`. Each cell of `studies.hunt.cells` is trained with a
recorder that changes nothing. Then findings and each rival are asked for their lines on the run, and the first three
are kept with their kind. A finished run is not judged again: the command goes on where it was interrupted. Tables:
`python -m studies.hunt.tables results/hunt`.
"""

import time
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any

import polars as pl
import torch
import typer

from studies.hunt.cells import CELLS, WORLDS, make_model
from studies.hunt.rivals import RIVALS, Names
from studies.hunt.tables import FIRST, KEYS, write_tables
from studies.shared import Out, Runs, report, write_line
from whence.findings import find
from whence.lab import read_rows
from whence.runs import RunDirectory
from whence.sb3 import InfluenceCallback


def train(name: str, seed: int, path: Path) -> RunDirectory:
    """Train a run where that is not done."""
    if not path.exists():
        world, unfinished = WORLDS[CELLS[name].world], path.with_name(f"{path.name}.part")
        rmtree(unfinished, ignore_errors=True)
        recorder = InfluenceCallback(run=unfinished, save_every=0, names=world.names)
        make_model(CELLS[name], seed).learn(world.steps, callback=recorder)
        unfinished.rename(path)
    return RunDirectory.open(path)


def list_findings(run: RunDirectory, names: Names) -> list[tuple[str, str]]:
    """Return findings as lines: their kind and title; of a setting also what to do, as its name is there."""
    return [
        (finding.kind, f"{finding.title} {finding.advice}" if finding.kind == "setting" else finding.title)
        for finding in find(run)
    ]


def measure_return(run: RunDirectory) -> list[float]:
    """Return the mean return of the first and of the last fifth of the whole episodes."""
    records = pl.concat([run.round("records", number).select("episode_id", "reward") for number in run.rounds()])
    returns = records.group_by("episode_id", maintain_order=True).agg(pl.sum("reward"))["reward"].cast(pl.Float64)
    size = max(1, len(returns) // 5)
    return [returns[:size].mean(), returns[-size:].mean()]  # type: ignore[list-item]


def judge(name: str, seed: int, run: RunDirectory) -> dict[str, Any]:
    """Return what findings and each rival say of a run, and how long each takes."""
    row: dict[str, Any] = {"cell": name, "seed": seed, "returns": measure_return(run)}
    for method, ask in {"findings": list_findings, **RIVALS}.items():
        began = time.process_time()
        lines = ask(run, WORLDS[CELLS[name].world].names)
        seconds = time.process_time() - began
        row[method] = {"count": len(lines), "seconds": seconds, "lines": [list(line) for line in lines[:FIRST]]}
    return row


def main(
    out: Out,
    runs: Runs = Path("out/hunt"),
    only: Annotated[str, typer.Option(help="Cells whose name has this.")] = "",
    first: Annotated[int, typer.Option(help="The first seed.")] = 40,
    seeds: Annotated[int, typer.Option(help="Seeds of each cell.")] = 5,
) -> None:
    """Run what is not there yet, and write tables.md."""
    torch.set_num_threads(1)
    for seed, name in [(seed, name) for seed in range(first, first + seeds) for name in CELLS if only in name]:
        if (name, seed) in read_rows(out / "runs.parquet", KEYS):
            continue
        began = time.process_time()
        run = train(name, seed, runs / f"{name}-{seed}")
        write_line(out / "runs.parquet", judge(name, seed, run), KEYS)
        report(f"{name}, seed {seed}: {time.process_time() - began:.0f} CPU s")
    write_tables(out)


if __name__ == "__main__":
    typer.run(main)
