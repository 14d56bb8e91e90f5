"""A model between two rounds: read for a checkpoint, and loaded into a model that was built alike."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from whence.guards import load_rng_state, read_rng_state
from whence.sb3.base.model_tensors import load_tensors, named_tensors
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
