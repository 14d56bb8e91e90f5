"""Decisions to ask about: of a stored round, given by hand, raised most by training, or of an episode played now."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import torch
from gymnasium import spaces
from jaxtyping import Float
from numpy.typing import NDArray
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from torch import Tensor

from whence.core import Action, RecordBatch, ReplayError, Tree, WhenceError, eval_mode, named_leaves, to_numpy
from whence.experiments import (
    AnyEnv,
    action_labels,
    check_action,
    is_squashed,
    load_model,
    load_policy,
    make_replay_env,
    read_records,
    reads_raw_observations,
)
from whence.moments import name_action
from whence.runs import RunDirectory
from whence.sb3 import (
    actor_critic_view,
    embed,
    explain_no_frames,
    open_env,
    predict,
    render,
    to_env_actions,
    use_fresh_noise,
)
from whence.selection import number_states

CANDIDATES = 512
"""States of the last round among which a behaviour is looked for, evenly spread."""

LONGEST = 10_000
"""Steps after which an episode that goes on is left."""

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
    for number in reversed(run.require_rounds()):
        table = run.round("records", number)
        if np.isin(wanted.numpy(), table["record_id"].to_numpy()).all():
            records = read_records(run, table, load_model(run, number, env=env), env=env)
            return _make_behaviour(run, records.take(torch.isin(records.ids, wanted)), number, action)
    raise WhenceError(
        f"No round of {run.path} holds the records {', '.join(map(str, wanted.tolist()))}. The records of a behaviour "
        "are of one round: see the moments of a round with `whence show --bottom 10`."
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
    labels = action_labels(env if isinstance(env, str) else None)
    names = {name_action(action, labels) for action in states.actions.tolist()}
    return f"“{names.pop()}”" if len(names) == 1 else f"{len(names)} actions"


def find_behaviour(run: RunDirectory, *, env: AnyEnv = None) -> Behaviour:
    """Return the behaviour that training raised most and most steadily, of a run with at least three stored policies.

    Candidates are states of the last round: each discrete action there, or for other actions the one that was taken.
    They are ranked by `rank_rises` of π(a|s), of a box's log-density, over all stored policies.

    Raises:
        WhenceError: there are too few policies, or no action became more probable.
    """
    numbers, rounds = run.rounds("policies"), run.require_rounds()
    if len(numbers) < 3:
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
    place, action = (int(at) for at in np.unravel_index(worth.argmax(), worth.shape))
    if not worth[place, action] > 0:
        raise WhenceError(
            f"No action became more probable from the first to the last policy of {run.path} in the states of round "
            f"{rounds[-1]}. Name a behaviour with --record, or --observation and --action."
        )
    space = model.action_space
    chosen = action + int(space.start) if isinstance(space, spaces.Discrete) else None
    return _make_behaviour(run, states.take(slice(place, place + 1)), rounds[-1], chosen)


def rank_rises(curves: Float[np.ndarray, "k ..."]) -> Float[np.ndarray, "..."]:
    """Return how much curves (k, ...) over k policies rise, times how steadily: rise · |rise| / Σ|steps|.

    That is the rise itself where no step falls, below 0 where the last value is below the first, 0 if all are equal.
    """
    rise = curves[-1] - curves[0]
    steps = np.abs(np.diff(curves, axis=0)).sum(axis=0)
    worth: Float[np.ndarray, ...] = np.divide(rise * np.abs(rise), steps, out=np.zeros_like(rise), where=steps > 0)
    return worth


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


@dataclass(frozen=True, eq=False)
class PlayedEpisode:
    """An episode of m steps that the present policy played.

    Attributes:
        seed: the environment's and the actions' seed.
        records: the m states and actions as the policy reads them; log-probs are the present policy's.
        first_log_probs: (m,) those of the first round's policy.
        frames: pictures (height, width, 3) uint8 by step, for the steps asked for.
        frames_note: why frames that were asked for are missing; None if none is.
        is_discrete: whether log-probs are logarithms of probabilities, and not of densities.
    """

    seed: int
    records: RecordBatch
    first_log_probs: Float[Tensor, " m"]
    frames: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    frames_note: str | None = None
    is_discrete: bool = True

    def __len__(self) -> int:
        return len(self.records)

    def target(self, step: int) -> Action:
        """Return the decision at a step.

        Raises:
            WhenceError: the episode has no such step.
        """
        if not 0 <= step < len(self):
            raise WhenceError(f"The episode with seed {self.seed} has steps 0 to {len(self) - 1}, and no step {step}.")
        return _make_target(self.records, step)

    def choose_step(self) -> int:
        """Return the step whose action's probability rose most since the first round; of a density, its logarithm."""
        now, first = self.records.log_probs, self.first_log_probs
        return int((now.exp() - first.exp() if self.is_discrete else now - first).argmax())


