"""The episode that a record belongs to, and the generator state needed to play it again."""

import json
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from whence.records import UNKNOWN

STATE = "whence_generator_state"
"""The key of a reset's info under which `RecordResets` puts the generator's state."""


@dataclass(frozen=True)
class Ongoing:
    """The ongoing episode of each environment, between two rollouts.

    Attributes:
        ids: (envs,) the number of each environment's episode, -1 where unknown.
        lengths: (envs,) the number of records it has so far, -1 where unknown.
        next_id: the number of the next episode to begin.
    """

    ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    next_id: int = 0

    @classmethod
    def unknown(cls, envs: int) -> "Ongoing":
        """Return ongoing episodes of which nothing is known."""
        return cls(np.full(envs, UNKNOWN), np.full(envs, UNKNOWN))


def number_episodes(
    starts: NDArray[np.bool_], before: Ongoing | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], Ongoing]:
    """Number the episodes of a rollout, environment by environment, and each record's step in its episode.

    Args:
        starts: (steps, envs) True where a record is the first of its episode.
        before: the episodes that were ongoing when the rollout began; None: unknown.

    Returns:
        Episode ids (steps, envs); each record's step in its episode (steps, envs), -1 if the episode's beginning was
        not seen; and the episodes that are ongoing at the end.
    """
    length, envs = starts.shape
    before = before or Ongoing.unknown(envs)
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
    return ids, steps, Ongoing(ids[-1], lengths, next_id)


class RecordResets(gym.Wrapper[Any, Any, Any, Any]):
    """Put the state of the environment's generator before each reset into the reset's info, as JSON.

    With the episode's actions that is enough to play it again, if the environment's dynamics depend on nothing else
    (BipedalWalker's do: its reset reuses the Box2D world). The environment's randomness is unchanged.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset; the info holds the generator's state before, or the seed if there is one."""
        before = {"seed": seed} if seed is not None else self.env.unwrapped.np_random.bit_generator.state
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, {**info, STATE: json.dumps(before)}
