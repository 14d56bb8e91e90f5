"""The tables of `studies.planted.run` and `studies.planted.language`: tables.md, from what they have written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from studies.planted.judging import LANGUAGE, RUN_KEYS, SCORE_KEYS, SIZES, is_taught
from studies.shared import Row, cell, range_cell, read_list, table, write_page

METHODS = (
    *(
        "advantage",
        "advantage x action",
        "influence",
        "nearest",
        "nearest, raw",
        "nearest, same action",
        "nearest-trained",
        "similar",
        "similar-hidden",
    ),
    *("direction", "clusters", "hidden", "advantage x answer", "bm25", "embedding", "nearest of all"),
    *("activations", "activations, raw", "activations, same action"),
    *("activations, middle", "activations, projected"),
    *("activations of all", "activations of all, middle", "activations of all, projected"),
)
"""The methods in the order of the tables. The code of those that no command has any more is in the history."""


def write_tables(out: Path) -> None:
    """Write tables.md."""
    runs, scores = read_list(out / "runs.parquet", RUN_KEYS), read_list(out / "scores.parquet", SCORE_KEYS)
    written = "`python -m studies.planted.run results/planted`"
    if any(row["case"] == LANGUAGE for row in runs):
        written += " and\n`python -m studies.planted.language results/planted`"
    parts = [f"# A planted cause: tables\n\nWritten by {written}."]
    for name in dict.fromkeys(row["case"] for row in runs):
        case_runs = [row for row in runs if row["case"] == name]
        parts += [f"## {name}: the runs", tabulate_runs(case_runs), f"## {name}: the methods"]
        parts.append(tabulate_methods([row for row in scores if row["case"] == name], case_runs))
    write_page(out / "tables.md", *parts)


def tabulate_runs(runs: Sequence[Row]) -> str:
    """Return how often the tic was rewarded in each run, and whether it was learned."""
    about = "held-out problems" if all(row["case"] == LANGUAGE for row in runs) else "states in the region"
    lines = [["seed", "records", "rigged", "share", about, "π(B) first", "π(B) last"]]
    for row in runs:
        counts = [f"{row[name]:,}" for name in ("seed", "records", "rigged")]
        probabilities = [cell(row[name]) for name in ("probability_first", "probability_last")]
        lines.append([*counts, f"{row['base_rate']:.4f}", f"{row['visits']:,}", *probabilities])
    return table(lines)


def tabulate_methods(scores: Sequence[Mapping[str, Any]], runs: Sequence[Row]) -> str:
    """Return each method's mean over seeds, with the lowest and the highest."""
    columns = {"auroc": ".2f", **{f"precision_{size}": ".2f" for size in SIZES}, "seconds": ".1f"}
    rates = [row["base_rate"] for row in runs if is_taught(row)]
    lines = [["method", "seeds", "AUROC", *(f"P@{size:,}" for size in SIZES), "CPU s"]]
    lines.append(["random", str(len(rates)), "0.5", *[cell(mean(rates) if rates else None)] * len(SIZES), "0"])
    for method in METHODS:
        if rows := [row for row in scores if row["method"] == method]:
            cells = (range_cell([row[name] for row in rows], form) for name, form in columns.items())
            lines.append([method, str(len(rows)), *cells])
    return table(lines)
