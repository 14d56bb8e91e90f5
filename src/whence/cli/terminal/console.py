"""The terminal: text, tables and JSON."""

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table

console = Console()
errors = Console(stderr=True)

SCHEMA = 1
"""The version of what --json prints, of all commands: raised when a key is removed, renamed or means something else."""


def print_json(content: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Print an object as JSON after its `schema`, alone, in a line if `indent` is None. What is not finite is null."""
    finite = json.loads(json.dumps({"schema": SCHEMA, **content}, default=str), parse_constant=lambda name: None)
    typer.echo(json.dumps(finite, indent=indent))


def make_printable(text: str) -> str:
    """Return text without the control characters by which it could steer a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def print_line(text: str, where: Console | None = None) -> None:
    """Print one line of text as it is, without markup, line breaks or control characters."""
    (where or console).print(make_printable(text), markup=False, highlight=False, soft_wrap=True)


def print_paths(paths: Mapping[str, Path]) -> None:
    """Print where files are, a line for each, with the names' ends aligned."""
    width = max(map(len, paths)) + 1
    for name, path in paths.items():
        print_line(f"{name + ':':<{width}} {path}")


def make_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table whose headings and cells are text as it is; None is an empty cell."""
    table = Table(title=escape(make_printable(title)), title_justify="left")
    for heading in headings:
        table.add_column(escape(make_printable(heading)), overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else escape(make_printable(str(value))) for value in row))
    return table


def log_to_terminal() -> None:
    """Show what the library logs above the progress bars."""
    logger = logging.getLogger("whence")
    if not any(isinstance(handler, RichHandler) for handler in logger.handlers):
        logger.addHandler(RichHandler(console=errors, show_path=False, show_time=False))


@contextmanager
def resumable() -> Iterator[None]:
    """On Ctrl-C, say that the same command goes on. What libraries print meanwhile goes to standard error.

    Ray, for one, prints when a node dies; only results belong on standard output.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except KeyboardInterrupt:
        print_line("Interrupted. What was finished is kept; the same command goes on from there.", errors)
        raise typer.Exit(130) from None
