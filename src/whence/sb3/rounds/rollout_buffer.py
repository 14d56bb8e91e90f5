"""SB3's rollout: the buffer read as records, with the episodes that they belong to."""

import copy
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.utils import is_masking_supported
from stable_baselines3.common.buffers import RolloutBuffer
from torch import Tensor

from whence.core import UNKNOWN, InvalidRecords, RecordBatch, Tree, WhenceError, map_tree
from whence.sb3.models.recurrent import STATES, add_history
from whence.sb3.models.supported_models import check_model


@dataclass(frozen=True)
class Ongoing:
    """The ongoing episode of each environment, between two rollouts.

    Attributes:
        ids: (envs,) the number of each environment's episode, -1 where unknown.
        lengths: (envs,) the number of records it has so far, -1 where unknown.
        next_id: the number of the next episode to begin.
        first_record: the id of the record at SB3's step 0, which is not 0 after a `learn()` that reset the count.
    """

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    next_id: int = 0
    first_record: int = 0

    @classmethod
    def unknown(cls, envs: int, next_id: int = 0, first_record: int = 0) -> "Ongoing":
        """Return ongoing episodes of which nothing is known."""
        return cls(np.full(envs, UNKNOWN), np.full(envs, UNKNOWN), next_id, first_record)


def snapshot(model: Any) -> RecordBatch:
    """Return the rollout that a model has just collected, before `train()` reads it.

    Records are ordered environment by environment, as in the flattened buffer. A record's id is the time step at which
    it was collected, counted over all environments since learning began. Rewards include the bootstrap at a time limit,
    as in SB3.

    Args:
        model: a PPO, A2C, MaskablePPO or RecurrentPPO, inside `on_rollout_end` (or after `collect_rollouts`).

    Raises:
        Unsupported: another algorithm, policy or buffer.
        InvalidRecords: the buffer is not full, or `train()` has flattened it.
    """
    check_model(model)
    return read_buffer(model, model.rollout_buffer)[0]


def collect(model: Any) -> RecordBatch:
    """Collect one rollout with the model's environment and return its records; nothing is trained.

    The environment, the model's count of steps and the random generators advance, as in any rollout. The model's own
    buffer stays as it is.

    Args:
        model: a PPO, A2C, MaskablePPO or RecurrentPPO, with an environment.

    Raises:
        Unsupported: another algorithm, policy or buffer.
        WhenceError: the model has no environment.
    """
    check_model(model)
    if model.env is None:
        raise WhenceError("The model has no environment to collect from; give it one with model.set_env(env).")
    if model._last_obs is None:
        begin_episodes(model)
    if model.ep_info_buffer is None:
        model.ep_info_buffer, model.ep_success_buffer = (deque(maxlen=model._stats_window_size) for _ in range(2))
    callback = model._init_callback(None)
    buffer = copy.deepcopy(model.rollout_buffer)
    # A MaskablePPO does not store whether it trains with masks; by default, learn() uses them.
    masked = {"use_masking": is_masking_supported(model.env)} if isinstance(model, MaskablePPO) else {}
    model.collect_rollouts(model.env, callback, buffer, n_rollout_steps=model.n_steps, **masked)
    return read_buffer(model, buffer)[0]


