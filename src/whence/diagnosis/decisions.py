"""Decisions of a policy to ask about: steps of an episode that it plays now, or of a stored round."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import polars as pl
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from whence.errors import ReplayError, RunDirectoryError, WhenceError
from whence.experiments import (
    AnyEnv,
    is_squashed,
    load_model,
    load_policy,
    make_replay_env,
    read_records,
    reads_raw_observations,
)
from whence.guards import eval_mode
from whence.policies import as_view
from whence.records import RecordBatch
from whence.runs import RunDirectory
from whence.sb3 import MaskableActorCriticPolicy, explain_no_frames, open_env, render, to_env_actions, use_fresh_noise
from whence.targets import Action
from whence.trees import Tree

LONGEST = 10_000
"""Steps after which an episode that goes on is left."""


@dataclass(frozen=True, eq=False)
class PlayedEpisode:
    """An episode of m steps that the present policy played.

    Attributes:
        seed: the environment's and the actions' seed.
        records: the m states and actions as the policy reads them; log-probs are the present policy's.
        first_log_probs: (m,) those of the first round's policy.
        rewards: (m,).
        frames: pictures (height, width, 3) uint8 by step, for the steps asked for.
        frames_note: why frames that were asked for are missing; None if none is.
        is_discrete: whether log-probs are logarithms of probabilities, and not of densities.
    """

    seed: int
    records: RecordBatch
    first_log_probs: Float[Tensor, " m"]
    rewards: NDArray[np.float64]
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
        return make_target(self.records, step)

    def choose_step(self) -> int:
        """Return the step whose action's probability rose most since the first round; of a density, its logarithm."""
        now, first = self.records.log_probs, self.first_log_probs
        return int((now.exp() - first.exp() if self.is_discrete else now - first).argmax())


def make_target(records: RecordBatch, place: int) -> Action:
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
        ids = table["record_id"].sort().to_list()
        raise WhenceError(f"Record {record} is not in round {number}; its records go from {ids[0]} to {ids[-1]}.")
    return make_target(read_records(run, row, load_model(run, number, env=env), env=env), 0)


def compare_log_probs(run: RunDirectory, target: Action, *, env: AnyEnv = None) -> tuple[float, float, bool]:
    """Return a target, a mean log-probability, under the first round's policy and under the present one.

    The third entry is whether actions are discrete; the log-probabilities of continuous ones are of densities.
    """
    policies = _list_policies(run)
    model = load_model(run, policies[0], env=env)
    like = read_records(run, run.round("records", run.rounds()[0]).head(1), model, env=env)
    before = _read_log_probs(model, target.as_records(like)).mean()
    load_policy(run, policies[-1], model)
    after = _read_log_probs(model, target.as_records(like)).mean()
    return float(before), float(after), not isinstance(model.action_space, gym.spaces.Box)


def play_episode(
    run: RunDirectory,
    *,
    seed: int = 0,
    deterministic: bool = False,
    env: AnyEnv = None,
    frames: Collection[int] = (),
    longest: int = LONGEST,
) -> PlayedEpisode:
    """Play an episode with a run's present policy; equal arguments play the same one again.

    Global random generators are left as they are.

    Args:
        run: the run, finished or not; its last policy plays.
        seed: seeds the environment and the actions.
        deterministic: take each state's most probable action, in place of a sample.
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
    policies = _list_policies(run)
    model = load_model(run, policies[-1], env=env)
    if isinstance(model.policy, MaskableActorCriticPolicy):
        raise ReplayError("The policy reads action masks, which episodes played now lack. Ask about --record ID.")
    records, rewards, pictures, note = _play(
        model, make_replay_env(run, env), seed, deterministic, set(frames), longest, squashed=is_squashed(run)
    )
    now = _read_log_probs(model, records)
    load_policy(run, policies[0], model)
    return PlayedEpisode(
        seed=seed,
        records=records.with_columns({"log_probs": now}),
        first_log_probs=_read_log_probs(model, records),
        rewards=rewards,
        frames=pictures,
        frames_note=note,
        is_discrete=not isinstance(model.action_space, gym.spaces.Box),
    )


def _list_policies(run: RunDirectory) -> list[int]:
    if not (numbers := run.rounds("policies")):
        raise RunDirectoryError(f"{run.path} holds no policies, so nothing can be asked about. Train again.")
    return numbers


def _play(
    model: Any, make_env: Any, seed: int, deterministic: bool, wanted: set[int], longest: int, *, squashed: bool
) -> tuple[RecordBatch, NDArray[np.float64], dict[int, NDArray[np.uint8]], str | None]:
    """Return the records, with log-probs of 0, the rewards, the frames and why there are none."""
    states: list[Tree] = []
    actions: list[Tensor] = []
    rewards: list[float] = []
    pictures: dict[int, NDArray[np.uint8]] = {}
    with (
        open_env(make_env) as env,
        torch.no_grad(),
        eval_mode(model.policy.modules()),
        use_fresh_noise(model, 1) as renew_noise,
    ):
        torch.manual_seed(seed)
        note = explain_no_frames(env) if wanted else None
        observation, _ = env.reset(seed=seed)
        for step in range(longest):
            renew_noise(np.array([0]), np.array([step == 0]))
            state, _ = model.policy.obs_to_tensor(observation)
            action = model.policy._predict(state, deterministic=deterministic)
            states.append(state)
            actions.append(action)
            if step in wanted and note is None:
                pictures[step] = render(env)
            taken = to_env_actions(action.numpy(), env.action_space, squashed=squashed)[0]
            observation, reward, terminated, truncated, _ = env.step(taken)
            rewards.append(float(reward))
            if terminated or truncated:
                break
    zeros = torch.zeros(len(states))
    records = RecordBatch(
        observations=_join(states),
        actions=torch.cat(actions),
        log_probs=zeros,
        advantages=zeros,
        steps=torch.arange(len(states)),
    )
    return records, np.array(rewards), pictures, note


def _join(states: list[Tree]) -> Tree:
    if isinstance(states[0], dict):
        return {key: _join([state[key] for state in states]) for key in states[0]}
    return torch.cat(states)


def _read_log_probs(model: Any, records: RecordBatch) -> Float[Tensor, " m"]:
    view = as_view(model.policy)
    with torch.no_grad(), eval_mode(model.policy.modules()):
        return view(view.parameters(), view.prepare(records)).log_prob
