"""The terminal: text, tables and JSON; quiet where there is no terminal."""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table

from whence.errors import WhenceError

console = Console()


errors = Console(stderr=True)


def print_json(content: Any) -> None:
    """Print a value as JSON, for scripts: nothing else goes to standard output. What is not finite is null."""
    typer.echo(json.dumps(_finite(content), indent=2, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_line(text: str) -> None:
    """Print a print_line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def make_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table of text as it is; what is None is empty."""
    made = Table(title=escape(title), title_justify="left")
    for heading in headings:
        made.add_column(heading, overflow="fold")
    for row in rows:
        made.add_row(*("" if value is None else escape(str(value)) for value in row))
    return made


def parse_json(option: str, text: str | None, example: str) -> Any:
    """Return the value that an option gives as JSON; None where it is not given.

    Raises:
        WhenceError: it is not JSON.
    """
    if text is None:
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError as wrong:
        raise WhenceError(f"{option} is {text!r}, which is not JSON ({wrong}). Write it as {example}.") from None


def parse_json_object(option: str, text: str | None, example: str) -> dict[str, Any] | None:
    """Return the JSON object that an option gives; None where it is not given.

    Raises:
        WhenceError: it is not JSON, or no object.
    """
    value = parse_json(option, text, example)
    if value is not None and not isinstance(value, dict):
        raise WhenceError(f"{option} is {text}; a JSON object is needed, such as {example}.")
    return value


def log_to_terminal() -> None:
    """Show what the library logs above the bars."""
    logger = logging.getLogger("whence")
    if not any(isinstance(handler, RichHandler) for handler in logger.handlers):
        logger.addHandler(RichHandler(console=errors, show_path=False, show_time=False))


@contextmanager
def resumable() -> Iterator[None]:
    """Tell of Ctrl-C that the command can be given again, where it goes on with what is not finished."""
    try:
        yield
    except KeyboardInterrupt:
        text = "Interrupted. What was finished is kept; the same command goes on from there."
        errors.print(text, soft_wrap=True)
        raise typer.Exit(130) from None
