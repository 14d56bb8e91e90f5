"""The recorder of a training's run directory, for agents and language models alike, and its stopwatch.

Three trainings write runs: `InfluenceCallback`, `PPOTrainer`, and the trainers of TRL. `Run` writes the learner's side
of any loop, and `score_rollouts` a run without training. Each hands its tables, tensors and numbers to a
`RunRecorder`, and keeps nothing of a run itself.

1. `begin(config, versions=...)` opens the directory and locks it. Whether the training continues a run, starts anew or
   is refused is decided in `RunDirectory.find_start` and nowhere else. What only a trainer knows goes there as
   functions: `find` returns the latest checkpoint (whence's, Transformers', or the rows of a table), `check` refuses
   one that the model cannot continue from.
2. The trainer puts itself where it was and calls `continue_after(checkpoint)`. With the first round that is written,
   the run notes why it continues otherwise than without the interruption, if it does.
3. For each round: `write_round` with records, further tables and tensors, `write_rows` with metrics and seconds, and
   `save_checkpoint` if `is_due`.
4. `end` lets others write the directory.

Of several processes one writes. The others call `begin`, `is_due` and `save_checkpoint` too, which have to agree;
their rounds and rows are not written.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
from torch import Tensor

from whence.core import WhenceError
from whence.runs.checkpoints import Checkpoint, CheckpointClock, save_checkpoint
from whence.runs.config_file import POLICIES_EVERY, list_changes
from whence.runs.directory import RunDirectory
from whence.runs.files import VOCABULARY, PerRound, RoundTensors, RowTable, write_vocabulary

log = logging.getLogger("whence")

POLICY_BYTES = 2**29
"""Bytes that a run's policies may take; of larger ones, those of every second round are kept, or of fewer."""

Seconds = Mapping[str, Mapping[str, float]]
"""Seconds by stage and clock."""


class Stopwatch:
    """Counts seconds since its construction: CPU seconds of the process, and wall time."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far, as `cpu` and `wall`."""
        return {"cpu": time.process_time() - self._cpu, "wall": time.perf_counter() - self._wall}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time inside this context."""
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            self._cpu += time.process_time() - cpu
            self._wall += time.perf_counter() - wall


@contextmanager
def time_stage(seconds: dict[str, dict[str, float]], stage: str) -> Iterator[None]:
    """Add the seconds of a stage to `seconds`, without those of the stages within it."""
    before, watch = _sum_by_clock(seconds), Stopwatch()
    yield
    after, stage_before = _sum_by_clock(seconds), seconds.get(stage, {})
    seconds[stage] = {
        clock: stage_before.get(clock, 0.0) + value - (after[clock] - before[clock])
        for clock, value in watch.seconds().items()
    }


def _sum_by_clock(seconds: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {clock: sum(clocks[clock] for clocks in seconds.values()) for clock in ("cpu", "wall")}


def flatten_seconds(seconds: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return seconds by stage and clock as one row, with names such as `scoring_cpu`."""
    return {f"{stage}_{clock}": value for stage, clocks in seconds.items() for clock, value in clocks.items()}


def find_last_round(run: Path) -> Checkpoint:
    """Return where writing stopped that needs no state to continue: after the last round that has its row."""
    rounds = RunDirectory.open(run).table("metrics")
    return Checkpoint(int(rounds["round"].max() or 0) if len(rounds) else 0, {}, run)  # type: ignore[arg-type]


