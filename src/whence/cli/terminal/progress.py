"""Progress of training on standard error: bars on a terminal, plain lines elsewhere."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from whence.cli.terminal.console import errors, print_line

if TYPE_CHECKING:
    from whence.lab import Planned

LINE_SECONDS = 10.0
"""Seconds from one plain line about rounds under way to the next, at least."""

Clock = Callable[[], float]


class _Bars:
    """Bars that are shown inside their `with`; where there is no terminal, lines for logs."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        about = TextColumn("{task.fields[about]}", markup=False)
        self._progress = Progress(*columns, about, console=errors, disable=not errors.is_terminal)
        self._clock = clock
        self._last_line = -math.inf

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _add(self, name: str, rounds: int) -> TaskID:
        return self._progress.add_task(name, total=rounds, about="")

    def _log(self, text: str, *, always: bool = False) -> None:
        """Print a line if there is no terminal, unless another one was printed in the last ten seconds."""
        now = self._clock()
        if not errors.is_terminal and (always or now - self._last_line >= LINE_SECONDS):
            self._last_line = now
            print_line(text, errors)


class RoundBar(_Bars):
    """A bar for rounds, one after the other, or other units; without a terminal, lines that begin with `line`."""

    def __init__(self, name: str = "rounds of the page", line: str = "page", unit: str = "round") -> None:
        super().__init__()
        self._name, self._line, self._unit = name, line, unit
        self._bar: TaskID | None = None

    def update(self, done: int, count: int) -> None:
        """Show how many are done, of all."""
        if self._bar is None:
            self._bar = self._add(self._name, count)
        self._progress.update(self._bar, completed=done)
        if count > 1:
            self._log(f"{self._line}: {self._unit} {done} of {count}")


class RunBar(_Bars):
    """A bar for the rounds of one run, with the result of the last one."""

    def __init__(self, rounds: int, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._total = rounds
        self._bar = self._add("rounds", rounds)

    def update(self, rounds: int, metrics: Mapping[str, Any]) -> None:
        """Show how many rounds are done, and the last one's metrics."""
        about = ", ".join(describe_round(metrics))
        self._progress.update(self._bar, completed=rounds, about=about)
        if rounds:
            line = f"round {rounds} of {self._total}"
            self._log(f"{line}: {about}" if about else line, always=rounds == self._total)


def describe_round(metrics: Mapping[str, Any]) -> list[str]:
    """Return a round's results in words."""
    forms = {"test_return": "test return {:.4g}", "episode_return": "return {:.4g}", "reward": "reward {:.4g}"}
    words = [form.format(metrics[name]) for name, form in forms.items() if metrics.get(name) is not None]
    if metrics.get("dropped_share"):
        words.append(f"{1 - metrics['dropped_share']:.0%} kept")
    return words


class PlannedBars(_Bars):
    """A bar for each experiment of a sweep, or for all rounds of a comparison, with the names of runs under way."""

    def __init__(self, runs: Sequence["Planned"], clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._runs = runs
        self._done, self._starts = {planned.name: 0 for planned in runs}, dict[str, float]()
        totals: Counter[str | None] = Counter()
        for planned in runs:
            totals[planned.group] += planned.config.rounds
        self._bars = {group: self._add(group or "all rounds", total) for group, total in totals.items()}

    def kept(self, planned: "Planned") -> None:
        """Count a run that was finished before."""
        self._show(planned, planned.config.rounds)
        if planned.group is None:
            self._log(f"{_name_run(planned)}: {planned.config.rounds} rounds done", always=True)

    def rounds(self, planned: "Planned", done: int) -> None:
        """Show how many rounds a run under way has done."""
        self._starts.setdefault(planned.name, self._clock())
        if 0 < done < planned.config.rounds:
            self._log(f"{_name_run(planned)}: round {done} of {planned.config.rounds}")
        self._show(planned, done)

    def ended(self, planned: "Planned", failure: str | None) -> None:
        """Print that a run has ended, and why it failed."""
        seconds = self._clock() - self._starts.pop(planned.name, self._clock())
        time_taken = f"done in {timedelta(seconds=round(seconds))}"
        end = time_taken if planned.group is not None else f"{planned.config.rounds} rounds done"
        self._log(f"{_name_run(planned)}: {end if failure is None else f'failed: {failure}'}", always=True)
        if failure is not None:
            self._show(planned, 0)

    def _show(self, planned: "Planned", done: int) -> None:
        self._done[planned.name] = done
        runs = [each for each in self._runs if each.group == planned.group]
        about = "; ".join(_name_run(each) for each in runs if 0 < self._done[each.name] < each.config.rounds)
        completed = sum(self._done[each.name] for each in runs)
        self._progress.update(self._bars[planned.group], completed=completed, about=about)


def _name_run(planned: "Planned") -> str:
    return planned.name if planned.group is not None else f"{planned.label}, seed {planned.config.seed}"
