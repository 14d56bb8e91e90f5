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
from whence.core import Action, RecordBatch, RunDirectoryError, WhenceError, eval_mode, named_leaves, suggest
from whence.diagnosis.ranking import OnRound, Score, score_rounds
from whence.experiments import AnyEnv, load_model, load_policy, read_records
from whence.rounds import RoundRecording, attribute_round
from whence.runs import RunDirectory
from whence.sb3 import actor_critic_view, embed, model_objective
from whence.selection import read_weights

OBSERVED, HIDDEN = "similar", "similar-hidden"
SIMILAR = (OBSERVED, HIDDEN)

SAMPLED_ROUNDS = 16
"""Rounds whose records give the standard deviations of states."""

RAW = "raw"
RECORDED = ("optimizer", "smoothed")
METHODS = (RAW, *RECORDED, *SIMILAR)
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
    - "optimizer", "smoothed": what the record did to the whole round; see `whence.attribute_round`. Needs recordings.
    - "similar": advantage × (1 for the same action, −1 for another) × `exp(-|z - z_target|^2 / d)`, of observations z
      in units of their standard deviation; discrete actions only.
    - "similar-hidden": the same, of the last policy's last hidden layer.

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
        RunDirectoryError: the run holds no rounds, lacks a recording, or its policy cannot be built again.
    """
    target, numbers = Action(target_states, actions, action_masks), _list_rounds(run, rounds, method)
    score = _make_score(run, numbers, load_model(run, numbers[0], env=env), target, method, env)
    return score_rounds(run, numbers, _COLUMNS, score, on_round)


def _list_rounds(run: RunDirectory, rounds: Sequence[int] | None, method: str) -> list[int]:
    if method not in METHODS:
        raise WhenceError(f"method is {method!r}.{suggest(method, METHODS)}")
    numbers = run.require_rounds() if rounds is None else sorted(set(rounds))
    missing = [number for number in numbers if not run.round_path("recordings", number).exists()]
    if method in RECORDED and missing:
        raise RunDirectoryError(
            f"method={method!r} needs recordings, and {len(missing)} of {len(numbers)} rounds of {run.path} have none, "
            f"such as round {missing[0]}. Train with --record-rounds {numbers[0]}-{numbers[-1]}, or take method='raw'."
        )
    return numbers


def _make_score(
    run: RunDirectory, numbers: Sequence[int], model: Any, target: Action, method: str, env: AnyEnv
) -> Score:
    """Return the function that scores a round; `model` is its to load policies into."""
    similarity = _make_similarity(run, numbers, model, target, method, env) if method in SIMILAR else None

    def score(number: int, table: pl.DataFrame) -> dict[str, NDArray[np.float64]]:
        if method in RECORDED:  # whose scores leave out what did not train
            recording = RoundRecording.load(run.round_path("recordings", number))
            influence: Any = attribute_round(model.policy, recording, target=target, method=method)
            order = torch.argsort(influence.record_ids)
            places = np.searchsorted(influence.record_ids[order].numpy(), table["record_id"].to_numpy())
            return {"score": influence.scores[order].double().numpy()[places]}
        records = read_records(run, table, model, env=env)
        if similarity is not None:
            return {"score": similarity(records) * read_weights(table)}
        load_policy(run, number, model)
        influence = attribute(model.policy, records, target=target, objective=model_objective(model))
        return {"score": influence.scores.double().numpy() * read_weights(table)}

    return score


def _make_similarity(
    run: RunDirectory, numbers: Sequence[int], model: Any, target: Action, method: str, env: AnyEnv
) -> Callable[[RecordBatch], NDArray[np.float64]]:
    """Return the function that scores records by advantage × same action × similarity of state.

    The model holds the last policy afterwards, and has to as long as the function is used.
    """
    if isinstance(model.action_space, spaces.Box):
        raise WhenceError(
            f"method={method!r} asks whether actions are the same, and those of {run.path} are continuous. Take "
            "method='raw' (--by influence)."
        )
    load_policy(run, run.rounds("policies")[-1], model)
    read = read_hidden if method == HIDDEN else read_observed
    places = np.linspace(0, len(numbers) - 1, min(len(numbers), SAMPLED_ROUNDS)).round().astype(int)
    sample = [
        read_records(run, run.round("records", numbers[place]), model, env=env) for place in dict.fromkeys(places)
    ]
    deviations = torch.cat([read(model.policy, records) for records in sample]).std(dim=0)
    pairs = target.as_records(sample[0])
    centres = _find_centres(read(model.policy, pairs), pairs.actions.reshape(len(pairs), -1))

    def score(records: RecordBatch) -> NDArray[np.float64]:
        states = read(model.policy, records)
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


def read_hidden(policy: Any, records: RecordBatch) -> Float[Tensor, "n d"]:
    """Return the activations of a policy's last hidden layer."""
    inputs = actor_critic_view(policy).prepare(records)
    with torch.no_grad(), eval_mode(policy.modules()):
        return embed(policy, inputs).float()
