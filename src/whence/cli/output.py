"""The terminal: consoles, bars and tables; quiet where there is no terminal."""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from whence.experiments import AnyConfig, Planned
from whence.report.page import METRICS, cell, column_heading

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


def summary_table(title: str, summary: Mapping[str, Any]) -> Table:
    """Return a comparison's summary as a table, a column for each arm."""
    made = Table(title=title.replace("[", r"\["))
    made.add_column("metric")
    for arm in summary:
        made.add_column(column_heading(arm), justify="right")
    for metric, heading in METRICS.items():
        made.add_row(heading, *(" ".join(cell(metric, entry[metric])).strip() for entry in summary.values()))
    return made


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

    def __init__(self, configs: Sequence[AnyConfig]) -> None:
        super().__init__()
        self._done: dict[tuple[str, int], int] = {}
        self._bars: dict[tuple[str, int], TaskID] = {}
        self._all = self._progress.add_task("all rounds", total=sum(config.rounds for config in configs), said="")

    def update(self, config: AnyConfig, rounds: int) -> None:
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

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = 0
        self._bar = self._progress.add_task("rounds", total=rounds, said="")

    def update(self, rounds: int, metrics: Mapping[str, Any]) -> None:
        """Show that so many rounds are done."""
        self.rounds = rounds
        self._progress.update(self._bar, completed=rounds, said=", ".join(said_of(metrics)))


def said_of(metrics: Mapping[str, Any]) -> list[str]:
    """Return what a round came to, in words."""
    said = []
    words_of = {"test_return": "test return {:.4g}", "episode_return": "return {:.4g}", "reward": "reward {:.4g}"}
    for name, words in words_of.items():
        if metrics.get(name) is not None:
            said.append(words.format(metrics[name]))
    if metrics.get("dropped_share"):
        said.append(f"{1 - metrics['dropped_share']:.0%} kept")
    return said


class SweepTable:
    """A live table of a sweep, a row for each experiment; plain lines where there is no terminal."""

    def __init__(
        self, runs: Sequence[Planned], workers: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._runs = runs
        self._workers = workers or os.cpu_count() or 1
        self._clock = clock
        self._done: dict[Planned, int] = {}
        self._finished: set[Planned] = set()
        self._failed: set[Planned] = set()
        self._begun: dict[Planned, float] = {}
        self._heard: dict[Planned, float] = {}  # of runs under way: when last
        self._timed: dict[str, tuple[int, float]] = {}  # by experiment: rounds, and the seconds they took
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
        self._finished.add(planned)

    def rounds(self, planned: Planned, done: int) -> None:
        """Hear of the rounds that a run under way has done."""
        now = self._clock()
        self._begun.setdefault(planned, now)
        # A run's first message is of rounds that another sweep may have done.
        if planned in self._heard:
            rounds, seconds = self._timed.get(planned.group, (0, 0.0))
            self._timed[planned.group] = rounds + done - self._done[planned], seconds + now - self._heard[planned]
        self._done[planned], self._heard[planned] = done, now
        self._show()

    def ended(self, planned: Planned, failure: str | None) -> None:
        """Hear that a run has ended, and why it failed."""
        now = self._clock()
        self._heard.pop(planned, None)
        if failure is None:
            self._finished.add(planned)
        else:
            self._failed.add(planned)
        if self._live is None:
            took = _clock(now - self._begun.get(planned, now))
            what = f"failed: {failure}" if failure is not None else f"done in {took}"
            errors.print(f"{planned.name}: {what}", markup=False, highlight=False, soft_wrap=True)
        self._show()

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(self.table())

    def table(self) -> Table:
        """Return the table as it stands."""
        groups: dict[str, list[Planned]] = {}
        for planned in self._runs:
            groups.setdefault(planned.group, []).append(planned)
        lefts = [self._left(group, runs) for group, runs in groups.items()]
        known = [left for left in lefts if left is not None]
        rows = [
            self._row(group, runs, self._under_way(runs), self._mean(group), left)
            for (group, runs), left in zip(groups.items(), lefts, strict=True)
        ]
        # Rounds of unlike experiments have no mean.
        rows.append(self._row("all", self._runs, "", None, sum(known) if len(known) == len(lefts) else None))
        headings = ("experiment", "runs", "rounds", "under way", "seconds a round", "time left", "failed")
        return table("Sweep", headings, rows)

    def _left(self, group: str, runs: Sequence[Planned]) -> float | None:
        """Return the seconds that an experiment's open rounds will take; None where none was timed yet."""
        still = [run for run in runs if run not in self._finished | self._failed]
        rounds = sum(run.config.rounds - self._done.get(run, 0) for run in still)
        if not rounds:
            return 0.0
        mean = self._mean(group)
        return None if mean is None else rounds * mean / min(self._workers, len(still))

    def _mean(self, group: str) -> float | None:
        rounds, seconds = self._timed.get(group, (0, 0.0))
        return seconds / rounds if rounds else None

    def _under_way(self, runs: Sequence[Planned]) -> str:
        return "; ".join(f"{run.label}, seed {run.config.seed}" for run in runs if run in self._heard)

    def _row(
        self, name: str, runs: Sequence[Planned], under_way: str, mean: float | None, left: float | None
    ) -> list[str]:
        failed = sum(run in self._failed for run in runs)
        return [
            name,
            f"{sum(run in self._finished for run in runs)}/{len(runs)}",
            f"{sum(self._done.get(run, 0) for run in runs)}/{sum(run.config.rounds for run in runs)}",
            under_way,
            "" if mean is None else f"{mean:.3g}",
            _clock(left) if left else "",
            str(failed or ""),
        ]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