def _make_target(records: RecordBatch, place: int) -> Action:
    """Return what was done in one record as a target; it is read with the record's action mask."""
    single = records.take(slice(place, place + 1))
    return Action(single.observations, single.actions, single.action_masks)


def read_record(run: RunDirectory, number: int, record: int, *, env: AnyEnv = None) -> Action:
    """Return what was done in a record of a round as a target.

    Raises:
        WhenceError: the round does not hold the record.
        RunDirectoryError: the policy cannot be built again.
    """
    table = run.round("records", number)
    row = table.filter(pl.col("record_id") == record)
    if row.is_empty():
        ids = table["record_id"].sort()
        raise WhenceError(f"Record {record} is not in round {number}; its records go from {ids[0]} to {ids[-1]}.")
    return _make_target(read_records(run, row, load_model(run, number, env=env), env=env), 0)


def compare_log_probs(run: RunDirectory, target: Action, *, env: AnyEnv = None) -> tuple[float, float, bool]:
    """Return a target, a mean log-probability, under the first round's policy and under the present one.

    The third entry is whether actions are discrete; the log-probabilities of continuous ones are of densities.
    """
    rounds, policies = run.require_rounds(), run.rounds("policies")
    model = load_model(run, policies[0], env=env)
    states = target.as_records(read_records(run, run.round("records", rounds[0]).head(1), model, env=env))
    before = _read_log_probs(model, states).mean()
    load_policy(run, policies[-1], model)
    return float(before), float(_read_log_probs(model, states).mean()), not is_density(model.action_space)


def play_episode(
    run: RunDirectory,
    *,
    seed: int = 0,
    env: AnyEnv = None,
    frames: Collection[int] = (),
    longest: int = LONGEST,
) -> PlayedEpisode:
    """Play an episode with a run's present policy; equal arguments play the same one again.

    Global random generators are left as they are.

    Args:
        run: the run, finished or not; its last policy plays.
        seed: seeds the environment and the actions.
        env: the environment of runs whose configuration does not name it; see `load_round`.
        frames: the steps to draw.
        longest: the most steps.

    Raises:
        ReplayError: the environment fails, or the policy reads what no single environment shows.
        RunDirectoryError: the policy cannot be built again.
    """
    if not reads_raw_observations(run):
        raise ReplayError(
            f"The policy of {run.path} reads normalised or stacked observations, which are not rebuilt. Ask about a "
            "stored record: --record ID."
        )
    run.require_rounds()
    policies = run.rounds("policies")
    model = load_model(run, policies[-1], env=env)
    if isinstance(model.policy, MaskableActorCriticPolicy):
        raise ReplayError("The policy reads action masks, which episodes played now lack. Ask about --record ID.")
    states: list[Tree] = []
    actions: list[Tensor] = []
    pictures: dict[int, NDArray[np.uint8]] = {}
    with (
        open_env(make_replay_env(run, env)) as world,
        torch.no_grad(),
        eval_mode(model.policy.modules()),
        use_fresh_noise(model, 1) as renew_noise,
    ):
        torch.manual_seed(seed)
        note = explain_no_frames(world) if frames else None
        observation, _ = world.reset(seed=seed)
        for step in range(longest):
            renew_noise(np.array([0]), np.array([step == 0]))
            state, _ = model.policy.obs_to_tensor(observation)
            action = model.policy._predict(state, deterministic=False)
            states.append(state)
            actions.append(action)
            if step in frames and note is None:
                pictures[step] = render(world)
            taken = to_env_actions(action.numpy(), world.action_space, squashed=is_squashed(run))[0]
            observation, _, terminated, truncated, _ = world.step(taken)
            if terminated or truncated:
                break
    unknown = torch.zeros(len(states))
    records = RecordBatch(
        observations=_join(states),
        actions=torch.cat(actions),
        log_probs=unknown,
        advantages=unknown,
        steps=torch.arange(len(states)),
    )
    now = _read_log_probs(model, records)
    load_policy(run, policies[0], model)
    return PlayedEpisode(
        seed=seed,
        records=records.with_columns({"log_probs": now}),
        first_log_probs=_read_log_probs(model, records),
        frames=pictures,
        frames_note=note,
        is_discrete=not is_density(model.action_space),
    )


def _join(states: list[Tree]) -> Tree:
    if isinstance(states[0], dict):
        return {key: _join([state[key] for state in states]) for key in states[0]}
    return torch.cat(states)


def _read_log_probs(model: Any, records: RecordBatch) -> Float[Tensor, " m"]:
    view = actor_critic_view(model.policy)
    with torch.no_grad(), eval_mode(model.policy.modules()):
        return view(view.parameters(), view.prepare(records)).log_prob
