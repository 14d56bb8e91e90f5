"""Selection rules without influence: baselines by advantages and TD errors (LDA §C.4, C.5)."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

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
from whence.core import InvalidRecords, RecordBatch, WhenceError, named_leaves, to_numpy
from whence.influence import Influence
from whence.selection import (
    DEFAULT_SHARE,
    START,
    Progress,
    Selection,
    Share,
    check_share,
    count_to_drop,
    share_at,
)

Order: TypeAlias = Literal["distance", "product"]


@dataclass(frozen=True)
class AdvantageMismatch:
    """Drop records whose advantage and its Monte-Carlo estimate differ in sign (LDA §C.4).

    The estimate is the mean discounted return of a record's state and action over the rollout, minus that of its
    state. It needs states that occur again, so discrete states (compared by the bytes of the observation) and discrete
    actions. Of the m records that disagree, `floor(drop * m)` are dropped.

    Attributes:
        order: "distance" drops the records furthest from the estimate (LDA's Advantage 1), "product" those whose
            product with the estimate is lowest (Advantage 2).
        drop: as in `IIF`, but of the records that disagree.
        warmup: as in `IIF`.
    """

    order: Order = "distance"
    drop: Share = DEFAULT_SHARE
    warmup: int = 0
    needs_influence = False
    needs_discrete = True
    """Whether the rule needs observations that occur again and actions that are single integers."""

    def __post_init__(self) -> None:
        check_share(self.drop, self.warmup)
        if self.order not in get_args(Order):
            raise WhenceError(f"order is {self.order!r}; it is one of {', '.join(get_args(Order))}.")

    def select(self, records: RecordBatch, influence: Influence | None = None, progress: Progress = START) -> Selection:
        """Drop the records that disagree most.

        Raises:
            InvalidRecords: a column is missing, or an action is not a single integer.
        """
        advantages = _read_column(records, "advantages")
        estimate = measure_by_visits(records, type(self).__name__).advantages
        disagree = np.flatnonzero(np.sign(estimate) != np.sign(advantages))
        agreement = -np.abs(estimate - advantages) if self.order == "distance" else estimate * advantages
        order = np.lexsort((records.ids.cpu().numpy()[disagree], agreement[disagree]))
        count = count_to_drop(share_at(self.drop, self.warmup, progress), len(disagree))
        keep = torch.ones(len(records), dtype=torch.bool)
        keep[torch.from_numpy(disagree[order[:count]])] = False
        return Selection.dropping(keep, "advantage of another sign than the return shows")


@dataclass(frozen=True)
class TDErrorPriority:
    """Keep every record, with a weight by the rank of its TD error's size: `(1 / rank) ** exponent` (LDA §C.5).

    `whence.sb3` turns weights into sampling probabilities.

    Attributes:
        exponent: at least 0; 0 gives all records the same weight.
    """

    exponent: float = 0.6
    needs_influence = False

    def __post_init__(self) -> None:
        if not self.exponent >= 0:
            raise WhenceError(f"exponent is {self.exponent}; it is 0 or more (prioritised replay's usual value: 0.6).")

    def select(self, records: RecordBatch, influence: Influence | None = None, progress: Progress = START) -> Selection:
        """Weight records by rank.

        Raises:
            InvalidRecords: a column is missing, or gamma or GAE's lambda.
        """
        sizes = np.abs(compute_td_errors(records))
        ranks = np.empty(len(sizes))
        ranks[np.lexsort((records.ids.cpu().numpy(), -sizes))] = np.arange(1, len(sizes) + 1)
        weights = torch.from_numpy(ranks**-self.exponent)
        return Selection(torch.ones(len(records), dtype=torch.bool), weights, [None] * len(records))


@dataclass(frozen=True, eq=False)
class VisitedAdvantages:
    """What a rollout's repeated visits measure (LDA §C.4), (n,) each.

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
    """Measure advantages by a rollout's repeated visits of states and actions (LDA §C.4).

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
    rewards, advantages, values = (_read_column(records, name)[order] for name in ("rewards", "advantages", "values"))
    returns, episodes = np.empty(len(records)), np.empty(len(records), np.int64)
    returns[order] = returns_to_go(rewards, advantages, values, starts, envs, records.gamma)
    states, actions = number_states(records), records.actions.reshape(-1).cpu().numpy()
    episodes[order] = np.cumsum(starts | (np.diff(envs, prepend=envs[:1]) != 0))
    pairs = number_pairs(states, actions)
    return VisitedAdvantages(
        monte_carlo_advantages(returns, states, actions),
        monte_carlo_errors(returns, states, actions, episodes),
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
    advantages = _read_column(records, "advantages")[order]
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


def _read_column(records: RecordBatch, name: str) -> NDArray[np.float64]:
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
