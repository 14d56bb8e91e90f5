"""Causes of an action: the records of all rounds, by the effect of training on them on the action's probability."""

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.causes.ranking import OnRound, average_nearest, score_rounds
from whence.core import Action, WhenceError, suggest
from whence.runs import RunDirectory
from whence.sb3 import model_objective
from whence.scores import attribute, multiply_gradients
from whence.selection import read_weights
from whence.stored.agents import AnyEnv, load_agent, load_policy, read_records

INFLUENCE, NEAREST = METHODS = ("influence", "nearest")
"""Ways to score a record; see `find_causes`."""

_COLUMNS = ("record_id", "env_index", "episode_id", "step", "action", "advantage", "value", "return", "reward", "keep")


def find_decision_causes(
    run: RunDirectory,
    target: Action,
    *,
    rounds: Sequence[int] | None = None,
    method: str = INFLUENCE,
    env: AnyEnv = None,
    on_round: OnRound | None = None,
) -> pl.DataFrame:
    """Score the records of all rounds by what training on them did to an action's probability; see `find_causes`."""
    if method not in METHODS:
        raise WhenceError(f"method is {method!r}.{suggest(method, METHODS)}")
    numbers = run.require_rounds() if rounds is None else sorted(set(rounds))
    model = load_agent(run, numbers[0], env=env)

    def score(number: int, table: pl.DataFrame) -> dict[str, NDArray[np.float64]]:
        records = read_records(run, number, model, env=env)
        load_policy(run, number, model)
        if method == INFLUENCE:
            scores = attribute(model.policy, records, target=target, objective=model_objective(model)).scores.double()
        else:
            pairs = target.as_records(records, model.action_space)
            cosines = multiply_gradients(model.policy, records, pairs).cosines()
            scores = average_nearest(cosines) * records.advantages.double()
        return {"score": scores.numpy() * read_weights(table)}

    return score_rounds(run, numbers, _COLUMNS, score, on_round)
