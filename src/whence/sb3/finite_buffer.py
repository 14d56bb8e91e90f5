"""A rollout buffer without the records that have a number that is not finite."""

from typing import Any

import numpy as np
from jaxtyping import Bool
from stable_baselines3.common.buffers import RolloutBuffer
from torch import Tensor

_ARRAYS = (
    "observations",
    "actions",
    "rewards",
    "returns",
    "episode_starts",
    "values",
    "log_probs",
    "advantages",
    "action_masks",
)


def restart_advantages(buffer: RolloutBuffer) -> None:
    """Compute the advantages that are not finite again, from the end of their episode on.

    SB3 multiplies what follows an episode's end by 0, and 0 times NaN is NaN. So a number that is not finite reaches
    the advantages of all earlier episodes of its environment. Here it reaches those of its own only. The others are
    the numbers that SB3 computes without it. Returns follow.

    Args:
        buffer: a full buffer, not flattened.
    """
    advantages, gamma = buffer.advantages.copy(), buffer.gamma
    for step in reversed(range(buffer.buffer_size - 1)):
        ends = buffer.episode_starts[step + 1].astype(bool)
        next_values = np.where(ends, np.float32(0), buffer.values[step + 1])
        later = np.where(ends, np.float32(0), advantages[step + 1])
        delta = buffer.rewards[step] + gamma * next_values - buffer.values[step]
        again = delta + gamma * buffer.gae_lambda * later
        advantages[step] = np.where(np.isfinite(advantages[step]), advantages[step], again)
    buffer.advantages = advantages
    buffer.returns = advantages + buffer.values


def keep_records(buffer: RolloutBuffer, keep: Bool[Tensor, " n"]) -> None:
    """Leave only some records in a full buffer, as those of one environment, until it is reset or `restore_sizes`.

    Args:
        buffer: a full buffer, not flattened.
        keep: (n,) in the order of the flattened buffer, environment by environment.
    """
    mask = keep.numpy()

    def reduce(array: Any) -> Any:
        if isinstance(array, dict):
            return {key: reduce(part) for key, part in array.items()}
        return array.swapaxes(0, 1).reshape(-1, *array.shape[2:])[mask][:, None]

    rewards = buffer.rewards
    for name in _ARRAYS:
        if getattr(buffer, name, None) is not None:
            setattr(buffer, name, reduce(getattr(buffer, name)))
    if _WHOLE not in vars(buffer):
        setattr(buffer, _WHOLE, (buffer.buffer_size, buffer.n_envs, rewards))

        def reset() -> None:
            restore_sizes(buffer)
            buffer.reset()

        # The next rollout resets the buffer, even if this one's training was interrupted.
        buffer.reset = reset  # type: ignore[method-assign]
    buffer.buffer_size, buffer.n_envs = int(mask.sum()), 1


def restore_sizes(buffer: RolloutBuffer) -> None:
    """Give a buffer the sizes back that it had before `keep_records`."""
    if _WHOLE in vars(buffer):
        buffer.buffer_size, buffer.n_envs, _ = vars(buffer).pop(_WHOLE)
        del buffer.reset  # the instance's, so that the class's is in effect again


def identify_rollout(buffer: RolloutBuffer) -> object:
    """Return an object that is another one for each rollout, and the same before and after `keep_records`."""
    *_, rewards = vars(buffer).get(_WHOLE, (buffer.rewards,))  # SB3 makes a new array for each rollout
    return rewards


_WHOLE = "_whence_whole"
"""The attribute for the sizes and the rewards that a buffer had before `keep_records`."""
