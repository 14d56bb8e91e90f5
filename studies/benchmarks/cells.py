"""Cells: what is measured, by name, what is written of each, and the command that measures them."""

import fnmatch
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from studies.shared import Out, read_list, report, write_line
from whence.core import WhenceError, suggest
from whence.lab.agents.training import check_device

KEYS = ("device", "cell")
"""What tells the lines of results apart."""

Result = dict[str, Any]
"""What was found in a cell: `seconds` and so on; `estimated`, why it was not measured; or `refused`, and why."""


class Setting(NamedTuple):
    """How cells are measured: on a device by torch's name, in so many turns at most, after the `results` of others."""

    device: str
    repeats: int
    results: Mapping[str, Result] = {}


class Cell(NamedTuple):
    """One measurement.

    Attributes:
        name: such as `mlp/ghost/2048`; the first part is what `--only` selects most by.
        section: engines, training, peers, steps, operations, errors or rounds.
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
        chosen = [cell for cell in cells if pattern == cell.section or _matches(cell.name, pattern)]
        if not chosen:
            valid_names = sorted({cell.section for cell in cells} | {cell.name for cell in cells})
            raise WhenceError(
                f"--only names {pattern!r}, which is no cell.{suggest(pattern, valid_names)} --list shows all cells."
            )
        names.update(name for cell in chosen for name in (cell.name, *cell.smaller))
    return [cell for cell in cells if cell.name in names]


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}/")


def read_results(out: Path) -> dict[str, dict[str, Result]]:
    """Return what was found, by device and cell."""
    results: dict[str, dict[str, Result]] = {}
    for line in read_list(out / "cells.parquet", KEYS):
        results.setdefault(line["device"], {})[line["cell"]] = line
    return results


def measure_cells(out: Path, cells: Sequence[Cell], device: str, repeats: int) -> None:
    """Measure the cells that are not finished, and write a line of each; other processes may measure others."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor()
    about = {"machine": name or platform.machine(), "torch": version("torch")}
    for place, cell in enumerate(cells, start=1):
        results = read_results(out).get(device, {})
        if cell.name in results:
            continue
        start = time.perf_counter()
        result = cell.measure(Setting(device, repeats, results))
        if "skipped" in result:  # no result: it is measured where it can be
            report(f"[{place}/{len(cells)}] {cell.name}: {result['skipped']}")
            continue
        line = {"device": device, "cell": cell.name, "section": cell.section, **result, **about}
        took = round(time.perf_counter() - start, 1)
        write_line(out / "cells.parquet", {**line, "took": took}, KEYS)
        report(f"[{place}/{len(cells)}] {cell.name}: {result.get('refused', 'done')} ({took:g} s)")


def make_command(cells: Callable[[], Sequence[Cell]], default: str) -> Callable[..., None]:
    """Return the command that measures cells into a directory."""

    def main(
        out: Out = Path(default),
        only: Annotated[str | None, typer.Option(help="Names of cells, or first parts, or patterns with *.")] = None,
        device: Annotated[str, typer.Option(help="Where it is computed: cpu or cuda.")] = "cpu",
        repeats: Annotated[int, typer.Option(help="The most turns of a measurement.", min=1)] = 5,
        show: Annotated[bool, typer.Option("--list", help="Show the cells' names, and measure nothing.")] = False,
    ) -> None:
        """Measure, and write cells.parquet."""
        try:
            check_device(device)
            chosen = choose(cells(), only)
        except WhenceError as failure:
            raise SystemExit(str(failure)) from None
        if show:
            print("\n".join(cell.name for cell in chosen))
            return
        torch.set_num_threads(1)
        measure_cells(out, chosen, device, repeats)

    return main
