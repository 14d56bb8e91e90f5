"""The run directory of `InfluenceCallback`: a training's rounds, and checkpoints to go on from."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from whence.errors import WhenceError
from whence.rounds import RoundRecording
from whence.runs import POLICIES_EVERY, Checkpoint, RunDirectory, RunWriter, Seconds
from whence.sb3.base.model_description import describe, library_versions
from whence.sb3.base.model_tensors import named_tensors
from whence.sb3.checkpoint.restore import check_goes_on, read_training, restore_training, warn_if_inexact
from whence.sb3.episodes.resets import ResetTracker


class TrainingRun:
    """The run directory of a training.

    Args:
        run: its path; or a directory that was begun.
        save_every: rounds from one checkpoint to the next; see `CheckpointClock`.
        overwrite: delete the run that the directory holds, and start anew.

    Raises:
        WhenceError: an argument is not what it should be.
    """

    def __init__(self, run: str | Path | RunDirectory, *, save_every: int | None, overwrite: bool) -> None:
        self._writer, self._overwrite = RunWriter(run, save_every=save_every), overwrite
        self._differences: list[str] | None = None
        self._tracker: ResetTracker | None = None

    @property
    def directory(self) -> RunDirectory:
        """The directory, once `begin` was called."""
        return self._writer.directory

    @property
    def tracker(self) -> ResetTracker:
        """What is noted of the environments, once `begin` was called."""
        assert self._tracker is not None
        return self._tracker

    def begin(self, model: Any, settings: Mapping[str, Any]) -> Checkpoint | None:
        """Open the directory as `learn()` begins, and return the checkpoint to go on from, if there is one.

        Args:
            model: the model, whose environments have been reset.
            settings: how records are scored and selected, in JSON types.

        Raises:
            RunDirectoryError: see `RunDirectory.begin` and `check_goes_on`.
        """
        config = {**describe(model), **settings}
        checkpoint = self._writer.begin(config, versions=library_versions(), overwrite=self._overwrite)
        run = self.directory
        try:
            if checkpoint is not None:
                check_goes_on(model, run, checkpoint)
            elif POLICIES_EVERY not in run.notes:
                note_policy_interval(run, model)
        except WhenceError:
            run.release()
            raise
        if self._tracker is None or self._tracker.vec_env is not model.env:
            self._tracker = ResetTracker(model.env)
        self._tracker.wrap()
        if self._writer.saves:
            warn_if_inexact(model.env)
        return checkpoint

    def go_on(self, model: Any, checkpoint: Checkpoint) -> bool:
        """Put a model and its environments where they were; return whether the ongoing episodes go on."""
        self._writer.go_on(checkpoint)
        reason = restore_training(model, self.tracker, self.directory, checkpoint)
        self._differences = [] if reason is None else [reason]
        return reason is None

    def note_resumption(self) -> None:
        """Note, as a round begins, that training goes on otherwise than without the interruption, if it does."""
        if self._differences is not None:
            self._writer.note_resumption(self._differences, library_versions())
            self._differences = None

    def write_round(self, number: int, records: pl.DataFrame, model: Any) -> None:
        """Write a round before its training: records with digests of their observations, episodes, and the policy.

        Args:
            number: the round, from 1.
            records: a row for each record, in the order of the flattened buffer.
            model: the model, not yet trained on the round.
        """
        digests = pl.Series("observation_digest", self.tracker.take_digests(), dtype=pl.UInt64)
        if digests.count():
            records = records.with_columns(digests)
        self.directory.write_round("records", number, records)
        self.directory.write_round("episodes", number, _list_episodes(records, self.tracker))
        if (number - 1) % self.directory.notes.get(POLICIES_EVERY, 1) == 0:
            self.directory.write_policy(number, named_tensors(model.policy))

    def write_recording(self, recording: RoundRecording) -> None:
        """Write what a round's training did."""
        recording.save(self.directory.round_path("recordings", recording.number))

    def end_round(
        self,
        metrics: Mapping[str, Any],
        seconds: Seconds,
        model: Any,
        callback: Mapping[str, Any],
    ) -> None:
        """Write a round's rows after its training, and a checkpoint if one is due.

        Args:
            metrics: the round's row.
            seconds: by stage and clock.
            model: the trained model.
            callback: the callback's own state, for the checkpoint.
        """
        self._writer.write_rows(metrics, seconds)
        if self._writer.is_due(metrics["round"]):
            self._save_checkpoint(metrics["round"], model, callback)

    def _save_checkpoint(self, number: int, model: Any, callback: Mapping[str, Any]) -> None:
        self._writer.save_checkpoint(number, lambda: {"callback": callback, **read_training(model, self.tracker)})

    def end(self, number: int, model: Any, callback: Mapping[str, Any] | None) -> None:
        """Write the trained policy, and the last round's checkpoint if it has none; let others write the directory.

        Args:
            number: the rounds done.
            model: the trained model.
            callback: the callback's own state; None: training was ended inside a round, which no checkpoint holds.
        """
        self.directory.write_policy(number + 1, named_tensors(model.policy))
        if callback is not None and self._writer.is_due(number, last=True):
            self._save_checkpoint(number, model, callback)
        self.tracker.unwrap()
        self._writer.end()


POLICY_BYTES = 2**29
"""Bytes that a run's policies may take; of larger ones, those of every second round are kept, or of fewer."""


def note_policy_interval(run: RunDirectory, model: Any) -> None:
    """Note in a run that begins how many rounds lie between the policies it keeps, so that they fit `POLICY_BYTES`.

    Args:
        run: the directory, without a round.
        model: the model, whose total of steps is known.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in named_tensors(model.policy).values())
    rounds = math.ceil(model._total_timesteps / (model.n_steps * model.n_envs))
    run.note(**{POLICIES_EVERY: max(1, math.ceil(size * rounds / POLICY_BYTES))})


def _list_episodes(records: pl.DataFrame, resets: ResetTracker) -> pl.DataFrame:
    """Return a row for each episode that began in a round, with the generator state before its reset."""
    episodes = records.filter("episode_start").select("episode_id", "env_index")
    states = [resets.take_state(env) for env in episodes["env_index"]]
    return episodes.with_columns(pl.Series("generator_state", states, dtype=pl.String))
