"""The run directory of `InfluenceCallback`: a training's rounds, and checkpoints to go on from."""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from sb3_contrib import MaskablePPO
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from torch import Tensor

from whence.core import RunDirectoryError, WhenceError, load_rng_state, read_rng_state
from whence.rounds.recording import RoundRecording
from whence.runs import POLICIES_EVERY, Checkpoint, RunDirectory, RunWriter, Seconds, choose_policy_interval
from whence.sb3.base import begin_episodes, describe, library_versions, load_tensors, named_tensors, wrap_next
from whence.sb3.episodes import (
    ResetTracker,
    accept_resets,
    explain_inexact,
    is_plain,
    read_environments,
    restore_environments,
    restore_vec_wrappers,
)

log = logging.getLogger("whence")


NAMES = "names.actions", "names.observations"
"""The settings that may be others when a training goes on: they are only shown."""


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

        `settings` say how records are scored and selected, in JSON types. The model's environments have been reset.

        Raises:
            RunDirectoryError: see `RunDirectory.begin` and `check_goes_on`.
        """
        config = {**describe(model), **settings}
        # In a further learn(), the wrappers' attributes may have changed since they were described.
        may_change = (*NAMES, *(("env_wrappers", "other_env_wrappers") if hasattr(self, "tracker") else ()))
        checkpoint = self.begin(config, versions=library_versions(), overwrite=self._overwrite, may_change=may_change)
        run = self.directory
        try:
            if checkpoint is not None:
                check_goes_on(model, run, checkpoint)
            elif POLICIES_EVERY not in run.notes:
                size = sum(tensor.nbytes for tensor in named_tensors(model.policy).values())
                rounds = math.ceil(model._total_timesteps / (model.n_steps * model.n_envs))
                run.note(**{POLICIES_EVERY: choose_policy_interval(size, rounds)})
        except WhenceError:
            run.release()
            raise
        if not hasattr(self, "tracker") or self.tracker.vec_env is not model.env:
            self.tracker = ResetTracker(model.env)
        with self.tracker.wrapped():
            reason = explain_inexact(model.env) if self.saves else None
        if reason is not None:
            log.warning(
                "If this training is interrupted, it can go on, but with new episodes, and not as if nothing had "
                "happened: %s.",
                reason,
            )
        return checkpoint

    def restore(self, model: Any, checkpoint: Checkpoint) -> bool:
        """Put a model and its environments where they were; return whether the ongoing episodes go on."""
        self.go_on(checkpoint)
        with self.tracker.wrapped():
            reason = restore_training(model, self.tracker, checkpoint)
        self._differences = [] if reason is None else [reason]
        return reason is None

    def record_next_rollout(self, model: Any) -> None:
        """Let a model's environments note how their episodes begin, during the next rollout and no longer."""

        def record(collect: Callable[[], bool]) -> bool:
            with self.tracker.wrapped():
                return collect()

        wrap_next(model, "collect_rollouts", record)

    def note_differences(self) -> None:
        """Note, as a round begins, that training goes on otherwise than without the interruption, if it does."""
        if self._differences is not None:
            self.note_resumption(self._differences, library_versions())
            self._differences = None

    def write_round(
        self,
        number: int,
        records: pl.DataFrame,
        statistics: Mapping[str, Tensor],
        lstm_states: Mapping[str, Tensor],
        model: Any,
    ) -> None:
        """Write a round before its training: records with digests of their observations, episodes, and the policy.

        `statistics` are VecNormalize's, see `load_statistics`, and `lstm_states` those of a recurrent policy before
        the first step, see `History`; empty if there are none.
        """
        digests = pl.Series("observation_digest", self.tracker.take_digests(), dtype=pl.UInt64)
        if digests.count():
            records = records.with_columns(digests)
        episodes = records.filter("episode_start").select("episode_id", "env_index")
        states = [self.tracker.take_state(env) for env in episodes["env_index"]]
        episodes = episodes.with_columns(pl.Series("generator_state", states, dtype=pl.String))
        if (number - 1) % self.directory.notes.get(POLICIES_EVERY, 1) == 0:
            self.directory.write_policy(number, named_tensors(model.policy))
        if statistics:
            self.directory.write_policy(number, statistics, name="statistics")
        if lstm_states:
            self.directory.write_policy(number, lstm_states, name="states")
        self.directory.write_round("episodes", number, episodes)
        self.directory.write_round("records", number, records)  # last: a round with records is whole

    def write_recording(self, recording: RoundRecording) -> None:
        """Write what a round's training did."""
        self.directory.check_writer()
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

        The callback's own state is None if training was ended inside a round, which no checkpoint holds.
        """
        self.directory.write_policy(number + 1, named_tensors(model.policy))
        if callback is not None and self.is_due(number, last=True):
            self._save(number, model, callback)
        self.end()


_COUNTERS = "num_timesteps", "_episode_num", "_n_updates", "_current_progress_remaining"
_OBSERVED = "_last_obs", "_last_original_obs", "_last_episode_starts"
_NOISE = "exploration_mat", "exploration_matrices"


def read_model(model: Any) -> dict[str, Any]:
    """Return the state of a model between `train()` and the next rollout, for a checkpoint.

    It holds parameters and buffers, the optimiser, gSDE's matrices, counters, the present observations, and the
    statistics of the last episodes, but no settings and no environments.
    """
    optimizer = model.policy.optimizer.state_dict()
    noise = {name: getattr(model.policy.action_dist, name, None) for name in _NOISE} if model.use_sde else {}
    return {
        "policy": named_tensors(model.policy),
        "optimizer": {
            "state": {str(index): dict(state) for index, state in optimizer["state"].items()},
            "groups": optimizer["param_groups"],
        },
        "noise": noise,
        "counters": {name: getattr(model, name) for name in _COUNTERS},
        "total_timesteps": model._total_timesteps,
        "observed": {name: getattr(model, name) for name in _OBSERVED},
        "lstm_states": getattr(model, "_last_lstm_states", None),
        "episodes": [_to_plain_dict(episode) for episode in model.ep_info_buffer or ()],
        "successes": [bool(success) for success in model.ep_success_buffer or ()],
        "generators": read_rng_state(),
    }


def restore_model(model: Any, content: Mapping[str, Any]) -> None:
    """Put a model, and the global generators, into the state that `read_model` returned."""
    load_tensors(named_tensors(model.policy), content["policy"])
    optimizer = model.policy.optimizer
    state = {int(index): dict(values) for index, values in content["optimizer"]["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": content["optimizer"]["groups"]})
    for name, matrix in content["noise"].items():
        setattr(model.policy.action_dist, name, matrix.to(model.device) if isinstance(matrix, Tensor) else matrix)
    for name, value in {**content["counters"], **content["observed"]}.items():
        setattr(model, name, value)
    if (states := content.get("lstm_states")) is not None:
        model._last_lstm_states = RNNStates(*(tuple(each.to(model.device) for each in pair) for pair in states))
    model.ep_info_buffer = deque(content["episodes"], maxlen=model._stats_window_size)
    model.ep_success_buffer = deque(content["successes"], maxlen=model._stats_window_size)
    load_rng_state(content["generators"])


def _to_plain_dict(episode: Mapping[str, Any]) -> dict[str, Any]:
    """Return an episode's statistics, with text in place of what a checkpoint does not hold."""
    return {str(name): value if is_plain(value) else str(value) for name, value in episode.items()}


