"""Tables of the study of a loophole, from its rows."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from studies.shared import Row, range_cell, read_list, table, write_page

ROUND_KEYS, FINDER_KEYS = ("arm", "seed", "round"), ("seed", "method")
"""What names a line of rounds.parquet, and one of finders.parquet."""

LAST = 3
"""Rounds at the end over which shares are averaged."""


def find_onset(shares: Sequence[float], start: float | None = None) -> int | None:
    """Return the first round from which on all shares are above twice the start's; None: there is none.

    Args:
        shares: the share of gamed responses in each round, from 1.
        start: the start model's; None: the mean of the first two rounds.
    """
    bound = 2 * (np.mean(shares[:2]) if start is None else start)
    onset = max((number for number, share in enumerate(shares, start=1) if share <= bound), default=0) + 1
    return onset if onset <= len(shares) else None


def write_tables(out: Path) -> None:
    """Write tables.md from the rows of a directory."""
    (start,) = read_list(out / "start.parquet", ["size"])
    rounds, finders = read_list(out / "rounds.parquet", ROUND_KEYS), read_list(out / "finders.parquet", FINDER_KEYS)
    about = f"{start['responses']:,} responses: {start['gamed']:.1%} gamed, {start['right']:.1%} right."
    write_page(
        out / "tables.md",
        "# A loophole: tables\n\nWritten by `python -m studies.loophole.run results/loophole`.",
        f"The start model, {about}",
        *("## Screens", tabulate_screens(rounds, start["gamed"])),
        *("## Rounds of the plain runs", tabulate_rounds(rounds)),
        *("## Finders", tabulate_finders(finders)),
    )


def tabulate_screens(rounds: Sequence[Row], start: float) -> str:
    """Return each arm's onset and last rounds, with the range over seeds; `start`: the start model's share."""
    lines = [["screen", "seeds", "onset", "gamed at the end", "right at the end", "reward at the end", "dropped"]]
    for arm in dict.fromkeys(row["arm"] for row in rounds):
        runs = list_by_seed(rounds, arm)
        onsets = [str(find_onset([row["gamed"] for row in run], start) or "none") for run in runs]
        means = [
            [float(np.mean([row[name] for row in run[-LAST:]])) for run in runs]
            for name in ("gamed", "right", "reward")
        ]
        means.append([float(np.mean([row["dropped"] for row in run])) for run in runs])
        lines.append([arm, str(len(runs)), ", ".join(onsets), *(range_cell(values, ".1%") for values in means)])
    return table(lines)


def tabulate_rounds(rounds: Sequence[Row]) -> str:
    """Return the share of gamed responses in some rounds of the runs without a screen."""
    numbers = range(1, 16, 2)
    lines = [["seed", *(f"round {number}" for number in numbers)]]
    for run in list_by_seed(rounds, "none"):
        shares = {row["round"]: row["gamed"] for row in run}
        lines.append([str(run[0]["seed"]), *(f"{shares[number]:.1%}" for number in numbers)])
    return table(lines)


def tabulate_finders(finders: Sequence[Row]) -> str:
    """Return how each method ranks the gamed responses, up to the onset and in all rounds."""
    lines = [["method", "seeds", "AUROC to the onset", "P@50 to the onset", "AUROC", "P@50", "CPU s"]]
    by_method = {method: [row for row in finders if row["method"] == method] for method in METHODS}
    for method, rows in by_method.items():
        names = ("early_auroc", "early_precision", "all_auroc", "all_precision")
        cells = (range_cell([row[name] for row in rows]) for name in names)
        lines.append([method, str(len(rows)), *cells, f"{np.mean([row['seconds'] for row in rows]):.1f}"])
    rows = by_method["advantage"]
    early, whole = (range_cell([row[name] for row in rows]) for name in ("early_share", "all_share"))
    return table([*lines, ["random", str(len(rows)), "0.5", early, "0.5", whole, "0"]])


METHODS = ("advantage", "bm25", "nearest", "influence")
"""What ranks the records."""


def list_by_seed(rounds: Sequence[Row], arm: str) -> list[list[Row]]:
    """Return the rows of an arm, a list for each seed, in the order of rounds."""
    rows = [row for row in rounds if row["arm"] == arm]
    return [[row for row in rows if row["seed"] == seed] for seed in dict.fromkeys(row["seed"] for row in rows)]
