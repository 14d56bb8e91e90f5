"""The suite's cells: what is measured, by name, and what is written of each."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from studies.stored import write_line
from whence.core import WhenceError, suggest
from whence.lab import read_rows

KEYS = ("device", "cell")
"""What tells the lines of results apart."""

Result = dict[str, Any]
"""What was found in a cell: `seconds` and so on; `estimated`, why it was not measured; or `refused`, and why."""


@dataclass(frozen=True)
class Setting:
    """How cells are measured.

    Attributes:
        device: by torch's name.
        repeats: the most turns that are counted.
        results: what other cells on this device found, by name.
    """

    device: str
    repeats: int
    results: Mapping[str, Result] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        name: such as `mlp/ghost/2048`; the first part is what `--only` selects most by.
        section: engines, training, peers, errors, rounds or install.
        measure: measures it.
        smaller: the cells of the same row with fewer records, which tell whether this one takes too long.
    """

    name: str
    section: str
    measure: Callable[[Setting], Result]
    smaller: tuple[str, ...] = ()


def choose(cells: Sequence[Cell], only: str | None) -> list[Cell]:
    """Return the cells that names select, with the smaller ones of their rows, in order.

    Args:
        cells: all cells.
        only: names separated by commas: a cell's, the first parts of one, or a pattern with `*`; None: all cells.

    Raises:
        WhenceError: a name selects no cell.
    """
    if only is None:
        return list(cells)
    names: set[str] = set()
    for pattern in (text.strip().rstrip("/") for text in only.split(",")):
        chosen = [
            cell
            for cell in cells
            if fnmatch.fnmatchcase(cell.name, pattern) or cell.name.startswith(f"{pattern}/") or cell.section == pattern
        ]
        if not chosen:
            valid_names = sorted({cell.section for cell in cells} | {cell.name for cell in cells})
            raise WhenceError(
                f"--only names {pattern!r}, which is no cell.{suggest(pattern, valid_names)} --list shows all cells."
            )
        names.update(name for cell in chosen for name in (cell.name, *cell.smaller))
    return [cell for cell in cells if cell.name in names]


def results_file(out: Path) -> Path:
    """Return the file with a line for each cell."""
    return out / "cells.parquet"


def read_results(out: Path) -> dict[str, dict[str, Result]]:
    """Return what was found, by device and cell."""
    results: dict[str, dict[str, Result]] = {}
    for (device, cell), line in read_rows(results_file(out), KEYS).items():
        results.setdefault(device, {})[cell] = line
    return results


def write_result(out: Path, device: str, cell: Cell, result: Result) -> Result:
    """Write a cell's line, and return it; several processes may measure other cells at a time."""
    line = {"device": device, "cell": cell.name, "section": cell.section, **result}
    write_line(results_file(out), line, KEYS)
    return line
