"""Tabulate what `studies.diagnosis.run` has found so far: tables.md.

Run: `python -m studies.diagnosis.tables results/diagnosis`. Figures of several seeds are means with 95% t intervals
over seeds; of a single seed, with the interval of a bootstrap over the episodes of its round.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import typer

from studies.diagnosis.agreement import BANDS
from studies.diagnosis.run import KEYS, SETUPS
from studies.shared import Out, Row, cell, mean_cell, read_list, table, write_page
from whence.lab.efficiency import t_interval

SIZES = ("top 20%", "middle 60%", "bottom 20%")
HEADS = {
    "Records whose trained advantage has another sign than the measured one.": ("seeds", *SIZES, "bottom − top"),
    "Spearman's correlation of influence with the product of both; mean |Â| of the top, middle and bottom band.": (
        *("return", "Spearman", "at equal size", "LDA's claim holds", "|Â| t / m / b"),
    ),
    "The share measured beyond two errors of 0, and of these the share of wrong signs.": (
        *(f"{band}: certain" for band in BANDS),
        *("of these wrong: top", "bottom"),
    ),
    "The share of wrong signs, and that of records of any influence whose advantages are as large.": [
        f"{band}: wrong, expected by size" for band in BANDS
    ],
}
"""The tables of a setup, and the heads of their columns after the measure and the round."""


def write_tables(out: Out) -> None:
    """Write the tables."""
    parts = ["# Tables\n\nBy `python -m studies.diagnosis.tables`; [README.md](README.md) says what they hold."]
    rows = read_list(out / "rounds.parquet", KEYS)
    for setup in SETUPS:
        chosen = sorted((row for row in rows if row["setup"] == setup), key=_read_place)
        groups = {place: describe([*group]) for place, group in groupby(chosen, _read_place)}
        for number, (about, heads) in enumerate(HEADS.items() if groups else ()):
            lines = [[measure, str(place), *cells[number]] for (measure, place), cells in groups.items()]
            title = f"## {setup}\n\n" if number == 0 else ""
            parts += [f"{title}{about}", table([["measured by", "round", *heads], *lines])]
    write_page(out / "tables.md", *parts)


def _read_place(row: Row) -> tuple[str, int]:
    return row["measure"], row["round"]


def describe(rounds: Sequence[Row]) -> list[list[str]]:
    """Return the cells of each table for the rounds of some seeds."""

    def mean(band: str, name: str) -> dict[str, Any]:
        return over_seeds([{"mean": row["bands"][BANDS.index(band)][name]} for row in rounds])

    def share(band: str, name: str) -> str:
        return cell(mean(band, name), interval=False, percent=True)

    by_band = zip(*(row["bands"] for row in rounds), strict=True)
    wrong = [over_seeds([{**row, "mean": row["mismatch"]} for row in band]) for band in by_band]
    difference, spearman, partial = (
        over_seeds([row[name] for row in rounds]) for name in ("difference", "spearman", "partial")
    )
    returned = mean_cell(
        [row["episode_return"] for row in rounds if row["episode_return"] is not None], interval=False, digits=2
    )
    sizes = " / ".join(cell(mean(band, "size"), interval=False) for band in BANDS)
    return [
        [str(len(rounds)), *(cell(entry, percent=True) for entry in (*wrong, difference))],
        [returned, cell(spearman, digits=2), cell(partial, digits=2), is_confirmed(spearman), sizes],
        [
            *(share(band, "certain") for band in BANDS),
            *(cell(mean(band, "certain_mismatch"), percent=True) for band in ("top", "bottom")),
        ],
        [f"{share(band, 'mismatch')}, {share(band, 'expected')}" for band in BANDS],
    ]


def over_seeds(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of several seeds' figures with its t interval; of one seed, the figure with its own."""
    known = [entry for entry in entries if entry["mean"] is not None]
    if len(known) == 1:
        return {name: known[0].get(name) for name in ("mean", "low", "high")}
    return dict(t_interval([entry["mean"] for entry in known]))


def is_confirmed(entry: Mapping[str, Any]) -> str:
    """Return whether a correlation is positive, as LDA claims: "yes", "no" if it is negative, or "unclear"."""
    if entry["low"] is None or entry["low"] <= 0 <= entry["high"]:
        return "unclear"
    return "yes" if entry["low"] > 0 else "no"


if __name__ == "__main__":
    typer.run(write_tables)
