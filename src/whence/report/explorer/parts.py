"""What the page computes on demand: replays, measured advantages, changes of the policy, scores. One at a time."""

import threading
from typing import Any

import polars as pl

from whence.diagnosis import grid_map
from whence.experiments.rl import changes, continuations, replaying, stored
from whence.experiments.rl.rebuilding import AnyEnv
from whence.runs import RunDirectory
from whence.sb3.episode_replay import EpisodeReplay

_GENERATORS = threading.RLock()
"""Held where global random generators are used and restored, which two threads cannot do at once."""


def replay_episode(run: RunDirectory, episode: int, **settings: Any) -> EpisodeReplay:
    """Replay an episode; see `whence.replay_episode`."""
    with _GENERATORS:
        return replaying.replay_episode(run, episode, **settings)


def estimate_advantage(run: RunDirectory, number: int, record: int, **settings: Any) -> tuple[float, float]:
    """Return an advantage by fresh rollouts and its standard error."""
    with _GENERATORS:
        return continuations.estimate_advantage(run, number, record, **settings)


def compare_policies(run: RunDirectory, number: int, *, env: AnyEnv) -> pl.DataFrame:
    """Return what a round changed in the policy, a row for each record, the largest divergence first."""
    with _GENERATORS:
        return changes.compare_policies(run, number, env=env)


def has_map(run: RunDirectory, env: AnyEnv) -> bool:
    """Return whether a run's environment is a grid world."""
    with _GENERATORS:
        return grid_map.has_map(run, env=env)


def map_round(run: RunDirectory, number: int, records: pl.DataFrame, env: AnyEnv) -> dict[str, Any] | None:
    """Return a round's most harmful and helpful records on the map, in JSON types; None if there is no one map."""
    with _GENERATORS:
        drawn = grid_map.map_extremes(run, number, records, env=env)
    return None if drawn is None else grid_map.describe_map(drawn)


def score_round(run: RunDirectory, number: int, env: AnyEnv) -> pl.DataFrame:
    """Score the records of a round that trained without scores, by the policy that collected it.

    Returns:
        `record_id` and `score`; and `error`, unless the round has too few episodes for it.

    Raises:
        WhenceError: the policy cannot be built again, or the observations are not there.
    """
    with _GENERATORS:
        return stored.score_round(run, number, env=env).to_polars()
