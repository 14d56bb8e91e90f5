"""TD errors from generalised advantage estimates, returns to go, and Monte-Carlo advantages of visited states."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def continues(starts: NDArray[np.bool_], env_index: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each record's episode continues with the next record, (n,).

    Args:
        starts: (n,) whether a record is the first of its episode.
        env_index: (n,) the record's environment; an environment's records are consecutive and in the order of time.
    """
    continued = np.zeros(len(starts), dtype=bool)
    continued[:-1] = ~starts[1:] & (env_index[1:] == env_index[:-1])
    return continued


def td_errors(
    advantages: Array, starts: NDArray[np.bool_], env_index: NDArray[np.int64], gamma: float, gae_lambda: float
) -> Array:
    """Return the TD errors, (n,), from which generalised advantage estimates were computed (LDA §C.5).

    `delta_t = A_t - gamma lambda (1 - e_{t+1}) A_{t+1}`, with `e_{t+1}` whether record t + 1 begins an episode; the
    last record of an environment has `delta = A`.

    Args:
        advantages: (n,) GAE's estimates, not normalised.
        starts: see `continues`.
        env_index: see `continues`.
        gamma: discount factor.
        gae_lambda: GAE's lambda.
    """
    following = np.append(advantages[1:], 0.0)
    return advantages - gamma * gae_lambda * np.where(continues(starts, env_index), following, 0.0)


def returns_to_go(
    rewards: Array,
    advantages: Array,
    values: Array,
    starts: NDArray[np.bool_],
    env_index: NDArray[np.int64],
    gamma: float,
) -> Array:
    """Return each record's discounted return to the end of its episode, (n,).

    The value function completes the return of an episode that the rollout cuts off: the last advantage of an
    environment is `r + gamma V(s') - V(s)`, with V(s') = 0 if the episode has ended, so adding V(s) gives its return.

    Args:
        rewards: (n,) rewards as SB3 stores them, with the bootstrap value at a time limit.
        advantages: (n,) GAE's estimates, not normalised.
        values: (n,) value estimates of the states.
        starts: see `continues`.
        env_index: see `continues`.
        gamma: discount factor.
    """
    continued = continues(starts, env_index)
    last = np.append(env_index[1:] != env_index[:-1], True)
    returns = np.where(last, advantages + values, rewards)
    for at in range(len(returns) - 2, -1, -1):
        if continued[at]:
            returns[at] += gamma * returns[at + 1]
    return returns


def monte_carlo_advantages(returns: Array, states: NDArray[np.int64], actions: NDArray[np.int64]) -> Array:
    """Return, for each record, the mean return of its state and action minus that of its state (LDA §C.4).

    Args:
        returns: (n,) returns, see `returns_to_go`.
        states: (n,) the number of the record's state.
        actions: (n,) the number of the record's action.
    """

    def group_means(groups: NDArray[np.int64]) -> Array:
        means: Array = np.bincount(groups, weights=returns) / np.maximum(np.bincount(groups), 1)
        return means[groups]

    _, by_pair = np.unique(np.stack([states, actions]), axis=1, return_inverse=True)
    _, by_state = np.unique(states, return_inverse=True)
    return group_means(by_pair.reshape(-1)) - group_means(by_state.reshape(-1))