class RunRecorder:
    """Writes one training's run directory.

    Args:
        run: the directory's path, which stays the same if the working directory changes; or a directory that was begun.
        save_every: rounds from one checkpoint to the next; see `CheckpointClock`.
        keep: the number of last checkpoints that stay, besides the best and those around a fall of the return.
        writes: whether this process writes; of several processes of one training, the first does.
    """

    def __init__(
        self, run: str | Path | RunDirectory, *, save_every: int | None = 0, keep: int = 2, writes: bool = True
    ) -> None:
        path = run.path if isinstance(run, RunDirectory) else run
        if not isinstance(path, str | Path) or "\0" in str(path):
            raise WhenceError(f"run is {run!r}; pass the directory's path, a RunDirectory, or None to write nothing.")
        self._directory = run if isinstance(run, RunDirectory) else None
        self.path, self.writes = Path(path).absolute(), writes
        self._is_begun, self._keep, self._clock = self._directory is not None, keep, CheckpointClock(save_every)
        self._seconds, self._versions = dict.fromkeys(("cpu", "wall"), 0.0), dict[str, str]()
        self._reason, self._returns = "", dict[int, float]()
        self._list_texts: Callable[[], Collection[str]] | None = None

    @property
    def directory(self) -> RunDirectory:
        """The directory, once `begin` was called; in a process that does not write, as it is read."""
        return RunDirectory.open(self.path) if self._directory is None else self._directory

    @property
    def saves(self) -> bool:
        """Whether checkpoints are written at all."""
        return self._clock.save_every > 0

    def begin(
        self,
        config: Mapping[str, Any],
        *,
        versions: Mapping[str, str],
        shared: bool = False,
        wait: Callable[[], None] | None = None,
        **choice: Any,
    ) -> Checkpoint | None:
        """Open the directory, and return the checkpoint to continue from, if there is one; see `RunDirectory.begin`.

        `wait` waits for the other processes: all have read by then what the first one may change. `choice` are further
        arguments of `RunDirectory.find_start`.
        """
        self._versions = dict(versions)
        if wait is not None:
            stored = RunDirectory.find_start(self.path, config, **choice)
            wait()
            if not self.writes:
                return None if stored is None else stored.checkpoint
        if self._directory is None:
            options = {"versions": versions, "save_every": self._clock.save_every, "shared": shared}
            self._directory = RunDirectory.begin(self.path, config, **options, **choice)  # type: ignore[arg-type]
            return self._directory.checkpoint
        if not self._is_begun:  # an earlier training of this process began it
            self._directory.check_same(config, but=choice.get("may_change", ()))
        self._directory.hold()
        try:
            if (check := choice.get("check")) is not None:
                check(self._directory.checkpoint)
        except WhenceError:
            self._directory.release()
            raise
        return self._directory.checkpoint

    def continue_after(
        self, checkpoint: Checkpoint, differences: Collection[str] = (), *, is_finished: bool = False
    ) -> None:
        """Take note that the training is where it was after a checkpoint's round.

        `differences` are the reasons why it does not continue as if nothing had happened; changed versions of libraries
        are found here. They are logged now, before anything is trained; of a finished run, too, which was made
        otherwise.
        """
        self._clock.last_round = checkpoint.round
        self._note_returns(self.directory.table("metrics").to_dicts())
        if self._directory is not None:
            self._directory.checkpoint = None
            noted = self._directory.versions  # an older run noted fewer
            versions = {name: version for name, version in self._versions.items() if name in noted}
            self._reason = "; ".join([*differences, *list_changes(noted, versions)])
            if self._reason:
                message = "What is trained after round %d is not as if nothing had happened: %s."
                message = "All %d rounds were made before this changed: %s." if is_finished else message
                log.warning(message, checkpoint.round, self._reason)

    def note_resumption(self) -> None:
        """Add to the run's note "resumed" why the training continues otherwise, if it does; once."""
        reason, self._reason = self._reason, ""
        if reason:
            notes = self.directory.notes.get("resumed", [])
            self.directory.note(resumed=[*notes, {"after_round": self._clock.last_round, "reason": reason}])

    def note_first(self, **entries: Any) -> None:
        """Add those entries to the run's notes that hold something and that an earlier process did not add."""
        if new := {name: value for name, value in entries.items() if value and name not in self.directory.notes}:
            self.directory.note(**new)

    def plan_policies(self, size: int, rounds: int) -> None:
        """Note how many rounds' policies, of `size` bytes each, are kept of so many rounds, unless the run notes it."""
        if POLICIES_EVERY not in self.directory.notes:
            self.directory.note(**{POLICIES_EVERY: max(1, math.ceil(size * rounds / POLICY_BYTES))})

    def plan_vocabulary(self, list_texts: Callable[[], Collection[str]]) -> None:
        """Let the texts of a language model's tokens be written with a round, unless the run has them."""
        self._list_texts = list_texts

    def write_round(
        self,
        number: int,
        records: pl.DataFrame,
        *,
        tables: Mapping[PerRound, pl.DataFrame] | None = None,
        tensors: Mapping[RoundTensors, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Write a round's records, further tables, and tensors, of which those without entries are left out."""
        if not self.writes:
            return
        self.note_resumption()
        if self._list_texts is not None:
            self.directory.prepare_writing()  # else there are the texts of a run that this one replaces
            if RowTable(self.path / VOCABULARY).read().is_empty():
                write_vocabulary(self.path, [*self._list_texts()])
            self._list_texts = None
        for name, each in (tensors or {}).items():
            if each and (name != "policies" or (number - 1) % self.directory.notes.get(POLICIES_EVERY, 1) == 0):
                self.directory.write_policy(number, each, name=name)
        for table_name, table in (tables or {}).items():
            self.directory.write_round(table_name, number, table)
        self.directory.write_round("records", number, records)  # last: a round with records is whole

    def write_file(self, name: RoundTensors, number: int, save: Callable[[Path], None]) -> None:
        """Write a round's file by a function that saves to a path."""
        self.directory.prepare_writing()
        save(self.directory.round_path(name, number))

    def write_rows(self, metrics: Mapping[str, Any], seconds: Seconds) -> None:
        """Write a round's row of metrics, and its seconds with those of the checkpoint before it."""
        if self.writes:
            self.directory.append("metrics", metrics)
            self._note_returns([metrics])
            seconds = {**seconds, "checkpoint": self._seconds}
            self._seconds = dict.fromkeys(("cpu", "wall"), 0.0)
            self.directory.append("timings", {"round": metrics["round"], **flatten_seconds(seconds)})

    def _note_returns(self, rows: Iterable[Mapping[str, Any]]) -> None:
        returns = {row["round"]: row.get("episode_return") for row in rows}
        self._returns |= {number: float(value) for number, value in returns.items() if value is not None}

    def is_due(self, number: int, *, last: bool = False) -> bool:
        """Return whether a checkpoint is to be written after a round; after the `last` one in any case."""
        return self._clock.is_behind(number) if last else self._clock.is_due(number)

    def save_checkpoint(self, number: int, read: Callable[[], Mapping[str, Any]]) -> None:
        """Write the checkpoint after a round; `read` returns the training's state, in every process."""
        clock = Stopwatch()
        with self._clock.time_checkpoint(number):
            content = read()
            if self.writes:
                self.directory.prepare_writing()
                save_checkpoint(self.path, number, content, keep=self._keep, returns=self._returns)
        self._seconds = clock.seconds()

    def end(self) -> None:
        """Let others write the directory."""
        if self._directory is not None:
            self._directory.release()
