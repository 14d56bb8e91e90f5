"""What the page asks of the rest of whence, imported when it is needed: replay, scoring, changes of the policy."""

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

import polars as pl

from whence.attribution import attribute
from whence.errors import WhenceError
from whence.runs import RunDirectory
from whence.targets import Return

Env: TypeAlias = str | Callable[[], Any] | None
"""An environment as an id, `module:Id` or a function that makes it; None: the run's own."""

FOLDS = 8
"""Folds of the episodes, for the errors of scores that are computed on demand."""

_GENERATORS = threading.RLock()
"""Held where global random generators are used and restored, which two threads cannot do at once."""


def find_part(module: str, name: str) -> Callable[..., Any]:
    """Return a function of whence's that needs an extra.

    Raises:
        WhenceError: it is not installed.
    """
    try:
        part: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError) as missing:
        raise WhenceError(
            f"{name} needs {missing.name or missing}, which is not installed. Install whence[cli]."
        ) from None
    return part


def replay_episode(run: RunDirectory, episode: int, **settings: Any) -> Any:
    """Replay an episode; see `whence.replay_episode`."""
    replay = find_part("whence.experiments.rl.replaying", "replay_episode")
    with _GENERATORS:
        return replay(run, episode, **settings)


def estimate_advantage(run: RunDirectory, number: int, record: int, **settings: Any) -> tuple[float, float]:
    """Return an advantage by fresh rollouts and its standard error."""
    estimate = find_part("whence.experiments.rl.replaying", "estimate_advantage")
    with _GENERATORS:
        mean, error = estimate(run, number, record, **settings)
    return float(mean), float(error)


def compare_policies(run: RunDirectory, number: int, *, env: Env) -> pl.DataFrame:
    """Return what a round changed in the policy, a row for each record, the largest divergence first."""
    compare = find_part("whence.experiments.rl.changes", "compare_policies")
    with _GENERATORS:
        table: pl.DataFrame = compare(run, number, env=env)
    return table


def score_round(run: RunDirectory, number: int, env: Env) -> pl.DataFrame:
    """Score the records of a round that trained without scores, by the policy that collected it.

    Returns:
        `record_id` and `score`; and `error`, unless the round has too few episodes for it.

    Raises:
        WhenceError: the policy cannot be built again, or the observations are not there.
    """
    load_round = find_part("whence.experiments.rl.stored", "load_round")
    model_objective = find_part("whence.sb3.objective", "model_objective")
    with _GENERATORS:
        model, records = load_round(run, number, **({} if env is None else {"env": env}))
        objective = model_objective(model)
        try:
            influence = attribute(model.policy, records, target=Return(), objective=objective, folds=FOLDS)
        except WhenceError:  # fewer episodes than folds
            influence = attribute(model.policy, records, target=Return(), objective=objective)
    table = influence.to_polars()
    return table.select([name for name in ("record_id", "score", "error") if name in table.columns])
