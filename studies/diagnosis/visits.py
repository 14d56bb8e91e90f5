"""Judgement of the advantages that a round trained on, by the rollout's repeated visits (LDA §4.1)."""

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.core import RecordBatch, label_units
from whence.lab.rules import (
    Array,
    group_means,
    has_single_actions,
    monte_carlo_advantages,
    number_pairs,
    number_visits,
)
from whence.runs import RunDirectory
from whence.scores import SIGNIFICANT
from whence.stored.agents import AnyEnv, load_round, read_reward_scale

REPEATS = 10
"""From so many visits of a record's state and action on, in the median, visits judge advantages."""

ROUNDING = 1e-9
"""A measured advantage below this share of the largest value is 0: means of equal returns may differ by rounding."""


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


def measure_by_visits(records: RecordBatch) -> VisitedAdvantages:
    """Measure advantages by a rollout's repeated visits of states and actions (LDA §C.4; v2 §B.4)."""
    returns, states, actions = number_visits(records, "An estimate by visits")
    pairs = number_pairs(states, actions)
    return VisitedAdvantages(
        monte_carlo_advantages(returns, states, actions),
        monte_carlo_errors(returns, states, actions, label_units(records, "episode").numpy()),
        group_means(returns, states),
        np.bincount(pairs)[pairs],
    )


def monte_carlo_errors(
    returns: Array, states: NDArray[np.int64], actions: NDArray[np.int64], episodes: NDArray[np.int64]
) -> Array:
    """Return the standard error of each record's `monte_carlo_advantages`, (n,); NaN where it is unknown.

    Returns of one episode depend on each other, so episodes are what is independent (the cluster-robust error of a
    difference of two means). It is unknown if the state and action occur in a single episode, and if the state has no
    other action: the estimate is then 0 whatever the returns.

    Args:
        returns: (n,) returns, see `returns_to_go`.
        states: (n,) the number of the record's state.
        actions: (n,) the number of the record's action.
        episodes: (n,) the number of the record's episode.
    """
    pairs = number_pairs(states, actions)
    in_episode, states_in_episode = number_pairs(pairs, episodes), number_pairs(states, episodes)
    visits, state_visits = np.bincount(pairs), np.bincount(states)
    # What an episode adds to the mean of the pair and to the mean of the state, both as sums of deviations.
    first = np.unique(in_episode, return_index=True)[1]
    first_of_state = np.unique(states_in_episode, return_index=True)[1]
    of_pair = np.bincount(in_episode, weights=returns - group_means(returns, pairs)) / visits[pairs[first]]
    state_sums = np.bincount(states_in_episode, weights=returns - group_means(returns, states))
    of_state = state_sums / state_visits[states[first_of_state]]
    shared = of_state[states_in_episode[first]]
    variances = np.bincount(pairs[first], weights=(of_pair - shared) ** 2 - shared**2)[pairs]
    variances += np.bincount(states[first_of_state], weights=of_state**2)[states]
    count, pair_count = (np.bincount(groups) for groups in (states[first_of_state], pairs[first]))
    known = (pair_count[pairs] > 1) & (visits[pairs] < state_visits[states])
    correction = count[states] / np.maximum(count[states] - 1, 1)
    return np.where(known, np.sqrt(np.maximum(variances, 0.0) * correction), np.nan)


def measure_visits(
    run: RunDirectory, number: int, *, env: AnyEnv = None, least: float = REPEATS
) -> pl.DataFrame | None:
    """Return what a rollout's repeated visits measure of each record, in the environment's rewards.

    None: a record's state and action have, in the median, less than `least` visits; or actions are not discrete, a
    column is missing, or observations were too large to store (which are observed again if `least` is 0).

    Returns:
        `record_id`, `mc_advantage`, `mc_error` (null where unknown) and `mc_value`.
    """
    stored = run.round("records", number).columns
    if least > 0 and not any(name.split(".")[0] == "observation" for name in stored):
        return None
    _, records = load_round(run, number, env=env)
    needed = (records.rewards, records.values, records.episode_starts, records.env_index)
    if not has_single_actions(records) or any(column is None for column in needed):
        return None
    visited = measure_by_visits(records)
    if np.median(visited.visits) < least:
        return None
    scale = read_reward_scale(run, number)
    rounding = ROUNDING * float(np.abs(np.concatenate([visited.advantages, visited.values])).max(initial=0.0))
    return pl.DataFrame(
        {
            "record_id": records.ids.numpy(),
            "mc_advantage": scale * np.where(np.abs(visited.advantages) <= rounding, 0.0, visited.advantages),
            "mc_error": scale * visited.errors,
            "mc_value": scale * visited.values,
        }
    ).with_columns(pl.col("mc_error").fill_nan(None))


def compare_signs(judged: pl.DataFrame) -> pl.DataFrame:
    """Return a table with `mismatch` and `certain`, from `advantage`, `mc_advantage` and `mc_error`."""
    measured = pl.col("mc_advantage")
    return judged.with_columns(
        mismatch=measured.sign() != pl.col("advantage").cast(pl.Float64).sign(),
        certain=measured.abs() > SIGNIFICANT * pl.col("mc_error"),
    )
