"""Progress of training on standard error: bars and a table on a terminal, plain lines elsewhere."""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from whence.cli.console import errors, make_table, print_error_line
from whence.experiments.kinds import AnyConfig
from whence.experiments.sweepfile import Planned

LINE_SECONDS = 10.0
"""Seconds from one plain line about rounds under way to the next, at least."""

Clock = Callable[[], float]


class PlainLines:
    """Lines for logs: nothing on a terminal, and at most one about rounds under way every ten seconds."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._last = -math.inf

    def print(self, text: str, *, always: bool = False) -> None:
        """Print a line, unless another one was printed in the last ten seconds.

        Args:
            text: the line.
            always: print it even then.
        """
        now = self._clock()
        if not errors.is_terminal and (always or now - self._last >= LINE_SECONDS):
            self._last = now
            print_error_line(text)


class _Bars:
    """Bars that are shown inside their `with`, and plain lines where there is no terminal."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        last_round = TextColumn("{task.fields[last_round]}", markup=False)
        self._progress = Progress(*columns, last_round, console=errors, disable=not errors.is_terminal)
        self._lines = PlainLines(clock)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _add(self, name: str, rounds: int) -> TaskID:
        return self._progress.add_task(name, total=rounds, last_round="")


class ComparisonBars(_Bars):
    """A bar for all rounds and one for each run under way."""

    def __init__(self, configs: Sequence[AnyConfig], clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._done: dict[tuple[str, int], int] = {}
        self._bars: dict[tuple[str, int], TaskID] = {}
        self._all = self._add("all rounds", sum(config.rounds for config in configs))

    def update(self, config: AnyConfig, rounds: int) -> None:
        """Show how many rounds of a run are done."""
        key, name = (config.arm, config.seed), f"{config.arm}, seed {config.seed}"
        self._done[key] = rounds
        self._progress.update(self._all, completed=sum(self._done.values()))
        if 0 < rounds < config.rounds:
            if key not in self._bars:
                self._bars[key] = self._add(f"  {name}", config.rounds)
            self._lines.print(f"{name}: round {rounds} of {config.rounds}")
        if key in self._bars:
            self._progress.update(self._bars[key], completed=rounds, visible=rounds < config.rounds)
        if rounds == config.rounds:
            self._lines.print(f"{name}: {rounds} rounds done", always=True)


class RoundBar(_Bars):
    """A bar for rounds, or records, that are worked on one after the other.

    Args:
        name: stands before the bar.
        line: begins the lines where there is no terminal.
        unit: what is counted.
        clock: returns seconds.
    """

    def __init__(
        self,
        name: str = "rounds of the page",
        line: str = "page",
        *,
        unit: str = "round",
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._name, self._line, self._unit = name, line, unit
        self._bar: TaskID | None = None

    def update(self, done: int, count: int) -> None:
        """Show how many are done, of all."""
        if self._bar is None:
            self._bar = self._add(self._name, count)
        self._progress.update(self._bar, completed=done)
        if count > 1:
            self._lines.print(f"{self._line}: {self._unit} {done} of {count}")


class RunBar(_Bars):
    """A bar for the rounds of one run, with the result of the last one."""

    def __init__(self, rounds: int, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self.rounds = 0
        self._total = rounds
        self._bar = self._add("rounds", rounds)

    def update(self, rounds: int, metrics: Mapping[str, Any]) -> None:
        """Show how many rounds are done, and the last one's metrics."""
        self.rounds = rounds
        last_round = ", ".join(describe_round(metrics))
        self._progress.update(self._bar, completed=rounds, last_round=last_round)
        if rounds:
            line = f"round {rounds} of {self._total}"
            self._lines.print(f"{line}: {last_round}" if last_round else line, always=rounds == self._total)


def describe_round(metrics: Mapping[str, Any]) -> list[str]:
    """Return a round's results in words."""
    forms = {"test_return": "test return {:.4g}", "episode_return": "return {:.4g}", "reward": "reward {:.4g}"}
    words = [form.format(metrics[name]) for name, form in forms.items() if metrics.get(name) is not None]
    if metrics.get("dropped_share"):
        words.append(f"{1 - metrics['dropped_share']:.0%} kept")
    return words


class SweepTable:
    """A live table of a sweep, a row for each experiment; plain lines where there is no terminal."""

    def __init__(self, runs: Sequence[Planned], workers: int | None = None, clock: Clock = time.monotonic) -> None:
        self._runs = runs
        self._workers = workers or os.cpu_count() or 1
        self._clock = clock
        self._done: dict[Planned, int] = {}
        self._finished: set[Planned] = set()
        self._failed: set[Planned] = set()
        self._starts: dict[Planned, float] = {}
        self._reports: dict[Planned, float] = {}  # when each run under way last reported
        self._timings: dict[str, tuple[int, float]] = {}  # by experiment: rounds, and the seconds they took
        self._lines = PlainLines(clock)
        self._live = Live(self.table(), console=errors, refresh_per_second=2) if errors.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def kept(self, planned: Planned) -> None:
        """Count a run that was finished before."""
        self._done[planned] = planned.config.rounds
        self._finished.add(planned)

    def rounds(self, planned: Planned, done: int) -> None:
        """Show how many rounds a run under way has done."""
        now = self._clock()
        self._starts.setdefault(planned, now)
        # A run's first report counts rounds that another sweep may have done; one that was lost begins once more.
        if planned in self._reports and done > self._done[planned]:
            rounds, seconds = self._timings.get(planned.group, (0, 0.0))
            self._timings[planned.group] = rounds + done - self._done[planned], seconds + now - self._reports[planned]
        self._done[planned], self._reports[planned] = done, now
        if 0 < done < planned.config.rounds:
            self._lines.print(f"{planned.name}: round {done} of {planned.config.rounds}")
        self._show()

    def ended(self, planned: Planned, failure: str | None) -> None:
        """Show that a run has ended, and why it failed."""
        now = self._clock()
        self._reports.pop(planned, None)
        if failure is None:
            self._finished.add(planned)
        else:
            self._failed.add(planned)
        duration = _format_clock(now - self._starts.get(planned, now))
        end = f"failed: {failure}" if failure is not None else f"done in {duration}"
        self._lines.print(f"{planned.name}: {end}", always=True)
        self._show()

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(self.table())

    def table(self) -> Table:
        """Return the table as it stands."""
        groups: dict[str, list[Planned]] = {}
        for planned in self._runs:
            groups.setdefault(planned.group, []).append(planned)
        lefts = [self._time_left(group, runs) for group, runs in groups.items()]
        known = [left for left in lefts if left is not None]
        rows = [
            self._row(group, runs, self._under_way(runs), self._mean_seconds(group), left)
            for (group, runs), left in zip(groups.items(), lefts, strict=True)
        ]
        # Rounds of unlike experiments have no mean.
        rows.append(self._row("all", self._runs, "", None, sum(known) if len(known) == len(lefts) else None))
        headings = ("experiment", "runs", "rounds", "under way", "seconds a round", "time left", "failed")
        return make_table("Sweep", headings, rows)

    def _time_left(self, group: str, runs: Sequence[Planned]) -> float | None:
        """Return the seconds that an experiment's open rounds will take; None if no round was timed yet."""
        unfinished = [run for run in runs if run not in self._finished | self._failed]
        rounds = sum(run.config.rounds - self._done.get(run, 0) for run in unfinished)
        if not rounds:
            return 0.0
        mean = self._mean_seconds(group)
        # A cluster may make more runs at a time than this machine has cores.
        at_a_time = max(self._workers, len(self._reports))
        return None if mean is None else rounds * mean / min(at_a_time, len(unfinished))

    def _mean_seconds(self, group: str) -> float | None:
        rounds, seconds = self._timings.get(group, (0, 0.0))
        return seconds / rounds if rounds else None

    def _under_way(self, runs: Sequence[Planned]) -> str:
        return "; ".join(f"{run.label}, seed {run.config.seed}" for run in runs if run in self._reports)

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
            _format_clock(left) if left else "",
            str(failed or ""),
        ]


def _format_clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
