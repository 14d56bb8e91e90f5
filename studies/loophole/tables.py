"""Tables of the study of a loophole, from its rows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from studies.markdown import table
from whence.core import write_atomically
from whence.lab import read_rows

ROUND_KEYS, FINDER_KEYS = ("arm", "seed", "round"), ("seed", "method")
"""What names a line of rounds.parquet, and one of finders.parquet."""

LAST = 3
"""Rounds at the end over which shares are averaged."""

Rows = Sequence[Mapping[str, Any]]


def find_onset(shares: Sequence[float], start: float | None = None) -> int | None:
    """Return the first round from which on all shares are above twice the start's; None: there is none.

    Args:
        shares: the share of gamed responses in each round, from 1.
        start: the start model's; None: the mean of the first two rounds.
    """
    bound = 2 * (np.mean(shares[:2]) if start is None else start)
    below = [number for number, share in enumerate(shares, start=1) if share <= bound]
    onset = max(below, default=0) + 1
    return onset if onset <= len(shares) else None


def write_tables(out: Path) -> None:
    """Write tables.md from the rows of a directory."""
    start, rounds, finders = (
        [*read_rows(out / f"{name}.parquet", keys).values()]
        for name, keys in (("start", ["size"]), ("rounds", ROUND_KEYS), ("finders", FINDER_KEYS))
    )
    parts = ["# A loophole: tables\n\nWritten by `python -m studies.loophole.run results/loophole`.\n"]
    parts += [
        f"The start model, {line['responses']:,} responses: {line['gamed']:.1%} gamed, {line['right']:.1%} right.\n"
        for line in start
    ]
    parts += ["## Screens\n", tabulate_screens(rounds, start), "\n## Rounds of the plain runs\n"]
    parts += [tabulate_rounds(rounds), "\n## Finders\n", tabulate_finders(finders), ""]
    with write_atomically(out / "tables.md") as temporary:
        temporary.write_text("\n".join(parts), encoding="utf-8")


def tabulate_screens(rounds: Rows, start: Rows) -> str:
    """Return each arm's onset and last rounds, with the range over seeds."""
    lines = [["screen", "seeds", "onset", "gamed at the end", "right at the end", "reward at the end", "dropped"]]
    for arm in dict.fromkeys(line["arm"] for line in rounds):
        by_seed = list_by_seed(rounds, arm)
        onsets = [find_onset([line["gamed"] for line in run], start[0]["gamed"]) for run in by_seed]
        cells = [
            spread([float(np.mean([line[name] for line in run[-LAST:]])) for run in by_seed])
            for name in ("gamed", "right", "reward")
        ]
        dropped = spread([float(np.mean([line["dropped"] for line in run])) for run in by_seed])
        shown = ", ".join("none" if onset is None else str(onset) for onset in onsets)
        lines.append([arm, str(len(by_seed)), shown, *cells, dropped])
    return table(lines)


def tabulate_rounds(rounds: Rows) -> str:
    """Return the share of gamed responses in some rounds of the runs without a screen."""
    numbers = [1, 3, 5, 7, 9, 11, 13, 15]
    lines = [["seed", *(f"round {number}" for number in numbers)]]
    for run in list_by_seed(rounds, "none"):
        shares = {line["round"]: line["gamed"] for line in run}
        lines.append([str(run[0]["seed"]), *(f"{shares[number]:.1%}" for number in numbers)])
    return table(lines)


def tabulate_finders(finders: Rows) -> str:
    """Return how each method ranks the gamed responses, up to the onset and in all rounds."""
    lines = [["method", "seeds", "AUROC to the onset", "P@50 to the onset", "AUROC", "P@50", "CPU s"]]
    for method in dict.fromkeys(line["method"] for line in finders):
        rows = [line for line in finders if line["method"] == method]
        names = ("early_auroc", "early_precision", "all_auroc", "all_precision")
        seconds = f"{np.mean([line['seconds'] for line in rows]):.1f}"
        lines.append(
            [method, str(len(rows)), *(spread([line[name] for line in rows], ".2f") for name in names), seconds]
        )
    rows = [line for line in finders if line["method"] == "advantage"]
    shares = (
        [spread([line[name] for line in rows], ".2f") for name in ("early_share", "all_share")] if rows else ["–"] * 2
    )
    return table([*lines, ["random", str(len(rows)), "0.5", shares[0], "0.5", shares[1], "0"]])


def list_by_seed(rounds: Rows, arm: str) -> list[list[Mapping[str, Any]]]:
    """Return the lines of an arm, a list for each seed, in the order of rounds."""
    lines = sorted((line for line in rounds if line["arm"] == arm), key=lambda line: (line["seed"], line["round"]))
    return [[line for line in lines if line["seed"] == seed] for seed in dict.fromkeys(line["seed"] for line in lines)]


def spread(values: Sequence[float], form: str = ".1%") -> str:
    """Return the mean of some values over seeds, and their range."""
    text = f"{np.mean(values):{form}}"
    return text if len(values) == 1 else f"{text} [{min(values):{form}}, {max(values):{form}}]"
