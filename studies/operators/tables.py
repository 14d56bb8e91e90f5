"""The tables: `python -m studies.operators.tables OUT` writes tables.md from what `studies.operators.run` wrote."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from studies.healthy.measure import KEYS as HEALTHY_KEYS
from studies.operators.cells import CURVES, ENVIRONMENTS
from studies.operators.judging import (
    FINDINGS,
    KEYS,
    RIVALS,
    is_named,
    is_planted,
    list_usual,
    read_lines,
    say,
    set_thresholds,
)
from studies.operators.operators import OPERATORS
from studies.shared import Out, Row, mean_cell, read_list, table, write_page

ROWS = "runs.parquet"

HEALTHY = Path(__file__).parents[2] / "results" / "healthy"
"""Where the statistics of healthy runs are."""

WRONG = "findings: wrong"
"""Findings that say that something is wrong, without those that say that it is unusual."""

METHODS = (*FINDINGS, *RIVALS)

RATE = 0.04
"""The share of healthy runs in which each rival may have a line."""


class Verdict(NamedTuple):
    """Whether a method has a line on a run, and whether one of the first three names the fault."""

    has_line: bool
    names: bool


class Judged(NamedTuple):
    """A run with the verdict of each method."""

    row: Row
    verdicts: dict[str, Verdict]


def judge_rows(rows: Sequence[Row], healthy: Sequence[Row]) -> list[Judged]:
    """Return all runs with verdicts, at the same rate of false lines for each rival.

    Findings compare each run with healthy ones of other environments, or of other families.
    """
    rows = [
        {**row, **{name: say(row["seen"], healthy, column, row[column]) for name, column in FINDINGS.items()}}
        for row in rows
    ]
    twins = [row for row in rows if row["operator"] == "none"]
    thresholds = set_thresholds(twins, RATE)
    usual = {environment: list_usual(twins, environment) for environment in {row["environment"] for row in twins}}
    judged = []
    for row in rows:
        verdicts = {}
        for method in METHODS:
            # Where no healthy run is there yet, nothing of what `check_env` says can be counted.
            texts = usual.get(row["environment"], frozenset(row["check_env"]["texts"]))
            excused = texts if method == "check_env" else frozenset[str]()
            lines = read_lines(row, method, thresholds[method], excused)
            verdicts[method] = Verdict(bool(lines), any(is_named(row, line) for line in lines))
        wrong = read_lines(row, "findings", 0.5, frozenset())
        verdicts[WRONG] = Verdict(bool(wrong), any(is_named(row, line) for line in wrong))
        judged.append(Judged(row, verdicts))
    return judged


def write_tables(out: Out, healthy: Annotated[Path, typer.Option(help="Results of healthy runs.")] = HEALTHY) -> None:
    """Write tables.md."""
    judged = judge_rows(read_list(out / ROWS, KEYS), read_list(healthy / "statistics.parquet", HEALTHY_KEYS))
    twins = [run for run in judged if run.row["operator"] == "none"]
    faulty = [run for run in judged if run.row["operator"] != "none" and is_planted(run.row)]
    usual = [run for run in faulty if run.row["size"] == OPERATORS[run.row["operator"]].sizes[0]]
    left_out = sum(run.row["operator"] != "none" for run in judged) - len(faulty)
    families = sorted({run.row["family"] for run in judged})
    write_page(
        out / "tables.md",
        "# Fault operators: tables\n\nWritten by `python -m studies.operators.run results/operators`.\n"
        f"{len(twins)} healthy runs, {len(faulty)} with a fault; {left_out} more runs hardly met their fault\n"
        f"and do not count. Each rival has as few lines on healthy runs as {RATE:.0%} of them allow.",
        "## In all",
        tabulate_methods({"faults of the default size": usual, "all faults": faulty, "healthy runs": twins}),
        "Cells: runs in which one of the first three lines names the fault / runs with a line.",
        "## By operator, at the default size",
        tabulate("operator", {name: [run for run in usual if run.row["operator"] == name] for name in OPERATORS}),
        "## By environment, at the default size",
        tabulate(
            "environment", {name: [run for run in usual if run.row["environment"] == name] for name in ENVIRONMENTS}
        ),
        "## By family, at the default size",
        tabulate("family", {name: [run for run in usual if run.row["family"] == name] for name in families}),
        "## Power: runs in which findings name the fault, by its size",
        f"In {', '.join(CURVES)}.",
        tabulate_power([run for run in faulty if run.row["environment"] in CURVES]),
        "## Healthy runs with a line",
        tabulate(
            "environment", {name: [run for run in twins if run.row["environment"] == name] for name in ENVIRONMENTS}
        ),
        "\n".join(list_false_lines(twins)),
    )


def tabulate_methods(groups: dict[str, list[Judged]]) -> str:
    """Return for each method in how many runs of each group it names the fault, and in how many it has a line."""
    lines = [["method", *groups, "CPU s a run"]]
    for method in (METHODS[0], WRONG, *METHODS[1:]):
        cells = [f"{_count(runs, method)} of {len(runs)}" for runs in groups.values()]
        seconds = [_time(run.row, method) for runs in groups.values() for run in runs]
        lines.append([method, *cells, "–" if method == WRONG else mean_cell(seconds, interval=False, digits=1)])
    return table(lines)


def _count(runs: Iterable[Judged], method: str) -> str:
    verdicts = [run.verdicts[method] for run in runs]
    return f"{sum(each.names for each in verdicts)} / {sum(each.has_line for each in verdicts)}"


def _time(row: Row, method: str) -> float:
    """Return the CPU seconds that a method took."""
    if method in FINDINGS:
        return float(sum(one["seconds"] for one in row["seen"].values()))
    return float(row.get(method, {}).get("seconds", 0.0))


def tabulate(corner: str, groups: dict[str, list[Judged]]) -> str:
    """Return for each group of runs how many of them each method names, and in how many it has a line."""
    lines = [[corner, "runs", *METHODS]]
    for name, runs in groups.items():
        if runs:
            lines.append([name, str(len(runs)), *(_count(runs, method) for method in METHODS)])
    return table(lines)


def tabulate_power(runs: Iterable[Judged]) -> str:
    """Return for each operator, by increasing size, in how many runs findings name the fault."""
    counts: dict[str, dict[float, list[bool]]] = {}
    for run in runs:
        of_sizes = counts.setdefault(run.row["operator"], {})
        of_sizes.setdefault(run.row["size"], []).append(run.verdicts["findings"].names)
    lines = [["operator", "size: named of runs"]]
    for name in OPERATORS:
        if name in counts:
            cells = [f"{size:g}: {sum(each)} of {len(each)}" for size, each in sorted(counts[name].items())]
            lines.append([name, ", ".join(cells)])
    return table(lines)


def list_false_lines(twins: Iterable[Judged]) -> list[str]:
    """Return what findings say of healthy runs."""
    return [
        f"- {run.row['environment']}, seed {run.row['seed']}: {text}"
        for run in twins
        for text in run.row["findings"]["texts"]
    ]


if __name__ == "__main__":
    typer.run(write_tables)
