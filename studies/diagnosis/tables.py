"""Tabulate what `studies.diagnosis.run` has found so far: tables.md and summary.json.

Run: `python -m studies.diagnosis.tables results/diagnosis`. Figures of several seeds are means with 95% t intervals
over seeds; of a single seed, with the interval of a bootstrap over the episodes of its round.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from studies.diagnosis.agreement import BANDS
from studies.diagnosis.run import KEYS, SETUPS, results_file
from studies.markdown import cell, nested, table
from whence.core import write_atomically
from whence.lab import read_rows
from whence.statistics import t_interval

ENTRIES = ("difference", "spearman", "partial")
"""Figures of a round that have a bootstrap interval."""

IN_BANDS = ("mismatch", "expected", "tied", "certain", "certain_mismatch", "distance", "product", "size")
"""Figures of each band of influence."""

BY = ("setup", "measure", "round")


def main(out: Annotated[Path, typer.Argument(help="The directory of the results.")]) -> None:
    """Write the tables."""
    lines = list(read_rows(results_file(out), KEYS).values())
    if not lines:
        raise typer.BadParameter(f"{out} holds no judged round. Run python -m studies.diagnosis.run {out}.")
    rows = summarise(lines)
    parts = [
        "# Tables\n\nBy `python -m studies.diagnosis.tables`; [README.md](README.md) says what they hold.",
        *(part for setup in SETUPS for part in _sections([row for row in rows if row["setup"] == setup])),
    ]
    for name, text in {
        "summary.json": json.dumps(nested(rows, BY), indent=1),
        "tables.md": "\n\n".join(parts),
    }.items():
        with write_atomically(out / name) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")


def summarise(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each setup, measure and round: means over its seeds.

    Args:
        lines: of the results.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in BY), []).append(line)
    order = list(SETUPS)
    return [
        dict(zip(BY, key, strict=True)) | _summarise_group(group)
        for key, group in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), item[0][1:]))
    ]


def _summarise_group(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    seeds = {"seeds": len(group), "records": group[0]["records"]}
    returned = [line["episode_return"] for line in group if line["episode_return"] is not None]
    entries = {name: _over_seeds([line[name] for line in group]) for name in ENTRIES}
    bands: dict[str, dict[str, Any]] = {}
    for place, band in enumerate(BANDS):
        rows = [line["bands"][place] for line in group]
        assert {row["band"] for row in rows} == {band}
        bands[band] = {name: _over_seeds([{"mean": row[name]} for row in rows]) for name in IN_BANDS}
        if len(rows) == 1:
            bands[band]["mismatch"] |= {name: rows[0][name] for name in ("low", "high")}
    return {**seeds, "episode_return": t_interval(returned), **entries, "bands": bands}


def _over_seeds(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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


def _sections(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    signs = [["measured by", "round", "seeds", *(f"{band} {_size(band)}" for band in BANDS), "bottom − top"]]
    relation = [["measured by", "round", "return", "Spearman", "at equal size", "LDA's claim holds", "|Â| t / m / b"]]
    certain = [["measured by", "round", *(f"{band}: certain" for band in BANDS), "of these wrong: top", "bottom"]]
    for row in rows:
        bands, place = row["bands"], [row["measure"], str(row["round"])]
        shares = [cell(bands[band]["mismatch"], percent=True) for band in BANDS]
        signs.append([*place, str(row["seeds"]), *shares, cell(row["difference"], percent=True)])
        sizes = " / ".join(cell(bands[band]["size"], interval=False, digits=3) for band in BANDS)
        correlations = [cell(row[name], digits=2) for name in ("spearman", "partial")]
        returned = cell(row["episode_return"], interval=False, digits=2)
        relation.append([*place, returned, *correlations, is_confirmed(row["spearman"]), sizes])
        shares = [cell(bands[band]["certain"], interval=False, percent=True) for band in BANDS]
        wrong = [cell(bands[band]["certain_mismatch"], percent=True) for band in ("top", "bottom")]
        certain.append([*place, *shares, *wrong])
    expected = [["measured by", "round", *(f"{band}: wrong, expected by size" for band in BANDS)]]
    for row in rows:
        pairs = [(row["bands"][band]["mismatch"], row["bands"][band]["expected"]) for band in BANDS]
        texts = [" , ".join(cell(entry, interval=False, percent=True) for entry in pair) for pair in pairs]
        expected.append([row["measure"], str(row["round"]), *(text.replace(" ,", ",") for text in texts)])
    return [
        f"## {rows[0]['setup']}\n\nRecords whose trained advantage has another sign than the measured one.",
        table(signs),
        "Spearman's correlation of influence with the product of both; mean |Â| of the top, middle and bottom band.",
        table(relation),
        "The share measured beyond two errors of 0, and of these the share of wrong signs.",
        table(certain),
        "The share of wrong signs, and that of records of any influence whose advantages are as large.",
        table(expected),
    ]


def _size(band: str) -> str:
    return "60%" if band == "middle" else "20%"


if __name__ == "__main__":
    typer.run(main)
