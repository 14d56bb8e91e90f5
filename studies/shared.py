"""What studies share: options of commands, rows of finished runs, t intervals as text, and pages of tables."""

import multiprocessing
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer
from filelock import FileLock

from whence.core import write_atomically
from whence.lab import put_row, read_rows
from whence.statistics import t_interval

Out = Annotated[Path, typer.Argument(help="The directory of the results.")]
Runs = Annotated[Path, typer.Option(help="Where training runs are kept.")]
Only = Annotated[str, typer.Option(help="Jobs whose name begins so.")]
Workers = Annotated[int, typer.Option(help="Processes at a time.", min=1)]

Row = dict[str, Any]


def report(*words: object) -> None:
    """Print how far a command is, apart from its output."""
    print(*words, file=sys.stderr, flush=True)


def run_jobs(function: Callable[..., object], jobs: Iterable[Sequence[Any]], *more: Any, workers: int) -> None:
    """Call a function for each job in processes of their own; `more` are its last arguments."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for begun in [pool.submit(function, *job, *more) for job in jobs]:
            begun.result()


def read_list(file: Path, keys: Sequence[str]) -> list[Row]:
    """Return the rows of a file, in the order of their keys; none if there is no such file."""
    return list(read_rows(file, keys).values())


def write_line(file: Path, line: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Write a row at six digits, in place of the one of the same keys; other processes may write others meanwhile."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(".lock")):
        put_row(file, round_numbers(line), keys)


def round_numbers(value: Any) -> Any:
    """Return a tree of numbers at six digits, which is more than any of them is good for."""
    if isinstance(value, Mapping):
        return {key: round_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [round_numbers(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def cell(
    entry: Mapping[str, Any] | float | None, *, interval: bool = True, digits: int = 3, percent: bool = False
) -> str:
    """Return a number, or a "mean" with its "low" and "high", as text."""
    entry = entry if isinstance(entry, Mapping) else {"mean": entry, "low": None}
    if entry["mean"] is None:
        return "–"
    form = ".0%" if percent else f".{digits}f"
    text = f"{entry['mean']:{form}}"
    if interval and entry["low"] is not None:
        text += f" [{entry['low']:{form}}, {entry['high']:{form}}]"
    return text.replace("-", "−")


def mean_cell(values: Sequence[float], **form: Any) -> str:
    """Return the mean of independent values with its 95% t interval, as text."""
    return cell(t_interval(values), **form)


def range_cell(values: Sequence[float], form: str = ".2f") -> str:
    """Return the mean of values with the lowest and the highest, as text."""
    text = f"{mean(values):{form}}"
    return text if len(values) == 1 else f"{text} [{min(values):{form}}, {max(values):{form}}]"


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as a table of Markdown, the first its head."""
    head, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|" + " --- |" * len(lines[0]), *rest])


def grid(corner: str, names: Iterable[str], columns: Sequence[str], show: Callable[[str, str], str]) -> str:
    """Return the table of what `show(name, column)` returns; a name for which nothing is known has no line."""
    lines = [[name, *(show(name, column) for column in columns)] for name in names]
    return table([[corner, *columns], *(line for line in lines if {*line[1:]} != {"–"})])


def write_page(file: Path, *parts: str) -> None:
    """Write paragraphs, tables and headings as a page, whole or not at all; empty ones are left out."""
    with write_atomically(file) as temporary:
        temporary.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
