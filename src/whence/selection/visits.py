"""Measurements of a rollout by its own columns: Monte-Carlo advantages, and TD errors (LDA §C.4, C.5; v2 §B.4, B.5)."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from whence.advantages import (
    group_means,
    monte_carlo_advantages,
    monte_carlo_errors,
    number_pairs,
    returns_to_go,
    td_errors,
)
from whence.core import InvalidRecords, RecordBatch, label_units, named_leaves, to_numpy


@dataclass(frozen=True, eq=False)
class VisitedAdvantages:
    """What a rollout's repeated visits measure (LDA §C.4; v2 §B.4), (n,) each.

    Attributes:
        advantages: the mean discounted return of the record's state and action, minus that of its state.
        errors: their standard errors, which take episodes as independent; NaN where unknown.
        values: the mean discounted return of the record's state.
        visits: how often the rollout visits the record's state and action.
    """

    advantages: NDArray[np.float64]
    errors: NDArray[np.float64]
    values: NDArray[np.float64]
    visits: NDArray[np.int64]


def has_single_actions(records: RecordBatch) -> bool:
    """Return whether actions are discrete, one number a record."""
    return records.actions.reshape(len(records), -1).shape[1] == 1 and not records.actions.is_floating_point()


def measure_by_visits(records: RecordBatch, name: str = "An estimate by visits") -> VisitedAdvantages:
    """Measure advantages by a rollout's repeated visits of states and actions (LDA §C.4; v2 §B.4).

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
    states, actions = number_states(records), records.actions.reshape(-1).cpu().numpy()
    pairs = number_pairs(states, actions)
    return VisitedAdvantages(
        monte_carlo_advantages(returns, states, actions),
        monte_carlo_errors(returns, states, actions, label_units(records, "episode").numpy()),
        group_means(returns, states),
        np.bincount(pairs)[pairs],
    )


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
