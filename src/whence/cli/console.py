"""The terminal: text, tables and JSON."""

import datetime
import json
import logging
import math
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
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
    typer.echo(json.dumps(_replace_non_finite(content), indent=2, default=str, allow_nan=False))


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _replace_non_finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_printable(text: str) -> str:
    """Return text without the control characters by which it could steer a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def print_line(text: str) -> None:
    """Print one line of text as it is, without markup, line breaks or control characters."""
    console.print(make_printable(text), markup=False, highlight=False, soft_wrap=True)


def print_error_line(text: str) -> None:
    """Print one line of text as it is to standard error."""
    errors.print(make_printable(text), markup=False, highlight=False, soft_wrap=True)


def print_paths(paths: Mapping[str, Path]) -> None:
    """Print where files are, a line for each, with the names' ends aligned."""
    width = max(map(len, paths)) + 1
    for name, path in paths.items():
        print_line(f"{name + ':':<{width}} {path}")


def make_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table whose cells are text as it is; None is an empty cell."""
    table = Table(title=escape(make_printable(title)), title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else escape(make_printable(str(value))) for value in row))
    return table


def parse_json(option: str, text: str | None, example: str) -> Any:
    """Return the value of an option that takes JSON; None if the option is not given.

    Raises:
        WhenceError: the text is not JSON.
    """
    if text is None:
        return None
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        raise WhenceError(
            f"{option} is {_shorten(repr(text))}, which is not JSON ({error}). Write it as {example}."
        ) from None


def _shorten(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]} …"


def parse_json_object(option: str, text: str | None, example: str) -> dict[str, Any] | None:
    """Return the value of an option that takes a JSON object; None if the option is not given.

    Raises:
        WhenceError: the text is not JSON, or no object.
    """
    value = parse_json(option, text, example)
    if value is not None and not isinstance(value, dict):
        raise WhenceError(f"{option} is {_shorten(str(text))}; a JSON object is needed, such as {example}.")
    return value


def parse_toml(option: str, text: str) -> Any:
    """Return a value as TOML reads it; words without quotes, which TOML does not have, are text.

    Args:
        option: what it is given by, for the message.
        text: the value.

    Raises:
        WhenceError: the text begins like a value of TOML, and is none.
    """
    try:
        document = tomllib.loads(f"value = {text}")
    except (RecursionError, ValueError) as error:
        if re.match(r"""["'\[{]""", text):
            raise WhenceError(
                f"{option} has a value that is not TOML ({error}). Write it as 3, 0.5, true, word, 'some words', "
                "[64, 64] or {a = 1}."
            ) from None
        return text
    if isinstance(document["value"], datetime.date | datetime.time) or len(document) > 1:  # a text of several lines
        return text
    return document["value"]


def log_to_terminal() -> None:
    """Show what the library logs above the progress bars."""
    logger = logging.getLogger("whence")
    if not any(isinstance(handler, RichHandler) for handler in logger.handlers):
        logger.addHandler(RichHandler(console=errors, show_path=False, show_time=False))


@contextmanager
def keep_stdout_clean() -> Iterator[None]:
    """Send what libraries print meanwhile to standard error, such as Ray's word on a node that dies."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def resumable() -> Iterator[None]:
    """On Ctrl-C, say that the same command goes on with what is not finished."""
    try:
        yield
    except KeyboardInterrupt:
        text = "Interrupted. What was finished is kept; the same command goes on from there."
        errors.print(text, soft_wrap=True)
        raise typer.Exit(130) from None