def read_buffer(model: Any, buffer: RolloutBuffer, ongoing: Ongoing | None = None) -> tuple[RecordBatch, Ongoing]:
    """Return the records of a full buffer, and the episodes that are ongoing at its end.

    `ongoing` are the episodes that were ongoing when the rollout began; None: unknown.

    Raises:
        InvalidRecords: the buffer is not full, or `train()` has flattened it.
        NonFinite: a number is not finite.
    """
    if not buffer.full:
        raise InvalidRecords(
            f"The rollout buffer holds {buffer.pos} of {buffer.buffer_size} steps, so its advantages are not there "
            "yet. Call snapshot(model) in a callback's on_rollout_end, or use whence.sb3.collect(model)."
        )
    if buffer.generator_ready:
        raise InvalidRecords(
            "The rollout buffer has been flattened by train(), and the policy is no longer the one that collected it. "
            "Call snapshot(model) before train(), in a callback's on_rollout_end, or use whence.sb3.collect(model)."
        )
    steps, envs = buffer.buffer_size, buffer.n_envs
    ongoing = ongoing or Ongoing.unknown(envs)
    first = ongoing.first_record + model.num_timesteps - steps * envs
    actions = _flatten(buffer.actions)
    observations: Tree = map_tree(_flatten, buffer.observations)
    if isinstance(model.action_space, spaces.Discrete):
        actions = actions.reshape(-1)
    if isinstance(model.observation_space, spaces.Discrete):
        observations = observations.reshape(-1)
    masks = getattr(buffer, "action_masks", None)
    episode_ids, positions, ongoing = number_episodes(buffer.episode_starts.astype(bool), ongoing)
    records = RecordBatch(
        observations=observations,
        actions=actions,
        log_probs=_flatten(buffer.log_probs),
        values=_flatten(buffer.values),
        advantages=_flatten(buffer.advantages),
        returns=_flatten(buffer.returns),
        rewards=_flatten(buffer.rewards),
        episode_starts=_flatten(buffer.episode_starts),
        record_ids=first + _flatten(np.arange(steps * envs).reshape(steps, envs)),
        env_index=torch.arange(envs).repeat_interleave(steps),
        episode_ids=_flatten(episode_ids),
        steps=_flatten(positions),
        action_masks=None if masks is None else _flatten(masks),
        gamma=buffer.gamma,
        gae_lambda=buffer.gae_lambda,
    )
    if hasattr(buffer, STATES[0]):
        states = {name: torch.from_numpy(getattr(buffer, name)[0].swapaxes(0, 1).copy()) for name in STATES}
        records = add_history(records, states)
    return records, ongoing


def _flatten(array: Any) -> Tensor:
    """Reshape (steps, envs, ...) to (envs * steps, ...), environment by environment, as SB3 flattens."""
    return torch.from_numpy(array.swapaxes(0, 1).reshape(-1, *array.shape[2:]))


def number_episodes(starts: NDArray[np.bool_], before: Ongoing) -> tuple[NDArray[np.int64], NDArray[np.int64], Ongoing]:
    """Number the episodes of a rollout, environment by environment, and each record's step in its episode.

    Args:
        starts: (steps, envs) True where a record is the first of its episode.
        before: the episodes that were ongoing when the rollout began.

    Returns:
        Episode ids (steps, envs); each record's step in its episode (steps, envs), -1 if its beginning was not seen;
        and the episodes that are ongoing at the end.
    """
    length, envs = starts.shape
    ids, steps = np.empty(starts.shape, np.int64), np.empty(starts.shape, np.int64)
    rows, next_id = np.arange(length), before.next_id
    for env in range(envs):
        begun_so_far = starts[:, env].cumsum()
        current = int(before.ids[env])
        if begun_so_far[0] == 0 and current == UNKNOWN:
            current, next_id = next_id, next_id + 1
        ids[:, env] = np.where(begun_so_far == 0, current, next_id + begun_so_far - 1)
        next_id += int(begun_so_far[-1])
        first_row = np.maximum.accumulate(np.where(starts[:, env], rows, -1))
        continued = rows + before.lengths[env] if before.lengths[env] != UNKNOWN else UNKNOWN
        steps[:, env] = np.where(first_row >= 0, rows - first_row, continued)
    lengths = np.where(steps[-1] == UNKNOWN, UNKNOWN, steps[-1] + 1)
    return ids, steps, Ongoing(ids[-1], lengths, next_id, before.first_record)


def begin_episodes(model: Any) -> None:
    """Reset a model's environments, as `learn()` does."""
    model._last_obs = model.env.reset()
    model._last_episode_starts = np.ones(model.env.num_envs, dtype=bool)
    if model._vec_normalize_env is not None:
        model._last_original_obs = model._vec_normalize_env.get_original_obs()
