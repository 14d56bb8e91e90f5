"""The live table of a sweep."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Self

from rich.live import Live
from rich.table import Table

from whence.cli.console import errors, make_table
from whence.experiments import Planned


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
        return make_table("Sweep", headings, rows)

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
