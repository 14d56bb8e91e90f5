"""Causes of an action: the records of all rounds, by the effect of training on them on the action's probability."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from gymnasium import spaces
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from whence.attribution import attribute
from whence.core import Action, RecordBatch, WhenceError, named_leaves, suggest
from whence.diagnosis.ranking import OnRound, Score, average_nearest, score_rounds
from whence.experiments import AnyEnv, load_model, load_policy, read_records
from whence.gradient_products import multiply_gradients
from whence.runs import RunDirectory
from whence.sb3 import actor_critic_view, model_objective
from whence.selection import read_weights

SAMPLED_ROUNDS = 16
"""Rounds whose records give the standard deviations of states."""

RAW, NEAREST, SIMILAR = METHODS = ("raw", "nearest", "similar")
"""Ways to score a record; see `find_causes`."""

_COLUMNS = ("record_id", "env_index", "episode_id", "step", "action", "advantage", "value", "return", "reward", "keep")


def find_causes(
    run: RunDirectory,
    target_states: Any,
    actions: Any,
    *,
    action_masks: Any = None,
    rounds: Sequence[int] | None = None,
    method: str = RAW,
    env: AnyEnv = None,
    on_round: OnRound | None = None,
) -> pl.DataFrame:
    """Score the records of all rounds by what training on them did to the log-probability of actions in some states.

    A positive score says that training on the record raised it. Methods:

    - "raw": `<grad log pi(a|s), grad objective_i>` at the policy that collected the record's round (LDA §3.3).
    - "nearest": advantage × mean cosine of `grad log pi(a_i|s_i)` with those of the ten nearest pairs of the target, at
      the same policy; see `whence.diagnosis.ranking.NEAREST`.
    - "similar": advantage × (1 for the same action, −1 for another) × `exp(-|z - z_target|^2 / d)`, of observations z
      in units of their standard deviation; discrete actions only.

    A record that did not train scores 0, and one that trained with a weight counts by it, over the round's mean weight.

    Args:
        run: a run of an agent, finished or not, whose policy can be built again.
        target_states: one observation, shaped like the policy's observation space; or m of them, first axis m.
        actions: one action, or m of them. The target is the mean over the pairs.
        action_masks: which actions were allowed, or None; see `whence.Action`.
        rounds: the rounds to score, from 1; None: all.
        method: one of `METHODS`.
        env: the environment of runs whose configuration does not name it; see `load_round`.
        on_round: called after each round.

    Returns:
        A row for each record: `round`, `record_id`, the columns of the run's records that say where it is and what was
        done there, and its `score`.

    Raises:
        WhenceError: the method is unknown, or does not fit the policy; states or actions do not fit the records.
        RunDirectoryError: the run holds no rounds, or its policy cannot be built again.
    """
    if method not in METHODS:
        raise WhenceError(f"method is {method!r}.{suggest(method, METHODS)}")
    target = Action(target_states, actions, action_masks)
    numbers = run.require_rounds() if rounds is None else sorted(set(rounds))
    score = _make_score(run, numbers, load_model(run, numbers[0], env=env), target, method, env)
    return score_rounds(run, numbers, _COLUMNS, score, on_round)


def _make_score(
    run: RunDirectory, numbers: Sequence[int], model: Any, target: Action, method: str, env: AnyEnv
) -> Score:
    """Return the function that scores a round; `model` is its to load policies into."""
    similarity = _make_similarity(run, numbers, model, target, env) if method == SIMILAR else None

    def score(number: int, table: pl.DataFrame) -> dict[str, NDArray[np.float64]]:
        records = read_records(run, table, model, env=env)
        if similarity is not None:
            return {"score": similarity(records) * read_weights(table)}
        load_policy(run, number, model)
        if method == NEAREST:
            products = multiply_gradients(model.policy, records, target.as_records(records))
            scores = average_nearest(products.cosines()).numpy() * records.advantages.double().numpy()
            return {"score": scores * read_weights(table)}
        influence = attribute(model.policy, records, target=target, objective=model_objective(model))
        return {"score": influence.scores.double().numpy() * read_weights(table)}

    return score


def _make_similarity(
    run: RunDirectory, numbers: Sequence[int], model: Any, target: Action, env: AnyEnv
) -> Callable[[RecordBatch], NDArray[np.float64]]:
    """Return the function that scores records by advantage × same action × similarity of state."""
    if isinstance(model.action_space, spaces.Box):
        raise WhenceError(
            f"method={SIMILAR!r} asks whether actions are the same, and those of {run.path} are continuous. Take "
            "method='raw' (--by influence)."
        )
    places = np.linspace(0, len(numbers) - 1, min(len(numbers), SAMPLED_ROUNDS)).round().astype(int)
    sample = [
        read_records(run, run.round("records", numbers[place]), model, env=env) for place in dict.fromkeys(places)
    ]
    deviations = torch.cat([read_observed(model.policy, records) for records in sample]).std(dim=0)
    pairs = target.as_records(sample[0])
    centres = _find_centres(read_observed(model.policy, pairs), pairs.actions.reshape(len(pairs), -1))

    def score(records: RecordBatch) -> NDArray[np.float64]:
        states = read_observed(model.policy, records)
        actions = records.actions.reshape(len(records), -1)
        total = torch.zeros(len(records), dtype=torch.float64)
        for action, centre, share in centres:
            sign = torch.where((actions == action).all(dim=1), 1.0, -1.0)
            total += share * sign * _compare_states(states, centre, deviations)
        scores: NDArray[np.float64] = (total * records.advantages.double()).numpy()
        return scores

    return score


def _compare_states(
    states: Float[Tensor, "n d"], centre: Float[Tensor, " d"], deviations: Float[Tensor, " d"]
) -> Float[Tensor, " n"]:
    """Return `exp(-|z - z_centre|^2 / d)` in units of the deviations; axes that never differ are left out.

    If none differs, all states are the same.
    """
    differs = deviations > 0
    distances = ((states - centre)[:, differs] / deviations[differs]).square().sum(dim=1)
    return torch.exp(-distances / max(1, int(differs.sum()))).double()


def _find_centres(states: Float[Tensor, "m d"], actions: Tensor) -> list[tuple[Tensor, Tensor, float]]:
    """Return each action of the target with the mean of its states, and its share of the target."""
    masks = [(action, (actions == action).all(dim=1)) for action in actions.unique(dim=0)]
    return [(action, states[mask].mean(dim=0), float(mask.double().mean())) for action, mask in masks]


def read_observed(policy: Any, records: RecordBatch) -> Float[Tensor, "n d"]:
    """Return observations as rows of numbers, as the policy's network reads them."""
    observations = actor_critic_view(policy).prepare(records)["observations"]
    return torch.cat([leaf.reshape(len(records), -1).float() for _, leaf in named_leaves(observations)], dim=1)
