"""Behaviours, an action in a state each: named by records or by hand, or found among those that training raised."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Float
from scipy.spatial.distance import cdist
from torch import Tensor

from whence.diagnosis.roughness import median_distance
from whence.errors import WhenceError
from whence.experiments import AnyEnv, action_labels, check_action, load_model, load_policy, read_records
from whence.guards import eval_mode
from whence.heuristics import number_states
from whence.moments import name_action
from whence.records import RecordBatch, to_numpy
from whence.runs import RunDirectory
from whence.sb3 import actor_critic_view, embed, predict
from whence.targets import Action
from whence.trees import named_leaves

CANDIDATES = 512
"""States of the last round among which behaviours are looked for, evenly spread."""

_CHUNK = 4096


@dataclass(frozen=True, eq=False)
class Behaviour:
    """An action in a state, or a set of such pairs.

    Attributes:
        target: the mean log-probability of the actions, whose influence is traced.
        name: the behaviour in words.
        round: the round of the records that the states are of; None if they are of none.
        record_ids: these records.
    """

    target: Action
    name: str
    round: int | None = None
    record_ids: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """A name for files: the same for the same states and actions."""
        digest = hashlib.sha256()
        for _, leaf in named_leaves({"observation": self.target.observation, "action": self.target.action}):
            digest.update(torch.as_tensor(leaf).double().numpy().tobytes())
        return digest.hexdigest()[:12]


def behaviour_of_records(
    run: RunDirectory, record_ids: Sequence[int], *, action: Any = None, env: AnyEnv = None
) -> Behaviour:
    """Return what was done in the states of some records of one round, or another action in them.

    Args:
        run: the run.
        record_ids: at least one.
        action: the action instead of the records' own.
        env: see `load_round`.

    Raises:
        WhenceError: no round holds all of the records, or the action is none of the policy's.
    """
    wanted = torch.tensor(list(dict.fromkeys(record_ids)))
    number = _find_round(run, wanted)
    model = load_model(run, number, env=env)
    records = read_records(run, run.round("records", number), model, env=env)
    chosen = records.take(torch.isin(records.ids, wanted))
    return _make_behaviour(run, chosen, number, action)


def _find_round(run: RunDirectory, record_ids: Tensor) -> int:
    numbers: list[int] = run.rounds()
    for number in reversed(numbers):
        if np.isin(record_ids.numpy(), run.round("records", number)["record_id"].to_numpy()).all():
            return number
    names = ", ".join(map(str, record_ids.tolist()))
    rounds = f"rounds {numbers[0]} to {numbers[-1]}" if numbers else "no rounds"
    raise WhenceError(
        f"No round of {run.path} holds the records {names}; it holds {rounds}. The records of a behaviour are of one "
        "round: see the moments of a round with `whence show --bottom 10`."
    )


def _make_behaviour(run: RunDirectory, chosen: RecordBatch, number: int, action: Any = None) -> Behaviour:
    """Return a behaviour in the states of some records: with their own actions, or one action for all."""
    actions = chosen.actions if action is None else [action] * len(chosen)
    target = Action(chosen.observations, actions, chosen.action_masks)
    states = target.as_records(chosen)  # refuses an action of another kind
    ids = tuple(chosen.ids.tolist())
    where = f"the state of record {ids[0]}" if len(ids) == 1 else f"the states of {len(ids)} records"
    return Behaviour(target, f"{_name_actions(run, states)} in {where} (round {number})", number, ids)


def behaviour_by_hand(run: RunDirectory, observation: Any, action: Any, *, env: AnyEnv = None) -> Behaviour:
    """Return an action in a state, or m actions in m states, as `whence.Action` takes them.

    Raises:
        WhenceError: they are not in the policy's spaces.
    """
    rounds = run.require_rounds()
    model = load_model(run, rounds[0], env=env)
    target = Action(observation, action)
    check_action(target, model.observation_space, model.action_space)
    states = target.as_records(read_records(run, run.round("records", rounds[0]), model, env=env))
    where = "the given state" if len(states) == 1 else f"{len(states)} given states"
    return Behaviour(target, f"{_name_actions(run, states)} in {where}")


def _name_actions(run: RunDirectory, states: RecordBatch) -> str:
    env = run.config.get("env")
    names = {
        name_action(action, action_labels(env if isinstance(env, str) else None)) for action in states.actions.tolist()
    }
    return f"“{names.pop()}”" if len(names) == 1 else f"{len(names)} actions"


def find_behaviours(run: RunDirectory, count: int = 1, *, env: AnyEnv = None) -> list[Behaviour]:
    """Return the behaviours that training raised most and most steadily, in states that differ.

    Candidates are states of the last round: each discrete action there, or for other actions the one that was taken.
    They are ranked by `rank_rises` of π(a|s), of a box's log-density, over all stored policies. A state nearer to a
    chosen one than the median distance between candidates, in the last policy's penultimate layer, counts as the same.

    Args:
        run: the run, with at least three stored policies.
        count: behaviours at most.
        env: see `load_round`.

    Raises:
        WhenceError: there are too few policies, or no action became more probable.
    """
    numbers, rounds = run.rounds("policies"), run.rounds()
    if len(numbers) < 3 or not rounds:
        raise WhenceError(
            f"{run.path} holds {len(numbers)} policies; at least 3 are needed to see what rose. Train further rounds."
        )
    model = load_model(run, numbers[0], env=env)
    records = read_records(run, run.round("records", rounds[-1]), model, env=env)
    states = records.take(torch.linspace(0, len(records) - 1, min(CANDIDATES, len(records))).long())
    inputs = actor_critic_view(model.policy).prepare(states)
    curves = []
    for number in numbers:
        load_policy(run, number, model)
        curves.append(_rate_actions(model.policy, inputs))
    worth = rank_rises(np.stack(curves))
    best = worth.max(axis=1)
    chosen = _pick_apart(best, embed_records(model.policy, states), count)
    if not chosen:
        raise WhenceError(
            f"No action became more probable from the first to the last policy of {run.path} in the states of round "
            f"{rounds[-1]}. Name a behaviour with --record, or --observation and --action."
        )
    space = model.action_space
    return [
        _make_behaviour(
            run,
            states.take(slice(place, place + 1)),
            rounds[-1],
            int(worth[place].argmax() + space.start) if isinstance(space, spaces.Discrete) else None,
        )
        for place in chosen
    ]


def rank_rises(curves: Float[np.ndarray, "k ..."]) -> Float[np.ndarray, "..."]:
    """Return how much curves rise, times how steadily: rise · |rise| / Σ|steps|.

    Args:
        curves: (k, ...) values over k policies, the first axis in order of time.

    Returns:
        (...) the rise itself where no step falls; below 0 where the last value is below the first; 0 where all are
        equal.
    """
    rise = curves[-1] - curves[0]
    steps = np.abs(np.diff(curves, axis=0)).sum(axis=0)
    worth: Float[np.ndarray, ...] = np.divide(rise * np.abs(rise), steps, out=np.zeros_like(rise), where=steps > 0)
    return worth


def _pick_apart(worth: Float[np.ndarray, " n"], embeddings: Float[np.ndarray, "n d"], count: int) -> list[int]:
    """Return the places of the largest worth above 0, none of them near another."""
    radius = median_distance(embeddings)
    chosen: list[int] = []
    for place in np.argsort(-worth, kind="stable"):
        if len(chosen) == count or not worth[place] > 0:
            break
        if not chosen or cdist(embeddings[[place]], embeddings[chosen]).min() > radius:
            chosen.append(int(place))
    return chosen


def _rate_actions(policy: Any, inputs: Any) -> Float[np.ndarray, "n a"]:
    """Return each discrete action's probability, or of other actions the log-density or probability of the taken."""
    with torch.no_grad(), eval_mode(policy.modules()):
        distribution, _ = predict(policy, inputs)
        if isinstance(policy.action_space, spaces.Discrete):
            inner: Any = distribution.distribution
            return np.asarray(to_numpy(inner.probs), np.float64)
        log_probs = to_numpy(distribution.log_prob(inputs["actions"])).astype(np.float64)[:, None]
    return log_probs if is_density(policy.action_space) else np.exp(log_probs)


def is_density(action_space: spaces.Space[Any]) -> bool:
    """Return whether a policy's actions have densities, which may exceed 1, instead of probabilities."""
    return isinstance(action_space, spaces.Box)


def embed_records(policy: Any, records: RecordBatch) -> Float[np.ndarray, "n d"]:
    """Return the activations of a policy's penultimate layer for each record, (n, d); equal states have equal ones."""
    view = actor_critic_view(policy)
    # Rows of one minibatch may differ in the last bits though their inputs are equal.
    _, first, place = np.unique(number_states(records), return_index=True, return_inverse=True)
    distinct = records.take(torch.from_numpy(first))
    with torch.no_grad(), eval_mode(policy.modules()):
        parts = [
            embed(policy, view.prepare(distinct.take(slice(start, start + _CHUNK))))
            for start in range(0, len(distinct), _CHUNK)
        ]
    embeddings: Float[np.ndarray, "n d"] = to_numpy(torch.cat(parts)).astype(np.float64)[place]
    return embeddings
