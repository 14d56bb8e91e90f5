"""Episodes of a run counted over its rounds: their numbers, the steps of records in them, and their returns."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

_EPISODES = 100  # last episodes that a round's mean return is of, as in Stable-Baselines3


class EpisodeCounter:
    """Counts the episodes of environments from round to round; `next_id` is the number of the next one to begin."""

    def __init__(self, next_id: int = 0) -> None:
        self.next_id, self._returns = next_id, deque[float](maxlen=_EPISODES)
        # Of each environment: its episode, -1 where its beginning was not seen, its steps so far and their rewards, and
        # whether it has ended.
        self._ids, self._steps = np.zeros((2, 0), int)
        self._sums, self._ended = np.zeros(0), np.zeros(0, bool)

    @property
    def mean_return(self) -> float | None:
        """The mean return of the last hundred whole episodes; None: there was none yet."""
        return float(np.mean(self._returns)) if self._returns else None

    def number(
        self,
        env: NDArray[np.int64],
        begins: NDArray[np.bool_] | None,
        ends: NDArray[np.bool_] | None,
        rewards: NDArray[np.float32] | None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each record's episode, and its step there; -1 where its beginning was not seen.

        Args:
            env: (n,) the environment of each record of a round, sorted.
            begins: (n,) whether the record is the first of its episode; None: an episode begins where the one before
                has ended, and an environment's first one with its first record.
            ends: (n,) whether it is the last; None: episodes end where the next one begins. One of both is needed.
            rewards: (n,), or None.
        """
        missing = max(0, int(env.max(initial=-1)) + 1 - len(self._ids))
        self._ids, self._steps = (np.append(each, np.full(missing, -1)) for each in (self._ids, self._steps))
        self._sums = np.append(self._sums, np.zeros(missing))
        self._ended = np.append(self._ended, np.ones(missing, bool))
        place, first = np.arange(len(env)), np.searchsorted(env, env)
        if begins is None:
            assert ends is not None
            begins = np.where(place == first, self._ended[env], np.append(True, ends[:-1]))
        latest = np.maximum.accumulate(np.where(begins, place, -1))
        is_new = latest >= first
        episode = np.where(is_new, self.next_id + np.cumsum(begins) - 1, self._ids[env])
        step = np.where(is_new, place - latest, np.where(episode < 0, -1, self._steps[env] + place - first))
        last = np.append(env[1:] != env[:-1], True)[: len(env)]
        before = env[:0]  # environments where a beginning tells that the last round's last episode has ended
        if ends is None:
            before = env[begins & (place == first) & ~self._ended[env] & (self._ids[env] >= 0)]
            ends = np.append(begins[1:], False)[: len(env)] & ~last
        if rewards is not None:
            sums = np.append(0.0, np.cumsum(rewards, dtype=np.float64))
            returns = sums[1:] - sums[np.where(is_new, latest, first)] + np.where(is_new, 0.0, self._sums[env])
            self._returns.extend([*self._sums[before].tolist(), *returns[ends & (step >= 0)].tolist()])
            self._sums[env[last]] = returns[last]
        self._ids[env[last]], self._steps[env[last]], self._ended[env[last]] = episode[last], step[last] + 1, ends[last]
        self.next_id += int(begins.sum())
        return episode, step
