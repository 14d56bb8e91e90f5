"""A training between two rounds: read for a checkpoint, and restored in a model that was built alike."""

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from whence.errors import RunDirectoryError
from whence.guards import load_rng_state, read_rng_state
from whence.runs import Checkpoint, RunDirectory
from whence.sb3.base.model_tensors import load_tensors, named_tensors
from whence.sb3.base.rollout_buffer import begin_episodes
from whence.sb3.contrib import MaskablePPO
from whence.sb3.episodes.environment_state import (
    accept_resets,
    explain_inexact,
    read_environments,
    restore_environments,
    restore_vec_wrappers,
)
from whence.sb3.episodes.resets import ResetTracker
from whence.sb3.episodes.wrapper_attributes import is_plain

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
        "episodes": [_to_plain_dict(episode) for episode in model.ep_info_buffer or ()],
        "successes": [bool(success) for success in model.ep_success_buffer or ()],
        "generators": read_rng_state(),
    }


def load_model(model: Any, content: Mapping[str, Any]) -> None:
    """Put a model, and the global generators, into the state that `read_model` returned."""
    load_tensors(named_tensors(model.policy), content["policy"])
    optimizer = model.policy.optimizer
    state = {int(index): dict(values) for index, values in content["optimizer"]["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": content["optimizer"]["groups"]})
    for name, matrix in content["noise"].items():
        setattr(model.policy.action_dist, name, matrix.to(model.device) if isinstance(matrix, Tensor) else matrix)
    for name, value in {**content["counters"], **content["observed"]}.items():
        setattr(model, name, value)
    model.ep_info_buffer = deque(content["episodes"], maxlen=model._stats_window_size)
    model.ep_success_buffer = deque(content["successes"], maxlen=model._stats_window_size)
    load_rng_state(content["generators"])


def _to_plain_dict(episode: Mapping[str, Any]) -> dict[str, Any]:
    """Return an episode's statistics, with text in place of what a checkpoint does not hold."""
    return {str(name): value if is_plain(value) else str(value) for name, value in episode.items()}


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
    learns = checkpoint.content["callback"]["learns"]
    if learns > 1 and not holds_policy(model, checkpoint):
        raise RunDirectoryError(
            f"{run.path} holds a run of {learns} calls of learn(), and a script that starts over would go on with the "
            f"last of them in its first. {remedy}"
        )
    if model.num_timesteps and (model.num_timesteps != done or not holds_policy(model, checkpoint)):
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


def holds_policy(model: Any, checkpoint: Checkpoint) -> bool:
    """Return whether a model has a checkpoint's policy: it is the model that was trained, or `resume` returned it."""
    policy = checkpoint.content["model"]["policy"]
    return all(tensor.cpu().equal(policy[name]) for name, tensor in named_tensors(model.policy).items())


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


def restore_training(model: Any, tracker: ResetTracker, run: RunDirectory, checkpoint: Checkpoint) -> str | None:
    """Put a model and its environments where they were; if that cannot be had exactly, new episodes begin.

    Args:
        model: a model of the run's settings.
        tracker: the tracker of its environments.
        run: the run.
        checkpoint: what to go on from.

    Returns:
        Why new episodes begin; None: the ongoing episodes go on.
    """
    content = checkpoint.content
    reason = explain_inexact(model.env)
    if reason is None:
        reason = restore_environments(
            model.env, tracker, content["environments"], masked=isinstance(model, MaskablePPO)
        )
    load_model(model, content["model"])  # last, since environments may draw from global generators
    if reason is not None:
        _begin_episodes(model, tracker, content, checkpoint.round)
    return reason


def _begin_episodes(model: Any, tracker: ResetTracker, content: Mapping[str, Any], number: int) -> None:
    """Reset the environments, with seeds that the training has not used."""
    env = model.env
    restore_vec_wrappers(env, content["environments"])
    env.seed(int(np.random.SeedSequence([model.seed or 0, number]).generate_state(1)[0] % 2**31))
    accept_resets(env)
    begin_episodes(model)
    tracker.start(model._last_episode_starts)
