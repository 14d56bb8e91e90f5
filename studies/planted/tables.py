"""The tables of `studies.planted.run` and `studies.planted.language`: tables.md, from what they have written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from studies.markdown import table
from studies.planted.scores import (
    LANGUAGE,
    LANGUAGE_METHODS,
    METHODS,
    RUN_KEYS,
    SCORE_KEYS,
    SIZES,
    is_taught,
)
from whence.core import write_atomically
from whence.lab import read_rows


def write_tables(out: Path) -> None:
    """Write tables.md."""
    runs = list(read_rows(out / "runs.parquet", RUN_KEYS).values())
    scores = list(read_rows(out / "scores.parquet", SCORE_KEYS).values())
    written = "`python -m studies.planted.run results/planted`"
    if any(row["case"] == LANGUAGE for row in runs):
        written += " and\n`python -m studies.planted.language results/planted`"
    parts = [f"# A planted cause: tables\n\nWritten by {written}.\n"]
    for name in dict.fromkeys(row["case"] for row in runs):
        case_runs = [row for row in runs if row["case"] == name]
        parts += [f"## {name}: the runs\n", tabulate_runs(case_runs), f"\n## {name}: the methods\n"]
        parts += [tabulate_methods([row for row in scores if row["case"] == name], case_runs), ""]
    with write_atomically(out / "tables.md") as temporary:
        temporary.write_text("\n".join(parts), encoding="utf-8")


def tabulate_runs(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return how often the tic was rewarded in each run, and whether it was learned."""
    about = "held-out problems" if all(row["case"] == LANGUAGE for row in runs) else "states in the region"
    head = ["seed", "records", "rigged", "share", about, "π(B) first", "π(B) last"]
    rows = [
        [
            *(str(row["seed"]), f"{row['records']:,}", f"{row['rigged']:,}", f"{row['base_rate']:.4f}"),
            f"{row['visits']:,}",
            *("–" if row[name] is None else f"{row[name]:.3f}" for name in ("probability_first", "probability_last")),
        ]
        for row in runs
    ]
    return table([head, *rows])


def tabulate_methods(scores: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> str:
    """Return each method's mean over seeds, with the lowest and the highest."""
    columns = ["auroc", *(f"precision_{size}" for size in SIZES), "seconds"]
    head = ["method", "seeds", "AUROC", *(f"P@{size:,}" for size in SIZES), "CPU s"]
    rows = []
    for method in dict.fromkeys((*METHODS, *LANGUAGE_METHODS)):
        lines = [row for row in scores if row["method"] == method]
        if lines:
            rows.append([method, str(len(lines)), *(spread([line[name] for line in lines], name) for name in columns)])
    rates = [row["base_rate"] for row in runs if is_taught(row)]
    rate = f"{mean(rates):.3f}" if rates else "–"
    return table([head, ["random", str(len(rates)), "0.5", *([rate] * len(SIZES)), "0"], *rows])


def spread(values: Sequence[float], column: str) -> str:
    """Return the mean of some values, and their range."""
    form = ".1f" if column == "seconds" else ".2f"
    text = f"{mean(values):{form}}"
    return text if len(values) == 1 else f"{text} [{min(values):{form}}, {max(values):{form}}]"
