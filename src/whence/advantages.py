"""Advantages judged without gradients: TD errors read back from GAE, and Monte-Carlo advantages of visited states."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def follows(starts: NDArray[np.bool_], env_index: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell of each record whether the next one goes on with its episode.

    Args:
        starts: (n,) whether a record is the first of its episode.
        env_index: (n,) environments, each a stretch of consecutive records in the order of time.
    """
    goes_on = np.zeros(len(starts), dtype=bool)
    goes_on[:-1] = ~starts[1:] & (env_index[1:] == env_index[:-1])
    return goes_on


def td_errors(
    advantages: Array, starts: NDArray[np.bool_], env_index: NDArray[np.int64], gamma: float, gae_lambda: float
) -> Array:
    """Return the TD errors that generalised advantage estimates were made of (LDA §C.5).

    `delta_t = A_t - gamma lambda (1 - e_{t+1}) A_{t+1}`, with `e_{t+1}` whether record t + 1 begins an episode; the
    last record of an environment has `delta = A`.

    Args:
        advantages: (n,) as GAE gave them, not normalised.
        starts: see `follows`.
        env_index: see `follows`.
        gamma: discount factor.
        gae_lambda: GAE's lambda.
    """
    following = np.append(advantages[1:], 0.0)
    return advantages - gamma * gae_lambda * np.where(follows(starts, env_index), following, 0.0)


def returns_to_go(
    rewards: Array,
    advantages: Array,
    values: Array,
    starts: NDArray[np.bool_],
    env_index: NDArray[np.int64],
    gamma: float,
) -> Array:
    """Return each record's discounted return to the end of its episode, (n,).

    An episode that the rollout cuts off is continued by the value function: the last advantage of an environment is
    `r + gamma V(s') - V(s)`, where V(s') counts unless the episode has ended, so that adding V(s) gives its return.

    Args:
        rewards: (n,) as SB3 stores them, with the bootstrap of a time limit.
        advantages: (n,) as GAE gave them, not normalised.
        values: (n,) of the states.
        starts: see `follows`.
        env_index: see `follows`.
        gamma: discount factor.
    """
    goes_on = follows(starts, env_index)
    last = np.append(env_index[1:] != env_index[:-1], True)
    found = np.where(last, advantages + values, rewards)
    for at in range(len(found) - 2, -1, -1):
        if goes_on[at]:
            found[at] += gamma * found[at + 1]
    return found


def monte_carlo_advantages(returns: Array, states: NDArray[np.int64], actions: NDArray[np.int64]) -> Array:
    """Return, for each record, the mean return of its state and action minus that of its state (LDA §C.4).

    Args:
        returns: (n,) see `returns_to_go`.
        states: (n,) number of the state.
        actions: (n,) number of the action.
    """

    def group_means(groups: NDArray[np.int64]) -> Array:
        means: Array = np.bincount(groups, weights=returns) / np.maximum(np.bincount(groups), 1)
        return means[groups]

    _, pairs = np.unique(np.stack([states, actions]), axis=1, return_inverse=True)
    _, alone = np.unique(states, return_inverse=True)
    return group_means(pairs.reshape(-1)) - group_means(alone.reshape(-1))
