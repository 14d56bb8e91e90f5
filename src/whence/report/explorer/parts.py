"""What the page asks of the rest of whence, imported when it is needed: replay, scoring, changes of the policy."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

import polars as pl

from whence.errors import WhenceError
from whence.runs import RunDirectory

Env: TypeAlias = str | Callable[[], Any] | None
"""An environment as an id, `module:Id` or a function that makes it; None: the run's own."""

FOLDS = 8
"""Folds of the episodes, for the errors of scores that are computed on demand."""


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
    return find_part("whence.sb3.episode_replay", "replay_episode")(run, episode, **settings)


def estimate_advantage(run: RunDirectory, number: int, record: int, **settings: Any) -> tuple[float, float]:
    """Return an advantage by fresh rollouts and its standard error."""
    mean, error = find_part("whence.sb3.continuations", "estimate_advantage")(run, number, record, **settings)
    return float(mean), float(error)


def compare_policies(run: RunDirectory, number: int, *, env: Env) -> pl.DataFrame:
    """Return what a round changed in the policy, a row for each record, the largest divergence first."""
    table: pl.DataFrame = find_part("whence.experiments.rl.changes", "compare_policies")(run, number, env=env)
    return table


def score_round(run: RunDirectory, number: int, env: Env) -> pl.DataFrame:
    """Score the records of a round that trained without scores, by the policy that collected it.

    Returns:
        `record_id`, `score` and `error`.

    Raises:
        WhenceError: the policy cannot be built again, or the observations are not there.
    """
    from whence.attribution import attribute
    from whence.experiments.rl.stored import load_round
    from whence.sb3.objective import model_objective
    from whence.targets import Return

    model, records = load_round(run, number, **({} if env is None else {"env": env}))
    influence = attribute(model.policy, records, target=Return(), objective=model_objective(model))
    return influence.to_polars()
