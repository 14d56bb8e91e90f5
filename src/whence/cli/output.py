"""The terminal: consoles, bars and tables; quiet where there is no terminal."""

import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import typer
from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from whence.errors import WhenceError
from whence.experiments import Planned, RunConfig

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


class SweepTable:
    """A live table of a sweep, a row for each experiment; plain lines where there is no terminal."""

    def __init__(self, runs: Sequence[Planned]) -> None:
        self._runs = runs
        self._done: dict[Planned, int] = {}
        self._failed: list[Planned] = []
        self._begun: dict[Planned, float] = {}
        self._fresh: dict[Planned, int] = {}
        self._live = Live(self.table(), console=errors, refresh_per_second=2) if errors.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def kept(self, planned: Planned) -> None:
        """Hear of a run that was finished before."""
        self._done[planned] = planned.config.rounds

    def rounds(self, planned: Planned, done: int) -> None:
        """Hear of the rounds that a run under way has done."""
        self._begun.setdefault(planned, time.monotonic())
        self._done[planned] = self._fresh[planned] = done
        self._show()

    def ended(self, planned: Planned, failure: str | None) -> None:
        """Hear that a run has ended, and why it failed."""
        seconds = time.monotonic() - self._begun.get(planned, time.monotonic())
        if failure is not None:
            self._failed.append(planned)
        if self._live is None:
            what = f"failed: {failure}" if failure is not None else f"done in {_clock(seconds)}"
            errors.print(f"{planned.name}: {what}", markup=False, highlight=False, soft_wrap=True)
        self._show()

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(self.table())

    def table(self) -> Table:
        """Return the table as it stands."""
        groups = dict.fromkeys(planned.group for planned in self._runs)
        rows = [self._row(group, [planned for planned in self._runs if planned.group == group]) for group in groups]
        headings = ("experiment", "runs", "rounds", "under way", "rounds a minute", "time left", "failed")
        return table("Sweep", headings, [*rows, self._row("all", list(self._runs))])

    def _row(self, name: str, runs: Sequence[Planned]) -> list[str]:
        total, done = sum(run.config.rounds for run in runs), sum(self._done.get(run, 0) for run in runs)
        finished = sum(self._done.get(run) == run.config.rounds for run in runs)
        failed = sum(run in self._failed for run in runs)
        now = [run for run in runs if run in self._begun and self._done[run] < run.config.rounds]
        under_way = [f"{run.label}, seed {run.config.seed}" for run in now if run not in self._failed]
        # What a round of this experiment takes a worker; for all, what was done since the sweep began.
        minutes = (time.monotonic() - min((self._begun[run] for run in runs if run in self._begun), default=0.0)) / 60
        fresh = sum(self._fresh.get(run, 0) for run in runs)
        rate = fresh / minutes if fresh and minutes > 0 and (under_way or name == "all") else None
        left = None if rate is None else (total - done) / rate * 60
        return [
            name,
            f"{finished}/{len(runs)}",
            f"{done}/{total}",
            "; ".join(under_way) if name != "all" else "",
            "" if rate is None else f"{rate:.1f}",
            "" if left is None else _clock(left),
            str(failed or ""),
        ]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
