"""Decisions: of a stored round or of an episode played now, and the records of all rounds that taught them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import torch
from gymnasium import spaces
from jaxtyping import Float
from numpy.typing import NDArray
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from torch import Tensor

from whence.causes.ranking import OnRound, average_nearest, check_flagged, score_rounds
from whence.core import Action, RecordBatch, Tree, WhenceError, as_view, eval_mode, suggest
from whence.runs import RunDirectory
from whence.sb3.episodes import explain_no_frames, open_env, render, to_env_actions, use_fresh_noise
from whence.sb3.models import add_history, is_recurrent, zero_states
from whence.scores import attribute, multiply_gradients
from whence.selection import read_weights
from whence.stored.agents import (
    AnyEnv,
    LockstepEnvs,
    is_squashed,
    load_agent,
    load_policy,
    make_lockstep,
    read_objective,
    read_records,
    refuse_custom,
)

LONGEST = 10_000
"""Steps after which an episode that goes on is left."""

INFLUENCE, NEAREST = METHODS = ("influence", "nearest")
"""Ways to score a record; see `find_causes`."""

_COLUMNS = ("record_id", "env_index", "episode_id", "step", "action", "advantage", "value", "return", "reward", "keep")


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
        """Return the decision at a step, or raise a `WhenceError` if the episode has none."""
        if not 0 <= step < len(self):
            raise WhenceError(f"The episode with seed {self.seed} has steps 0 to {len(self) - 1}, and no step {step}.")
        return make_target([self.records.take(slice(step, step + 1))])

    def choose_step(self) -> int:
        """Return the step whose action's probability rose most since the first round; of a density, its logarithm."""
        now, first = self.records.log_probs, self.first_log_probs
        return int((now.exp() - first.exp() if self.is_discrete else now - first).argmax())


def make_target(parts: Sequence[RecordBatch]) -> Action:
    """Return what was done in records of some rounds as a target; it is read with the records' action masks."""
    if len(parts) == 1:
        return Action(parts[0].observations, parts[0].actions, parts[0].action_masks, parts[0])
    if parts[0].history is not None:
        raise WhenceError("A recurrent policy is asked about records of one round: flag those of one round.")
    masks = [part.action_masks for part in parts if part.action_masks is not None]
    return Action(
        join_trees([part.observations for part in parts]),
        torch.cat([part.actions for part in parts]),
        torch.cat(masks) if masks else None,
    )


def read_record(run: RunDirectory, number: int, record: int, *, env: AnyEnv = None) -> Action:
    """Return what was done in a record of a round as a target; see `read_actions`."""
    return read_actions(run, pl.DataFrame({"round": [number], "record_id": [record]}), env=env)


def read_actions(run: RunDirectory, keys: pl.DataFrame, *, env: AnyEnv = None) -> Action:
    """Return what was done in stored records, by their `round` and `record_id`, as a target."""
    check_flagged(run, keys)
    parts = []
    for (number,), group in keys.group_by("round", maintain_order=True):
        ids = run.round("records", number)["record_id"].sort()
        if missing := [record for record in group["record_id"] if record not in ids]:
            raise WhenceError(
                f"Record {missing[0]} is not in round {number}; its records go from {ids[0]} to {ids[-1]}."
            )
        model = load_agent(run, number, env=env)
        parts.append(read_records(run, number, model, env=env, ids=group["record_id"].to_list()))
    return make_target(parts)


