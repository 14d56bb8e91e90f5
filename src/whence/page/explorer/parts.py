"""What the page computes on demand: replays, measured advantages, changes of the policy, scores. One at a time."""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import polars as pl

from whence.diagnosis import causes, decisions, grid_map
from whence.diagnosis.causes import RankedMoment
from whence.experiments.rl import changes, continuations, stored
from whence.experiments.rl.rebuilding import AnyEnv
from whence.page import cause_view
from whence.runs import RunDirectory
from whence.sb3.episodes.episode_replay import EpisodeReplay
from whence.targets import Action

_GENERATORS = threading.RLock()
"""Held where global random generators are used and restored, which two threads cannot do at once."""


def replay_episode(run: RunDirectory, episode: int, **settings: Any) -> EpisodeReplay:
    """Replay an episode; see `whence.replay_episode`."""
    with _GENERATORS:
        return stored.replay_episode(run, episode, **settings)


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
        extremes = grid_map.map_extremes(run, number, records, env=env)
    return None if extremes is None else grid_map.describe_map(extremes)


def score_round(run: RunDirectory, number: int, env: AnyEnv) -> pl.DataFrame:
    """Score the records of a round that trained without scores, by the policy that collected it.

    Returns:
        `record_id` and `score`; and `error`, unless the round has too few episodes for it.

    Raises:
        WhenceError: the policy cannot be built again, or the observations are not there.
    """
    with _GENERATORS:
        return stored.score_round(run, number, env=env).to_polars()


def read_decision(
    run: RunDirectory, number: int, record: int, *, env: AnyEnv
) -> tuple[Action, tuple[float, float, bool]]:
    """Return what was done in a record as a target, and what `compare_log_probs` says of it."""
    with _GENERATORS:
        target = decisions.read_record(run, number, record, env=env)
        return target, decisions.compare_log_probs(run, target, env=env)


def iterate_causes(run: RunDirectory, target: Action, *, method: str, env: AnyEnv) -> Iterator[pl.DataFrame]:
    """Yield what each round did to a target; generators are held for one round at a time."""
    tables = causes.iterate_causes(run, target, method=method, env=env)
    while True:
        with _GENERATORS:
            table = next(tables, None)
        if table is None:
            return
        yield table


def replay_faces(run: RunDirectory, moments: Iterable[RankedMoment], *, env: AnyEnv) -> tuple[dict[int, Any], Any]:
    """Return pictures of moments' faces by record, and why one is missing."""
    with _GENERATORS:
        return cause_view.replay_faces(run, moments, env=env)
