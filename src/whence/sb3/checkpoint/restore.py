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
from whence.sb3.base import begin_episodes, load_tensors, named_tensors
from whence.sb3.contrib import MaskablePPO
from whence.sb3.episodes.environment_state import (
    explain_inexact,
    is_plain,
    restore_environments,
    restore_vec_wrappers,
)
from whence.sb3.episodes.resets import ResetTracker

log = logging.getLogger("whence")

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
    load_model(model, content["model"])  # last, since environments may draw from global generators
    if reason is not None:
        restore_vec_wrappers(env, content["environments"])
        # Seeds that the training has not used.
        env.seed(int(np.random.SeedSequence([model.seed or 0, checkpoint.round]).generate_state(1)[0] % 2**31))
        begin_episodes(model)
        tracker.start(model._last_episode_starts)
    return reason
