"""The writer of a training's run directory: rows, and checkpoints when they are due."""

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from whence.core import WhenceError
from whence.runs.checkpoints import Checkpoint, CheckpointClock, save_checkpoint
from whence.runs.config_file import list_changes
from whence.runs.directory import RunDirectory
from whence.runs.stopwatch import Stopwatch, flatten_seconds

log = logging.getLogger("whence")

Seconds = Mapping[str, Mapping[str, float]]
"""Seconds by stage and clock."""


class RunWriter:
    """The writer of one training's run directory; what trains hands over what it has.

    `begin`, then for each round `write_rows` and `save_checkpoint` if `is_due`, then `end`.

    Args:
        run: the directory's path; or a directory that was begun.
        save_every: rounds from one checkpoint to the next; see `CheckpointClock`.
        keep: the number of checkpoints that stay.
    """

    def __init__(self, run: str | Path | RunDirectory, *, save_every: int | None, keep: int = 2) -> None:
        if not isinstance(run, str | Path | RunDirectory):
            raise WhenceError(f"run is {run!r}; pass the directory's path, a RunDirectory, or None to write nothing.")
        self._path, self._keep = run, keep
        self._clock = CheckpointClock(save_every)
        self._directory = run if isinstance(run, RunDirectory) else None
        self._seconds = dict.fromkeys(("cpu", "wall"), 0.0)

    @property
    def directory(self) -> RunDirectory:
        """The directory, once `begin` was called."""
        assert self._directory is not None
        return self._directory

    @property
    def saves(self) -> bool:
        """Whether checkpoints are written at all."""
        return self._clock.save_every > 0

    def begin(
        self,
        config: Mapping[str, Any],
        *,
        versions: Mapping[str, str],
        overwrite: bool = False,
        may_change: Collection[str] = (),
    ) -> Checkpoint | None:
        """Open the directory, or take it up again, and return the checkpoint to go on from, if there is one.

        See `RunDirectory.begin`.
        """
        if self._directory is None:
            assert not isinstance(self._path, RunDirectory)
            self._directory = RunDirectory.begin(
                self._path,
                config,
                versions=versions,
                save_every=self._clock.save_every,
                overwrite=overwrite,
                may_change=may_change,
            )
        elif not isinstance(self._path, RunDirectory):  # an earlier training began it
            self._directory.check_same(config, but=may_change)
        self._directory.hold()
        return self._directory.checkpoint

    def go_on(self, checkpoint: Checkpoint) -> None:
        """Take note that training has been put where it was after a checkpoint's round."""
        self.directory.checkpoint = None
        self._clock.last_round = checkpoint.round

    def note_resumption(self, reasons: Collection[str], versions: Mapping[str, str]) -> None:
        """Log, and add to the run's note "resumed", why training does not go on as if nothing had happened, if so.

        Libraries whose versions have changed since the run began are a reason, besides those that are given.
        """
        number, notes = self._clock.last_round, self.directory.notes.get("resumed", [])
        if reason := "; ".join([*reasons, *list_changes(self.directory.versions, versions)]):
            log.warning("The training goes on after round %d, but not as if nothing had happened: %s.", number, reason)
            self.directory.note(resumed=[*notes, {"after_round": number, "reason": reason}])

    def write_rows(self, metrics: Mapping[str, Any], seconds: Seconds) -> None:
        """Write a round's row of metrics, and its seconds with those of the checkpoint before it."""
        self.directory.append("metrics", metrics)
        seconds = {**seconds, "checkpoint": self._seconds}
        self._seconds = dict.fromkeys(("cpu", "wall"), 0.0)
        self.directory.append("timings", {"round": metrics["round"], **flatten_seconds(seconds)})

    def is_due(self, number: int, *, last: bool = False) -> bool:
        """Return whether a checkpoint is to be written after a round; after the `last` one in any case."""
        return self._clock.is_behind(number) if last else self._clock.is_due(number)

    def save_checkpoint(self, number: int, read: Callable[[], Mapping[str, Any]], *, writes: bool = True) -> None:
        """Write the checkpoint after a round; `read` returns the training's state.

        Of several processes of one training, those that do not write take part in `read`.
        """
        clock = Stopwatch()
        with self._clock.time_checkpoint(number):
            content = read()
            if writes:
                self.directory.check_writer()
                save_checkpoint(self.directory.path, number, content, keep=self._keep)
        self._seconds = clock.seconds()

    def end(self) -> None:
        """Let others write the directory."""
        if self._directory is not None:
            self._directory.release()
