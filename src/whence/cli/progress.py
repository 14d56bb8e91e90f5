"""Progress of training on standard error: bars on a terminal, plain lines elsewhere."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from whence.cli.console import errors, print_error_line
from whence.cli.summary import describe_round
from whence.experiments.kinds import AnyConfig

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
    """A bar for rounds that are worked on one after the other.

    Args:
        name: stands before the bar.
        line: begins the lines where there is no terminal.
        clock: returns seconds.
    """

    def __init__(self, name: str = "rounds of the page", line: str = "page", clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._name, self._line = name, line
        self._bar: TaskID | None = None

    def update(self, done: int, rounds: int) -> None:
        """Show how many rounds are done, of all."""
        if self._bar is None:
            self._bar = self._add(self._name, rounds)
        self._progress.update(self._bar, completed=done)
        if rounds > 1:
            self._lines.print(f"{self._line}: round {done} of {rounds}")


class RecordBar(_Bars):
    """A bar for the records of a round that are judged one after the other."""

    def __init__(self, number: int, clock: Clock = time.monotonic) -> None:
        super().__init__(clock)
        self._number = number
        self._bar: TaskID | None = None

    def update(self, done: int, records: int) -> None:
        """Show how many records are judged, of all."""
        if self._bar is None:
            self._bar = self._add(f"records of round {self._number}", records)
        self._progress.update(self._bar, completed=done)
        self._lines.print(f"round {self._number}: record {done} of {records}")


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
