"""The run directory of `InfluenceCallback`: a training's rounds, and checkpoints to go on from."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from whence.errors import WhenceError
from whence.rounds import RoundRecording
from whence.runs import POLICIES_EVERY, Checkpoint, RunDirectory, RunWriter, Seconds
from whence.sb3.base import describe, library_versions, named_tensors
from whence.sb3.checkpoint.restore import check_goes_on, read_model, restore_training
from whence.sb3.episodes.environment_state import explain_inexact, read_environments
from whence.sb3.episodes.resets import ResetTracker

POLICY_BYTES = 2**29
"""Bytes that a run's policies may take; of larger ones, those of every second round are kept, or of fewer."""

log = logging.getLogger("whence")


class TrainingRun(RunWriter):
    """The run directory of a training, whose environments a `tracker` follows once it is open.

    Args:
        run: its path; or a directory that was begun.
        save_every: rounds from one checkpoint to the next; see `CheckpointClock`.
        overwrite: delete the run that the directory holds, and start anew.
    """

    tracker: ResetTracker

    def __init__(self, run: str | Path | RunDirectory, *, save_every: int | None, overwrite: bool) -> None:
        super().__init__(run, save_every=save_every)
        self._overwrite = overwrite
        self._differences: list[str] | None = None

    def open(self, model: Any, settings: Mapping[str, Any]) -> Checkpoint | None:
        """Open the directory as `learn()` begins, and return the checkpoint to go on from, if there is one.

        Args:
            model: the model, whose environments have been reset.
            settings: how records are scored and selected, in JSON types.

        Raises:
            RunDirectoryError: see `RunDirectory.begin` and `check_goes_on`.
        """
        config = {**describe(model), **settings}
        checkpoint = self.begin(config, versions=library_versions(), overwrite=self._overwrite)
        run = self.directory
        try:
            if checkpoint is not None:
                check_goes_on(model, run, checkpoint)
            elif POLICIES_EVERY not in run.notes:
                size = sum(tensor.nbytes for tensor in named_tensors(model.policy).values())
                rounds = math.ceil(model._total_timesteps / (model.n_steps * model.n_envs))
                run.note(**{POLICIES_EVERY: max(1, math.ceil(size * rounds / POLICY_BYTES))})
        except WhenceError:
            run.release()
            raise
        if not hasattr(self, "tracker") or self.tracker.vec_env is not model.env:
            self.tracker = ResetTracker(model.env)
        self.tracker.wrap()
        if self.saves and (reason := explain_inexact(model.env)) is not None:
            log.warning(
                "If this training is interrupted, it can go on, but with new episodes, and not as if nothing had "
                "happened: %s.",
                reason,
            )
        return checkpoint

    def restore(self, model: Any, checkpoint: Checkpoint) -> bool:
        """Put a model and its environments where they were; return whether the ongoing episodes go on."""
        self.go_on(checkpoint)
        reason = restore_training(model, self.tracker, checkpoint)
        self._differences = [] if reason is None else [reason]
        return reason is None

    def note_differences(self) -> None:
        """Note, as a round begins, that training goes on otherwise than without the interruption, if it does."""
        if self._differences is not None:
            self.note_resumption(self._differences, library_versions())
            self._differences = None

    def write_round(self, number: int, records: pl.DataFrame, model: Any) -> None:
        """Write a round before its training: records with digests of their observations, episodes, and the policy."""
        digests = pl.Series("observation_digest", self.tracker.take_digests(), dtype=pl.UInt64)
        if digests.count():
            records = records.with_columns(digests)
        episodes = records.filter("episode_start").select("episode_id", "env_index")
        states = [self.tracker.take_state(env) for env in episodes["env_index"]]
        episodes = episodes.with_columns(pl.Series("generator_state", states, dtype=pl.String))
        self.directory.write_round("records", number, records)
        self.directory.write_round("episodes", number, episodes)
        if (number - 1) % self.directory.notes.get(POLICIES_EVERY, 1) == 0:
            self.directory.write_policy(number, named_tensors(model.policy))

    def write_recording(self, recording: RoundRecording) -> None:
        """Write what a round's training did."""
        recording.save(self.directory.round_path("recordings", recording.number))

    def end_round(self, metrics: Mapping[str, Any], seconds: Seconds, model: Any, callback: Mapping[str, Any]) -> None:
        """Write a round's rows after its training, and a checkpoint, with the callback's own state, if one is due."""
        self.write_rows(metrics, seconds)
        if self.is_due(metrics["round"]):
            self._save(metrics["round"], model, callback)

    def _save(self, number: int, model: Any, callback: Mapping[str, Any]) -> None:
        self.save_checkpoint(
            number,
            lambda: {
                "callback": callback,
                "model": read_model(model),
                "environments": read_environments(model.env, self.tracker),
            },
        )

    def end_training(self, number: int, model: Any, callback: Mapping[str, Any] | None) -> None:
        """Write the trained policy, and the last round's checkpoint if it has none; let others write the directory.

        Args:
            number: the rounds done.
            model: the trained model.
            callback: the callback's own state; None: training was ended inside a round, which no checkpoint holds.
        """
        self.directory.write_policy(number + 1, named_tensors(model.policy))
        if callback is not None and self.is_due(number, last=True):
            self._save(number, model, callback)
        self.tracker.unwrap()
        self.end()
