"""Causes of an action: the records of all rounds, by the effect of training on them on the action's probability."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.causes.ranking import OnRound, average_nearest, score_rounds
from whence.core import Action, RecordBatch, WhenceError, suggest
from whence.runs import RunDirectory
from whence.sb3 import model_objective
from whence.scores import attribute, multiply_gradients
from whence.selection import read_weights
from whence.stored.agents import AnyEnv, load_agent, load_policy, read_records

INFLUENCE, NEAREST = METHODS = ("influence", "nearest")
"""Ways to score a record; see `find_causes`."""

_COLUMNS = ("record_id", "env_index", "episode_id", "step", "action", "advantage", "value", "return", "reward", "keep")


def find_causes(
    run: RunDirectory,
    target_states: Any,
    actions: Any,
    *,
    action_masks: Any = None,
    states_of: RecordBatch | None = None,
    rounds: Sequence[int] | None = None,
    method: str = INFLUENCE,
    env: AnyEnv = None,
    on_round: OnRound | None = None,
) -> pl.DataFrame:
    """Score the records of all rounds by what training on them did to the log-probability of actions in some states.

    A positive score speaks for the action. Methods:

    - "influence": what training on it did to the log-probability, to first order:
      `<grad log pi(a|s), grad objective_i>` at the policy that collected the record's round (LDA §3.3).
    - "nearest": advantage × mean cosine of `grad log pi(a_i|s_i)` with those of the ten nearest pairs of the target, at
      the same policy; see `whence.causes.ranking.NEAREST`.

    A record that did not train scores 0, and one that trained with a weight counts by it, over the round's mean weight.

    Args:
        run: a run of an agent, finished or not, whose policy can be built again.
        target_states: one observation, shaped like the policy's observation space; or m of them, first axis m.
        actions: one action, or m of them. The target is the mean over the pairs.
        action_masks: which actions were allowed, or None; see `whence.Action`.
        states_of: the records that these are of, which a recurrent policy needs; or None.
        rounds: the rounds to score, from 1; None: all.
        method: one of `METHODS`.
        env: the environment of runs whose configuration does not name it; see `load_round`.
        on_round: called after each round.

    Returns:
        A row for each record: `round`, `record_id`, the columns of the run's records that say where it is and what was
        done there, and its `score`.

    Raises:
        WhenceError: the method is unknown, or states or actions do not fit the records.
        RunDirectoryError: the run holds no rounds, or its policy cannot be built again.
    """
    if method not in METHODS:
        raise WhenceError(f"method is {method!r}.{suggest(method, METHODS)}")
    target = Action(target_states, actions, action_masks, states_of)
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
