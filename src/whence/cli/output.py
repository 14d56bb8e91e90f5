"""The terminal: consoles, bars and tables; quiet where there is no terminal."""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from whence.errors import WhenceError
from whence.experiments import RunConfig

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


def line(text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def table(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table of text as it is; what is None is empty."""
    made = Table(title=escape(title), title_justify="left")
    for heading in headings:
        made.add_column(heading, overflow="fold")
    for row in rows:
        made.add_row(*("" if value is None else escape(str(value)) for value in row))
    return made


def parsed_json(option: str, text: str | None, example: str) -> Any:
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


def json_object(option: str, text: str | None, example: str) -> dict[str, Any] | None:
    """Return the JSON object that an option gives; None where it is not given.

    Raises:
        WhenceError: it is not JSON, or no object.
    """
    value = parsed_json(option, text, example)
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


class _Bars:
    """Bars that are there while their `with` lasts."""

    def __init__(self) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        said = TextColumn("{task.fields[said]}", markup=False)
        self._progress = Progress(*columns, said, console=errors, disable=not errors.is_terminal)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class ComparisonBars(_Bars):
    """A bar for all rounds and one for each run under way; plain lines where there is no terminal."""

    def __init__(self, configs: Sequence[RunConfig]) -> None:
        super().__init__()
        self._done: dict[tuple[str, int], int] = {}
        self._bars: dict[tuple[str, int], TaskID] = {}
        self._all = self._progress.add_task("all rounds", total=sum(config.rounds for config in configs), said="")

    def update(self, config: RunConfig, rounds: int) -> None:
        """Show that a run has so many rounds done."""
        key = config.arm, config.seed
        self._done[key] = rounds
        self._progress.update(self._all, completed=sum(self._done.values()))
        if 0 < rounds < config.rounds and key not in self._bars:
            name = f"  {config.arm}, seed {config.seed}"
            self._bars[key] = self._progress.add_task(name, total=config.rounds, said="")
        if key in self._bars:
            self._progress.update(self._bars[key], completed=rounds, visible=rounds < config.rounds)
        if not errors.is_terminal and rounds == config.rounds:
            errors.print(f"{config.arm}, seed {config.seed}: {rounds} rounds done")


class RunBar(_Bars):
    """A bar for the rounds of one run, with what the last one came to."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.rounds = 0
        self._bar = self._progress.add_task("rounds", total=config.rounds, said="")

    def update(self, rounds: int, metrics: Mapping[str, Any]) -> None:
        """Show that so many rounds are done."""
        self.rounds = rounds
        self._progress.update(self._bar, completed=rounds, said=", ".join(said_of(metrics)))


def said_of(metrics: Mapping[str, Any]) -> list[str]:
    """Return what a round came to, in words."""
    said = []
    for name, words in (("test_return", "test return {:.4g}"), ("episode_return", "return {:.4g}")):
        if metrics.get(name) is not None:
            said.append(words.format(metrics[name]))
    if metrics.get("dropped_share"):
        said.append(f"{1 - metrics['dropped_share']:.0%} kept")
    return said