def compare_log_probs(run: RunDirectory, target: Action, *, env: AnyEnv = None) -> tuple[float, float, bool]:
    """Return a target, a mean log-probability, under the first round's policy and under the present one.

    The third entry is whether actions are discrete; the log-probabilities of continuous ones are of densities.
    """
    rounds, policies = run.require_rounds(), run.require_rounds(name="policies")
    model = load_agent(run, policies[0], env=env)
    first_id = run.round("records", rounds[0])["record_id"][0]
    states = target.as_records(read_records(run, rounds[0], model, env=env, ids=[first_id]))
    before = read_log_probs(model, states).mean()
    load_policy(run, policies[-1], model)
    return float(before), float(read_log_probs(model, states).mean()), not isinstance(model.action_space, spaces.Box)


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
        ReplayError: the environment or a wrapper cannot be made again, or fails.
        RunDirectoryError: the policy cannot be built again.
    """
    refuse_custom(run, "play an episode with its policy", "Name a decision of a stored round: --record.")
    policies = run.require_rounds(name="policies")
    model = load_agent(run, policies[-1], env=env)
    is_masked = isinstance(model.policy, MaskableActorCriticPolicy)
    memory = zero_states(model.policy, 1) if is_recurrent(model.policy) else None
    states: list[Tree] = []
    actions: list[Tensor] = []
    masks: list[NDArray[np.bool_]] = []
    pictures: dict[int, NDArray[np.uint8]] = {}
    with (
        open_env(partial(make_lockstep, run, env, 1, policies[-1])) as envs,
        torch.no_grad(),
        eval_mode(model.policy.modules()),
        use_fresh_noise(model, 1) as renew_noise,
    ):
        torch.manual_seed(seed)
        lockstep = envs.unwrapped
        assert isinstance(lockstep, LockstepEnvs)
        (world,), lockstep.state = lockstep.worlds, {"seed": seed}
        note = explain_no_frames(world) if frames else None
        observation = envs.reset()
        for step in range(longest):
            renew_noise(np.array([0]), np.array([step == 0]))
            masks += [lockstep.read_masks(lockstep.alive)] if is_masked else []
            state, _ = model.policy.obs_to_tensor(observation)
            allowed = {"action_masks": masks[-1]} if is_masked else {}
            if memory is None:
                action = model.policy._predict(state, deterministic=False, **allowed)
            else:
                action, _, _, memory = model.policy.forward(state, memory, torch.zeros(1))
            states.append(state)
            actions.append(action)
            if step in frames and note is None:
                pictures[step] = render(world)
            observation = envs.step(to_env_actions(action.numpy(), world.action_space, squashed=is_squashed(run)))[0]
            if not len(lockstep.alive):
                break
    unknown = torch.zeros(len(states))
    records = RecordBatch(
        observations=join_trees(states),
        actions=torch.cat(actions),
        log_probs=unknown,
        advantages=unknown,
        steps=torch.arange(len(states)),
        action_masks=torch.from_numpy(np.concatenate(masks)) if is_masked else None,
        episode_starts=torch.arange(len(states)) == 0,
        env_index=torch.zeros(len(states)),
    )
    if memory is not None:
        records = add_history(records, {})
    now = read_log_probs(model, records)
    load_policy(run, policies[0], model)
    return PlayedEpisode(
        seed=seed,
        records=records.with_columns({"log_probs": now}),
        first_log_probs=read_log_probs(model, records),
        frames=pictures,
        frames_note=note,
        is_discrete=not isinstance(model.action_space, spaces.Box),
    )


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
            scores = attribute(model.policy, records, target=target, objective=read_objective(model)).scores.double()
        else:
            pairs = target.as_records(records, model.action_space)
            cosines = multiply_gradients(model.policy, records, pairs).cosines()
            # Raw advantages are above 0 for other records than those that training raised.
            scores = average_nearest(cosines) * read_objective(model).prepare(records).advantages.double()
        return {"score": scores.numpy() * read_weights(table)}

    return score_rounds(run, numbers, _COLUMNS, score, on_round)


def join_trees(states: list[Tree]) -> Tree:
    """Return observations of many records, from those of some records each."""
    if isinstance(states[0], dict):
        return {key: join_trees([state[key] for state in states]) for key in states[0]}
    return torch.cat(states)


def read_log_probs(model: Any, records: RecordBatch) -> Float[Tensor, " m"]:
    """Return the log-probabilities of records' actions under a model's policy."""
    view = as_view(model.policy)
    with torch.no_grad(), eval_mode(view.module.modules()):
        return view(view.parameters(), view.prepare(records)).log_prob
