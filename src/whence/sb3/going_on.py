"""Going on with an interrupted training: which model may do so, and what is put back."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from whence.checkpoints import Checkpoint
from whence.errors import RunDirectoryError
from whence.run_config import list_changes
from whence.runs import RunDirectory
from whence.sb3.contrib import MaskablePPO
from whence.sb3.description import library_versions
from whence.sb3.environments import (
    explain_inexact,
    read_environments,
    restore_environments,
    restore_vec_wrappers,
)
from whence.sb3.model_state import load_model, read_model
from whence.sb3.reset_tracker import ResetTracker
from whence.sb3.state import named_tensors
from whence.sb3.steering import check_steering

log = logging.getLogger("whence")


def check_goes_on(model: Any, run: RunDirectory, checkpoint: Checkpoint) -> None:
    """Refuse a model that does not go on with a run, as `learn()` begins.

    Args:
        model: a model that has learned nothing yet, or the very model that the run trained.
        run: the run.
        checkpoint: its latest checkpoint.

    Raises:
        RunDirectoryError: the run is longer than this `learn()`, or the model has learned something else since.
    """
    content = checkpoint.content["model"]
    done, total, steps = content["counters"]["num_timesteps"], model._total_timesteps, model.n_steps * model.n_envs
    remedy = (
        "Pass overwrite=True to replace the run, choose another directory, or go on with it: "
        "model, callback = whence.sb3.resume(run, env)."
    )
    if model.num_timesteps:
        same = all(tensor.cpu().equal(content["policy"][name]) for name, tensor in named_tensors(model.policy).items())
        if model.num_timesteps != done or not same:
            raise RunDirectoryError(
                f"{run.path} holds a run of {done:,} steps, and this model has learned for {model.num_timesteps:,} "
                f"steps{'' if model.num_timesteps != done else ', otherwise'}. {remedy}"
            )
    if done >= total + steps:
        raise RunDirectoryError(
            f"{run.path} holds a run of {done:,} steps, more than the {total:,} of this learn(). {remedy}"
        )
    if done >= total:
        log.warning("%s holds this run, finished after %d rounds: nothing is trained.", run.path, checkpoint.round)
    elif not model.num_timesteps:
        log.warning(
            "%s: going on after round %d (%s of %s steps).", run.path, checkpoint.round, f"{done:,}", f"{total:,}"
        )


def warn_if_inexact(env: Any) -> None:
    """Say, before training starts, if an interruption would have to begin new episodes, and why."""
    if (reason := explain_inexact(env)) is not None:
        log.warning(
            "If this training is interrupted, it can go on, but with new episodes, and not as if nothing had happened: "
            "%s.",
            reason,
        )


def read_training(model: Any, tracker: ResetTracker) -> dict[str, Any]:
    """Return the state of a model and its environments between two rounds, for a checkpoint."""
    return {"model": read_model(model), "environments": read_environments(model.env, tracker)}


def restore_training(model: Any, tracker: ResetTracker, run: RunDirectory, checkpoint: Checkpoint) -> bool:
    """Put a model and its environments where they were; if that cannot be had exactly, new episodes begin.

    Args:
        model: a model of the run's settings.
        tracker: the tracker of its environments.
        run: the run; in its notes "resumed" lists where training went on with new episodes or another version.
        checkpoint: what to go on from.

    Returns:
        Whether the ongoing episodes go on.

    Raises:
        RunDirectoryError: a `KLController` steered the run, and the same does not steer this model; or the reverse.
    """
    content = checkpoint.content
    check_steering(run.path, content["model"]["steering"], model)
    reason = explain_inexact(model.env)
    if reason is None:
        reason = restore_environments(
            model.env, tracker, content["environments"], masked=isinstance(model, MaskablePPO)
        )
    load_model(model, content["model"])  # last, since environments may draw from global generators
    if reason is not None:
        _begin_episodes(model, tracker, content, checkpoint.round)
    changes = list_changes(run.versions, library_versions())
    if reason is not None or changes:
        _note_resumption(run, checkpoint.round, "; ".join(filter(None, [reason, *changes])))
    return reason is None


def _begin_episodes(model: Any, tracker: ResetTracker, content: Mapping[str, Any], number: int) -> None:
    """Reset the environments, with seeds that the training has not used."""
    env = model.env
    restore_vec_wrappers(env, content["environments"])
    env.seed(int(np.random.SeedSequence([model.seed or 0, number]).generate_state(1)[0] % 2**31))
    model._last_obs = env.reset()
    model._last_episode_starts = np.ones(env.num_envs, dtype=bool)
    if model._vec_normalize_env is not None:
        model._last_original_obs = model._vec_normalize_env.get_original_obs()
    tracker.start(model._last_episode_starts)


def _note_resumption(run: RunDirectory, number: int, reason: str) -> None:
    log.warning("The training goes on after round %d, but not as if nothing had happened: %s.", number, reason)
    run.note(resumed=[*run.notes.get("resumed", []), {"after_round": number, "reason": reason}])
