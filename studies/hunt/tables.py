"""The tables of the hunt: `python -m studies.hunt.tables OUT` writes tables.md from what `studies.hunt.run` wrote."""

import re
from collections.abc import Mapping, Sequence
from statistics import mean

import typer

from studies.hunt.cells import CELLS, HIDDEN, ONCE_HIDDEN, Cell
from studies.hunt.rivals import RIVALS
from studies.shared import Out, Row, read_list, table, write_page

KEYS = ("cell", "seed")
"""What names a row."""

FIRST = 3
"""The lines that are read of each."""

METHODS = ("findings", *RIVALS)
ENOUGH = 0.8
"""The share of the seeds in which a fault is named if it counts as named: four of five."""

Cells = Mapping[str, Sequence[Row]]


def is_named(cell: Cell, lines: Sequence[Sequence[str]]) -> bool:
    """Return whether one of the first lines has a kind and the places of a cell's fault."""
    return bool(cell.kinds) and any(
        kind in ("any", *cell.kinds.split()) and all(re.search(place, text, re.IGNORECASE) for place in cell.places)
        for kind, text in lines[:FIRST]
    )


def count_named(name: str, rows: Sequence[Row], method: str) -> int:
    """Return in how many runs a method names a cell's fault."""
    return sum(is_named(CELLS[name], row[method]["lines"]) for row in rows)


def write_tables(out: Out) -> None:
    """Write tables.md."""
    rows = read_list(out / "runs.parquet", KEYS)
    cells = {name: runs for name in CELLS if (runs := [row for row in rows if row["cell"] == name])}
    faults = {name: runs for name, runs in cells.items() if CELLS[name].kinds}
    healthy = {CELLS[name].world: runs for name, runs in cells.items() if not CELLS[name].kinds}
    groups: dict[str, Cells] = {}
    for title, mark in (("faults named", ""), ("hidden", " *"), ("once hidden", " **")):
        groups[title] = {name: runs for name, runs in faults.items() if _mark(CELLS[name].world) == mark}
    firsts = []
    for name, (run, *_) in cells.items():
        kind, text = (run["findings"]["lines"] or [("", "")])[0]
        firsts.append(f"- **{name}**, seed {run['seed']}: {f'{kind}: {text}' if kind else 'nothing'}")
    write_page(
        out / "tables.md",
        "# The hunt: tables\n\nWritten by `python -m studies.hunt.run results/hunt`. A star: nobody who made\n"
        "the rules of findings had seen the environment; two: so it was once.",
        *("## In all", tabulate_methods(groups, healthy)),
        "## Faults: runs in which one of the first three lines names it",
        "In brackets: as many healthy runs of the environment get such a line.",
        tabulate_faults(faults, healthy),
        *("## Healthy runs: false lines of all seeds, and the runs that have one", tabulate_healthy(healthy)),
        *("## What findings say first", "\n".join(firsts)),
    )


def tabulate_methods(groups: Mapping[str, Cells], healthy: Cells) -> str:
    """Return how many faults of each group each method names in four of five seeds, and its lines on healthy runs."""
    faults = {name: rows for group in groups.values() for name, rows in group.items()}
    wrong = [row for rows in healthy.values() for row in rows]
    runs = [row for rows in faults.values() for row in rows]
    lines = [["", *groups, "runs named", "healthy runs with a line", "CPU s a run"]]
    for method in METHODS:
        named = {name: count_named(name, rows, method) for name, rows in faults.items()}
        enough = [[named[name] >= ENOUGH * len(rows) for name, rows in group.items()] for group in groups.values()]
        shares = [*enough, [row[method]["count"] > 0 for row in wrong]]
        *of_groups, of_healthy = (f"{sum(share)} of {len(share)}" for share in shares)
        seconds = f"{mean(row[method]['seconds'] for row in (*runs, *wrong)):.2f}"
        lines.append([method, *of_groups, f"{sum(named.values())} of {len(runs)}", of_healthy, seconds])
    return table(lines)


def tabulate_faults(faults: Cells, healthy: Cells) -> str:
    """Return in how many runs each method names each fault, and in how many healthy runs it would."""
    lines = [["fault", *METHODS, "runs"]]
    for name, rows in faults.items():
        others = healthy.get(CELLS[name].world, ())
        counts = [f"{count_named(name, rows, method)} ({count_named(name, others, method)})" for method in METHODS]
        lines.append([f"{name}{_mark(CELLS[name].world)}", *counts, str(len(rows))])
    return table(lines)


def tabulate_healthy(healthy: Cells) -> str:
    """Return how many lines each gives on healthy runs, and the returns at the start and at the end."""
    lines = [["environment", "return", *METHODS]]
    for name, rows in healthy.items():
        first, last = (f"{mean(row['returns'][end] for row in rows):.3g}".replace("-", "−") for end in (0, 1))
        counts = [[row[method]["count"] for row in rows] for method in METHODS]
        cells = [f"{sum(count)} in {sum(map(bool, count))}" for count in counts]
        lines.append([f"{name}{_mark(name)}", f"{first} to {last}", *cells])
    return table(lines)


def _mark(world: str) -> str:
    return " *" if world in HIDDEN else " **" if world in ONCE_HIDDEN else ""


if __name__ == "__main__":
    typer.run(write_tables)
