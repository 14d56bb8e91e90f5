"""How often findings speak of healthy runs: `python -m studies.healthy.tables results/healthy` writes tables.md.

An environment is judged by a reference without it, or without its whole family. So no run is compared with itself.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

import typer

from studies.healthy.measure import KEYS
from studies.shared import Out, Row, read_list, table, write_page
from whence.findings.detectors import DETECTORS
from whence.findings.finding import CHANCE
from whence.findings.reference import Reference, compare


def read_healthy(rows: Iterable[Row]) -> Reference:
    """Return the largest statistic of each detector in each environment of some runs, the largest first."""
    largest: dict[str, dict[str, float]] = defaultdict(dict)
    for row in filter(itemgetter("healthy"), rows):
        for name, one in row["seen"].items():
            if not one["reason"]:
                largest[name][row["environment"]] = max(largest[name].get(row["environment"], 0.0), one["statistic"])
    return {name: sorted(values.values(), reverse=True) for name, values in largest.items()}


def list_lines(seen: Mapping[str, Row], reference: Reference) -> list[tuple[str, str, Row]]:
    """Return what is said by what detectors saw: rank, name and what was seen, in the order of findings."""
    lines = []
    for name in DETECTORS:
        one = seen.get(name, {"reason": "it was not measured"})
        if one["reason"]:
            continue
        outcome = compare(one["statistic"], reference.get(name, ()), DETECTORS[name])[0]
        if outcome in ("wrong", "unusual") and (one["p"] is None or one["p"] <= CHANCE):
            lines.append((outcome, name, one))
    return sorted(lines, key=lambda line: line[0] != "wrong")


def leave_out(rows: Sequence[Row], column: str) -> list[tuple[Row, list[tuple[str, str, Row]]]]:
    """Return each run with the lines that it gets by a reference without those of its environment, or family."""
    judged = []
    for value in sorted({row[column] for row in rows}):
        reference = read_healthy(row for row in rows if row[column] != value)
        judged += [(row, list_lines(row["seen"], reference)) for row in rows if row[column] == value]
    return judged


def tabulate_rates(rows: Sequence[Row]) -> str:
    """Return how many runs and environments get a line of each rank, leaving environments and families out."""
    lines = [["left out", "runs", "with a wrong line", "with an unusual line", "environments", "with a wrong line"]]
    for column in ("environment", "family"):
        judged = leave_out(rows, column)
        wrong, unusual = (
            [row for row, said in judged if any(rank == each for rank, *_ in said)] for each in ("wrong", "unusual")
        )
        names = {row["environment"] for row in wrong}
        count = len({row["environment"] for row in rows})
        shares = [f"{len(some)} ({len(some) / len(rows):.1%})" for some in (wrong, unusual)]
        lines.append([column, str(len(rows)), *shares, str(count), f"{len(names)} ({len(names) / count:.1%})"])
    return table(lines)


def tabulate_detectors(rows: Sequence[Row]) -> str:
    """Return for each detector what healthy environments show, and how often it speaks of one that was left out."""
    said: dict[str, list[str]] = defaultdict(list)
    for row, lines in leave_out(rows, "environment"):
        for rank, name, _ in lines:
            said[name].append(f"{row['environment']} ({rank})")
    reference = read_healthy(rows)
    lines = [["detector", "environments", "median", "a tenth above", "the three largest", "CPU s", "speaks of"]]
    for name, values in reference.items():
        seconds = max(row["seen"][name]["seconds"] for row in rows if name in row["seen"])
        some = [f"{value:.3g}" for value in (values[len(values) // 2], values[len(values) // 10])]
        largest = ", ".join(f"{value:.3g}" for value in values[:3])
        lines.append([name, str(len(values)), *some, largest, f"{seconds:.2g}", ", ".join(sorted({*said[name]}))])
    return table(lines)


def write_tables(out: Out) -> None:
    """Write tables.md."""
    rows = [row for row in read_list(out / "statistics.parquet", KEYS) if row["healthy"]]
    write_page(
        out / "tables.md",
        "# Healthy runs: tables\n\nWritten by `python -m studies.healthy.measure results/healthy`.",
        *("## Lines on healthy runs, by a reference that has not seen them", tabulate_rates(rows)),
        *("## Detectors", tabulate_detectors(rows)),
    )


if __name__ == "__main__":
    typer.run(write_tables)
