"""Rows of the studies as tables of markdown, and as trees for summary.json."""

from collections.abc import Mapping, Sequence
from typing import Any


def nested(rows: Sequence[Mapping[str, Any]], by: Sequence[str]) -> dict[str, Any]:
    """Return rows by the values of some columns, one level each."""
    nested: dict[str, Any] = {}
    for row in rows:
        place = nested
        for name in by[:-1]:
            place = place.setdefault(str(row[name]), {})
        place[str(row[by[-1]])] = {name: value for name, value in row.items() if name not in by}
    return nested


def cell(entry: Mapping[str, Any] | None, *, interval: bool = True, digits: int = 3, percent: bool = False) -> str:
    """Return a mean with its interval, as text."""
    if entry is None or entry["mean"] is None:
        return "–"
    form = ".0%" if percent else f".{digits}f"
    text = f"{entry['mean']:{form}}"
    if interval and entry["low"] is not None:
        text += f" [{entry['low']:{form}}, {entry['high']:{form}}]"
    return text.replace("-", "−")


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as a table, the first its head."""
    head, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *rest])