def check_goes_on(model: Any, run: RunDirectory, checkpoint: Checkpoint) -> None:
    """Refuse a model that does not go on with a run, as `learn()` begins.

    Raises:
        RunDirectoryError: the run is longer than this `learn()`, or the model has learned something else since.
    """
    content = checkpoint.content["model"]
    done, total, steps = content["counters"]["num_timesteps"], model._total_timesteps, model.n_steps * model.n_envs
    is_same, learns = holds_policy(model, checkpoint), checkpoint.content["callback"]["learns"]
    wrong = None
    if learns > 1 and not is_same:
        wrong = f"{learns} calls of learn(), and a script that starts over would go on in its first"
    elif model.num_timesteps and not (model.num_timesteps == done and is_same):
        wrong = f"{done:,} steps, and this model has learned otherwise, for {model.num_timesteps:,} steps"
    elif done >= total + steps:
        wrong = f"{done:,} steps, more than the {total:,} of this learn()"
    if wrong is not None:
        raise RunDirectoryError(
            f"{run.path} holds a run of {wrong}. Pass overwrite=True to replace the run, choose another directory, or "
            "go on with it: model, callback = whence.sb3.resume(run, env)."
        )
    if done >= total:
        log.warning("%s holds this run, finished after %d rounds: nothing is trained.", run.path, checkpoint.round)
    elif not model.num_timesteps:
        log.warning(
            "%s: going on after round %d (%s of %s steps).", run.path, checkpoint.round, f"{done:,}", f"{total:,}"
        )


def holds_policy(model: Any, checkpoint: Checkpoint) -> bool:
    """Return whether a model has a checkpoint's policy: it is the model that was trained, or `resume` returned it."""
    policy = checkpoint.content["model"]["policy"]
    return all(tensor.cpu().equal(policy[name]) for name, tensor in named_tensors(model.policy).items())


def restore_training(model: Any, tracker: ResetTracker, checkpoint: Checkpoint) -> str | None:
    """Put a model and its environments where they were; if that cannot be had exactly, new episodes begin.

    Returns:
        Why new episodes begin; None: the ongoing episodes go on.
    """
    content, env = checkpoint.content, model.env
    reason = explain_inexact(env)
    if reason is None:
        reason = restore_environments(env, tracker, content["environments"], masked=isinstance(model, MaskablePPO))
    restore_model(model, content["model"])  # last, since environments may draw from global generators
    if reason is not None:
        restore_vec_wrappers(env, content["environments"])
        # Seeds that the training has not used.
        env.seed(int(np.random.SeedSequence([model.seed or 0, checkpoint.round]).generate_state(1)[0] % 2**31))
        accept_resets(env)
        begin_episodes(model)
        tracker.start(model._last_episode_starts)
    return reason
