"""The terminal: consoles, bars and tables; quiet where there is no terminal."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from whence.cli.console import errors
from whence.cli.summary import describe_round
from whence.experiments import AnyConfig


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
        self._progress.update(self._bar, completed=rounds, said=", ".join(describe_round(metrics)))
