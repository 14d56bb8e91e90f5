"""Progress of training on standard error: bars on a terminal, plain lines elsewhere."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from whence.cli.console import errors, print_error_line
from whence.experiments import AnyConfig, Planned

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


class SweepBars(_Bars):
    """A bar for each experiment of a sweep, with the time that it will take and its runs under way."""

    def __init__(self, runs: Sequence[Planned], clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._clock = clock
        self._done = dict.fromkeys(runs, 0)
        self._starts: dict[Planned, float] = {}
        self._failures: Counter[str] = Counter()
        self._bars = {
            group: self._add(group, sum(run.config.rounds for run in runs if run.group == group))
            for group in dict.fromkeys(run.group for run in runs)
        }

    def kept(self, planned: Planned) -> None:
        """Count a run that was finished before."""
        self._done[planned] = planned.config.rounds
        self._show(planned.group)

    def rounds(self, planned: Planned, done: int) -> None:
        """Show how many rounds a run under way has done."""
        self._starts.setdefault(planned, self._clock())
        self._done[planned] = done
        if 0 < done < planned.config.rounds:
            self._lines.print(f"{planned.name}: round {done} of {planned.config.rounds}")
        self._show(planned.group)

    def ended(self, planned: Planned, failure: str | None) -> None:
        """Show that a run has ended, and why it failed."""
        seconds = self._clock() - self._starts.pop(planned, self._clock())
        self._failures[planned.group] += failure is not None
        end = f"failed: {failure}" if failure is not None else f"done in {timedelta(seconds=round(seconds))}"
        self._lines.print(f"{planned.name}: {end}", always=True)
        self._show(planned.group)

    def _show(self, group: str) -> None:
        words = [f"{run.label}, seed {run.config.seed}" for run in self._starts if run.group == group]
        if self._failures[group]:
            words.append(f"{self._failures[group]} failed")
        done = sum(rounds for run, rounds in self._done.items() if run.group == group)
        self._progress.update(self._bars[group], completed=done, last_round="; ".join(words))
