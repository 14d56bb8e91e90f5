"""Measurements of a rollout by its own columns: Monte-Carlo advantages, and TD errors (LDA §C.4, C.5; v2 §B.4, B.5)."""

import numpy as np
import torch
from numpy.typing import NDArray

from whence.core import InvalidRecords, RecordBatch, named_leaves, to_numpy

Array = NDArray[np.float64]


def has_single_actions(records: RecordBatch) -> bool:
    """Return whether actions are discrete, one number a record."""
    return records.actions.reshape(len(records), -1).shape[1] == 1 and not records.actions.is_floating_point()


def number_visits(records: RecordBatch, name: str) -> tuple[Array, NDArray[np.int64], NDArray[np.int64]]:
    """Return each record's discounted return to go, its state and its action (LDA §C.4; v2 §B.4), (n,) each.

    Args:
        records: a rollout, with its rewards, values, episode starts, environments and gamma; observations with equal
            bytes are one state.
        name: what needs the columns, for errors.

    Raises:
        InvalidRecords: a column is missing, or an action is not a single integer.
    """
    _check_columns(name, records, ("rewards", "values", "episode_starts", "env_index", "gamma"))
    assert records.gamma is not None
    if not has_single_actions(records):
        raise InvalidRecords(
            f"{name} needs discrete actions, one number a record; these have shape "
            f"{tuple(records.actions.shape)} and {records.actions.dtype}."
        )
    order, starts, envs = _read_episodes(records)
    rewards, advantages, values = (read_column(records, name)[order] for name in ("rewards", "advantages", "values"))
    returns = np.empty(len(records))
    returns[order] = returns_to_go(rewards, advantages, values, starts, envs, records.gamma)
    return returns, number_states(records), records.actions.reshape(-1).cpu().numpy()


def compute_td_errors(records: RecordBatch) -> NDArray[np.float64]:
    """Return the records' TD errors, (n,); see `td_errors`.

    Raises:
        InvalidRecords: a column is missing, or gamma or GAE's lambda.
    """
    _check_columns("A TD error", records, ("episode_starts", "env_index", "gamma", "gae_lambda"))
    assert records.gamma is not None
    assert records.gae_lambda is not None
    order, starts, envs = _read_episodes(records)
    errors = np.empty(len(records))
    advantages = read_column(records, "advantages")[order]
    errors[order] = td_errors(advantages, starts, envs, records.gamma, records.gae_lambda)
    return errors


def number_states(records: RecordBatch) -> NDArray[np.int64]:
    """Return a number for each record's state, (n,); observations with equal bytes are one state."""
    rows = [
        np.ascontiguousarray(to_numpy(leaf)).reshape(len(records), -1).view(np.uint8).reshape(len(records), -1)
        for _, leaf in named_leaves(records.observations)
    ]
    _, numbers = np.unique(np.concatenate(rows, axis=1), axis=0, return_inverse=True)
    return numbers.reshape(-1).astype(np.int64)


def read_column(records: RecordBatch, name: str) -> NDArray[np.float64]:
    """Return a column of numbers as float64."""
    column: torch.Tensor = getattr(records, name)
    return column.double().cpu().numpy()


def _read_episodes(records: RecordBatch) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """Return an order in which an environment's records are consecutive, and the episode starts and environments in it.

    The records of an environment are in the order of time; those of a flattened rollout alternate between environments.
    """
    starts, envs = records.episode_starts, records.env_index
    assert starts is not None
    assert envs is not None
    order = np.argsort(envs.cpu().numpy(), kind="stable")
    return order, starts.cpu().numpy()[order], envs.cpu().numpy()[order]


def _check_columns(what: str, records: RecordBatch, names: tuple[str, ...]) -> None:
    if missing := [name for name in names if getattr(records, name) is None]:
        raise InvalidRecords(f"{what} needs {', '.join(missing)}, which these records lack: pass them to RecordBatch.")


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
    """Return the TD errors, (n,), from which generalised advantage estimates were computed (LDA §C.5; v2 §B.5).

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
    """Return, for each record, the mean return of its state and action minus that of its state (LDA §C.4; v2 §B.4).

    Args:
        returns: (n,) returns, see `returns_to_go`.
        states: (n,) the number of the record's state.
        actions: (n,) the number of the record's action.
    """
    return group_means(returns, number_pairs(states, actions)) - group_means(returns, states)


def group_means(values: Array, groups: NDArray[np.int64]) -> Array:
    """Return the mean of each record's group, (n,).

    Args:
        values: (n,) what the means are of.
        groups: (n,) the number of the record's group, at least 0.
    """
    means: Array = np.bincount(groups, weights=values) / np.maximum(np.bincount(groups), 1)
    return means[groups]


def number_pairs(states: NDArray[np.int64], actions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a number for each record's state and action, (n,), from 0."""
    numbers: NDArray[np.int64] = np.unique(np.stack([states, actions]), axis=1, return_inverse=True)[1]
    return numbers.reshape(-1)
