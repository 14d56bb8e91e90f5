"""Selection rules that only comparisons train by, and what they measure of a rollout by its own columns.

The rules are LDA's other baselines, and a control of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from whence.core import InvalidRecords, RecordBatch, Unit, WhenceError, named_leaves, to_numpy
from whence.scores import Influence
from whence.selection import DEFAULT_SHARE, Progress, Selection
from whence.selection.score_rules import ScoreRule, drop_at_random
from whence.selection.selections import START, CheckedRule, Share, drop_units

Array = NDArray[np.float64]

Order: TypeAlias = Literal["distance", "product"]


@dataclass(frozen=True, repr=False)
class AdvantageMismatch(CheckedRule):
    """Drop records whose advantage and its Monte-Carlo estimate differ in sign (LDA §C.4; v2 §B.4).

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
        super().__post_init__()
        if self.order not in get_args(Order):
            raise WhenceError(f"order is {self.order!r}; it is one of {', '.join(get_args(Order))}.")

    def select(self, records: RecordBatch, influence: Influence | None = None, progress: Progress = START) -> Selection:
        """Drop the records that disagree most.

        Raises:
            InvalidRecords: a column is missing, or an action is not a single integer.
        """
        advantages = read_column(records, "advantages")
        estimate = monte_carlo_advantages(*number_visits(records, type(self).__name__))
        disagree = np.flatnonzero(np.sign(estimate) != np.sign(advantages))
        agreement = -np.abs(estimate - advantages) if self.order == "distance" else estimate * advantages
        order = np.lexsort((records.ids.cpu().numpy()[disagree], agreement[disagree]))
        dropped = torch.from_numpy(disagree[order[: self.count(len(disagree), progress)]])
        return drop_units(dropped, torch.arange(len(records)), "advantage of another sign than the return shows")


@dataclass(frozen=True)
class TDErrorPriority:
    """Keep every record, weighted by the rank of its TD error's size: `(1 / rank) ** exponent` (LDA §C.5; v2 §B.5).

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


@dataclass(frozen=True, repr=False)
class NegativeRandom(ScoreRule):
    """The control between IIF and chance: drop as many as IIF would, chosen at random from the negatively scored.

    It uses the score's sign and ignores its rank.

    Attributes:
        drop: IIF's share.
        seed: as in `RandomDrop`.
        warmup: as in `IIF`.
        unit: as in `IIF`.
    """

    drop: Share = DEFAULT_SHARE
    seed: int = 0
    warmup: int = 0
    unit: Unit = "record"

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop at random among the negative."""
        labels, scores = self._score_units(records, influence)
        negative = (scores < 0).nonzero().flatten().numpy()
        count = self.count(len(negative), progress)
        return drop_at_random(self.seed, records, labels, [(negative, count)], "drawn at random from the negative")


def has_single_actions(records: RecordBatch) -> bool:
    """Return whether actions are discrete, one number a record."""
    return records.actions.reshape(len(records), -1).shape[1] == 1 and not records.actions.is_floating_point()


def number_visits(records: RecordBatch, name: str) -> tuple[Array, NDArray[np.int64], NDArray[np.int64]]:
    """Return each record's discounted return to go, its state and its action (LDA §C.4; v2 §B.4), (n,) each.

    Observations with equal bytes are one state. An `InvalidRecords` says that `name` needs a column that is missing, or
    actions that are single integers.
    """
    names = "rewards", "values", "episode_starts", "env_index", "gamma"
    order, starts, envs = _read_episodes(name, records, names)
    assert records.gamma is not None
    if not has_single_actions(records):
        raise InvalidRecords(
            f"{name} needs discrete actions, one number a record; these have shape "
            f"{tuple(records.actions.shape)} and {records.actions.dtype}."
        )
    rewards, advantages, values = (read_column(records, name)[order] for name in ("rewards", "advantages", "values"))
    returns = np.empty(len(records))
    returns[order] = returns_to_go(rewards, advantages, values, starts, envs, records.gamma)
    return returns, number_states(records), records.actions.reshape(-1).cpu().numpy()


def compute_td_errors(records: RecordBatch) -> NDArray[np.float64]:
    """Return the records' TD errors, (n,), see `td_errors`; an `InvalidRecords` if a column is missing."""
    names = "episode_starts", "env_index", "gamma", "gae_lambda"
    order, starts, envs = _read_episodes("A TD error", records, names)
    assert records.gamma is not None
    assert records.gae_lambda is not None
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


def _read_episodes(
    what: str, records: RecordBatch, names: Sequence[str]
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """Return an order in which an environment's records are consecutive, and the episode starts and environments in it.

    The records of an environment are in the order of time; those of a flattened rollout alternate between environments.
    Refused are records without the columns `names`, which `what` needs.
    """
    if missing := [name for name in names if getattr(records, name) is None]:
        raise InvalidRecords(f"{what} needs {', '.join(missing)}, which these records lack: pass them to RecordBatch.")
    starts, envs = (getattr(records, name).cpu().numpy() for name in ("episode_starts", "env_index"))
    order = np.argsort(envs, kind="stable")
    return order, starts[order], envs[order]


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
    last record of an environment has `delta = A`. Advantages are GAE's, not normalised; of the order of records see
    `continues`.
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
    Rewards are as SB3 stores them, with the bootstrap value at a time limit. Advantages and order are as in
    `td_errors`.
    """
    continued = continues(starts, env_index)
    last = np.append(env_index[1:] != env_index[:-1], True)
    returns = np.where(last, advantages + values, rewards)
    for at in range(len(returns) - 2, -1, -1):
        if continued[at]:
            returns[at] += gamma * returns[at + 1]
    return returns


def monte_carlo_advantages(returns: Array, states: NDArray[np.int64], actions: NDArray[np.int64]) -> Array:
    """Return the mean return of each record's state and action minus that of its state, (n,) (LDA §C.4; v2 §B.4)."""
    return group_means(returns, number_pairs(states, actions)) - group_means(returns, states)


def group_means(values: Array, groups: NDArray[np.int64]) -> Array:
    """Return the mean of the values in each record's group, (n,); groups are numbers from 0."""
    means: Array = np.bincount(groups, weights=values) / np.maximum(np.bincount(groups), 1)
    return means[groups]


def number_pairs(states: NDArray[np.int64], actions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a number for each record's state and action, (n,), from 0."""
    numbers: NDArray[np.int64] = np.unique(np.stack([states, actions]), axis=1, return_inverse=True)[1]
    return numbers.reshape(-1)
