"""Rounds in which no action earned more than another."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from whence.sb3.statistics import original_reward


class FlatRoundDetector:
    """Tells whether a rollout's rewards say anything about its actions.

    They do if two of them differ, or if an episode ended and rewards are not 0, so that a longer one earns another sum.
    Otherwise the rollout is flat: its advantages rest on the values alone, and no reward corrects these. Rewards are
    read before VecNormalize, and before SB3 adds the value of the last state where a time limit cut an episode.
    """

    def __init__(self) -> None:
        self.start_round()

    def start_round(self) -> None:
        """Forget the last round."""
        self._reward: float | None = None
        self._differ = False
        self._ended = False

    def read_step(self, model: Any, variables: Mapping[str, Any]) -> None:
        """Read an environment step.

        Args:
            model: the model that is trained.
            variables: the local variables of `collect_rollouts`.
        """
        rewards = np.asarray(original_reward(model, variables["rewards"]))
        if self._reward is None:
            self._reward = float(rewards[0])
        self._differ |= bool((rewards != self._reward).any())
        infos = zip(variables["dones"], variables["infos"], strict=True)
        self._ended |= any(done and not info.get("TimeLimit.truncated", False) for done, info in infos)

    @property
    def is_flat(self) -> bool:
        """Whether the steps read since the round began tell no action from another."""
        return not self._differ and (self._reward == 0 or not self._ended)
