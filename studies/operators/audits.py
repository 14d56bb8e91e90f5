"""What is found before training: by `whence audit`, and by both `check_env`.

Run: `python -m studies.operators.audits results/operators --runs out/operators [--workers 2]`, after
`studies.operators.run`. Each fault of the environment is planted at its default size into one copy, in the environments
of the curves, and asked about once. What a method also says of a healthy twin does not count.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

from studies.healthy.environments import make_environment
from studies.operators.cells import CURVES, Cell, find_row, list_cells, make_task, read_play
from studies.operators.faults import ONLY
from studies.operators.judging import KEYS, is_planted
from studies.operators.operators import OPERATORS
from studies.operators.rivals import check, strip_numbers
from studies.shared import Out, Row, Runs, Workers, read_list, report, run_jobs, table, write_line, write_page
from whence import audit
from whence.lab import read_rows

ROWS = "audits.parquet"

METHODS = ("whence audit", "check_env")

STEPS, SECONDS = 5000, 20.0
"""What `whence audit` may play: a quarter of its default, as of 130 environments."""


def ask(cell: Cell, runs: Path, out: Path) -> None:
    """Write what each method says of an environment with a fault."""
    row, (sample, _) = find_row(cell.environment), read_play(cell.environment, runs)

    def make() -> object:
        return make_task(make_environment(row), cell, sample, ONLY)

    said: Row = {**json.loads((cell.place_run(runs) / "touched.json").read_text(encoding="utf-8"))}
    said["place"] = json.dumps(said["place"])
    began = time.process_time()
    said[METHODS[0]] = _try(cell, lambda: _audit(make))
    said["seconds"] = time.process_time() - began
    said[METHODS[1]] = _try(cell, lambda: [line.text for line in check(make)])  # type: ignore[arg-type]
    write_line(out / ROWS, said, KEYS)
    report(*cell, f"{said['seconds']:.0f} CPU s")


def _audit(make: Callable[[], object]) -> list[str]:
    checks = audit(make, steps=STEPS, seconds=SECONDS)  # type: ignore[arg-type]
    return [f"{check.finding.kind}: {check.finding.title}" for check in checks if check.finding]


def _try(cell: Cell, ask_one: Callable[[], list[str]]) -> list[str]:
    """Return what a method says; nothing, and a report, if it raises: methods are on trial here too."""
    try:
        return ask_one()
    except Exception as failure:
        report(*cell, f"raised {type(failure).__name__} {failure}")
        return []


def count_named(rows: Sequence[Row]) -> list[list[str]]:
    """Return for each operator in how many environments each method names the fault, and says anything."""
    twins = {row["environment"]: row for row in rows if row["operator"] == "none"}
    lines, totals = [], {method: [0, 0] for method in METHODS}
    faulty = [row for row in rows if row["operator"] != "none" and is_planted(row) and row["environment"] in twins]
    for operator in OPERATORS:
        some = [row for row in faulty if row["operator"] == operator]
        cells = []
        for method in METHODS:
            counts = [0, 0]
            for row in some:
                usual = {strip_numbers(text) for text in twins[row["environment"]][method]}
                texts = [text for text in row[method] if strip_numbers(text) not in usual]
                counts[0] += any(OPERATORS[operator].is_named(text) for text in texts)
                counts[1] += bool(texts)
            totals[method] = [a + b for a, b in zip(totals[method], counts, strict=True)]
            cells.append(f"{counts[0]} / {counts[1]}")
        if some:
            lines.append([operator, str(len(some)), *cells])
    return [
        ["operator", "environments", *METHODS],
        *lines,
        ["all", str(len(faulty)), *(f"{a} / {b}" for a, b in totals.values())],
    ]


def write_tables(out: Out) -> None:
    """Write audits.md."""
    write_page(
        out / "audits.md",
        "# Before training: tables\n\nWritten by `python -m studies.operators.audits results/operators`.",
        "Cells: environments in which the method names the fault / says anything that it does not say of the healthy\n"
        "twin.",
        table(count_named(read_list(out / ROWS, KEYS))),
    )


def main(out: Out, runs: Runs = Path("out/operators"), workers: Workers = 2) -> None:
    """Ask about each environment that was not asked about yet, and write audits.md."""
    out, runs = out.resolve(), runs.resolve()
    done = read_rows(out / ROWS, KEYS)
    cells = [
        cell
        for cell in list_cells()
        if cell.environment in CURVES
        and cell.size == OPERATORS[cell.operator].sizes[0]
        and not cell.seed
        and not OPERATORS[cell.operator].setting
        and (cell.place_run(runs) / "touched.json").exists()
        and (*cell,) not in done
    ]
    run_jobs(ask, [(cell, runs, out) for cell in cells], workers=workers)
    write_tables(out)


if __name__ == "__main__":
    typer.run(main)
