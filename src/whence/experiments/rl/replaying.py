"""Episodes of a run played again; and advantages estimated by going on from one of their steps."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from whence.errors import ReplayError
from whence.experiments.rl.rebuilding import AnyEnv, is_squashed, make_replay_env, reads_raw_observations
from whence.experiments.rl.stored import load_model
from whence.guards import preserve_rng_state
from whence.runs import RunDirectory
from whence.sb3.drawing import draw_episode
from whence.sb3.episode_replay import (
    EpisodeReplay,
    Frames,
    StoredEpisode,
    open_env,
    play_again,
    read_actions,
    read_episode,
    reset_to,
)

LONGEST = 10_000
"""Steps after which a continuation is cut off and the critic's value taken for the rest."""


def replay_episode(
    run: RunDirectory | str | Path,
    episode: int,
    *,
    env: AnyEnv = None,
    frames: Frames = (),
    last_step: int | None = None,
) -> EpisodeReplay:
    """Play an episode of a run again, check it bit for bit against what was stored, and draw steps of it.

    The episode begins from its environment's stored generator state, and takes the stored actions. Episodes without
    such a state, as EnvPool's, are drawn from their observations where the state follows from these. Global random
    generators are left as they are.

    Args:
        run: the run, or its directory.
        episode: the episode's id, as in the records.
        env: an id, module:Id, or a function that makes an environment like those that were trained in; None: what the
            run's configuration names.
        frames: the steps to draw, or "all".
        last_step: the last step to play; None: all that are stored.

    Raises:
        ReplayError: the episode cannot be played again; the message says what is missing.
    """
    run = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
    stored = read_episode(run, episode)
    make_env = make_replay_env(run, env)
    if stored.generator_state is None and run.config.get("collect_with") == "envpool":
        return draw_episode(make_env, stored, frames=frames, last_step=last_step)
    return play_again(
        make_env,
        stored,
        frames=frames,
        last_step=last_step,
        squashed=is_squashed(run),
        raw_observations=reads_raw_observations(run),
    )


def estimate_advantage(
    run: RunDirectory | str | Path,
    number: int,
    record: int,
    *,
    env: AnyEnv = None,
    continuations: int = 16,
    seed: int = 0,
) -> tuple[float, float]:
    """Estimate a record's advantage under the round's policy from fresh continuations, with its standard error.

    The record's episode is played again up to the record. From there each continuation goes on twice with the same
    randomness of the environment: once with the record's action first, once with the policy's. The estimate is the mean
    difference of the discounted returns.

    Args:
        run: the run, or its directory.
        number: the round.
        record: the record's id.
        env: see `replay_episode`.
        continuations: at least 2.
        seed: seeds environments and actions from the record on.

    Raises:
        ReplayError: the episode cannot be played again up to the record, or observations were normalised.
        RunDirectoryError: the policy cannot be built again.
    """
    run = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
    if continuations < 2:
        raise ReplayError(f"continuations is {continuations}; at least 2 are needed for an error.")
    if not reads_raw_observations(run):
        raise ReplayError("The policy reads normalised or stacked observations, which continuations do not rebuild.")
    row = run.round("records", number).filter(pl.col("record_id") == record)
    if row.is_empty():
        raise ReplayError(f"Record {record} is not in round {number} of {run.path}.")
    stored = read_episode(run, int(row["episode_id"][0]))
    step = int(row["step"][0])
    make_env = make_replay_env(run, env)
    check = play_again(make_env, stored, last_step=step)
    if check.mismatch is not None:
        raise ReplayError(check.mismatch)
    model = load_model(run, number, env=env)
    returns = _continue(make_env, stored, model, step, continuations, seed, squashed=is_squashed(run))
    differences = returns[:continuations] - returns[continuations:]
    return float(differences.mean()), float(differences.std(ddof=1) / np.sqrt(continuations))


def _continue(
    make_env: Any, stored: StoredEpisode, model: Any, step: int, count: int, seed: int, *, squashed: bool
) -> NDArray[np.float64]:
    """Return the discounted returns of 2 * count continuations; the first half begins with the stored action."""
    assert stored.generator_state is not None
    seeds = np.random.SeedSequence([seed, step]).spawn(count)
    returns = np.zeros(2 * count)
    with open_env(make_env) as first:
        actions = read_actions(stored.records.head(step + 1), first.action_space, squashed=squashed)
    contexts = [open_env(make_env) for _ in range(2 * count)]
    with preserve_rng_state():
        torch.manual_seed(seed)
        envs = [context.__enter__() for context in contexts]
        try:
            observations: list[Any] = [None] * len(envs)
            for position, env in enumerate(envs):
                observations[position], _ = reset_to(env, stored.generator_state)
                for action in actions[:step]:
                    observations[position] = env.step(action)[0]
                env.unwrapped.np_random = np.random.default_rng(seeds[position % count])
            alive, discount = list(range(len(envs))), 1.0
            for passed in range(LONGEST):
                chosen = _act(model, [observations[position] for position in alive])
                still = []
                for position, action in zip(alive, chosen, strict=True):
                    taken = actions[step] if passed == 0 and position < count else action
                    observation, reward, terminated, truncated, _ = envs[position].step(taken)
                    returns[position] += discount * float(reward)
                    observations[position] = observation
                    if truncated and not terminated:
                        returns[position] += discount * model.gamma * _value(model, observation)
                    if not (terminated or truncated):
                        still.append(position)
                alive, discount = still, discount * model.gamma
                if not alive:
                    break
            for position in alive:
                returns[position] += discount * _value(model, observations[position])
        finally:
            for context in reversed(contexts):
                context.__exit__(None, None, None)
    return returns


def _stack(observations: list[Any]) -> Any:
    if isinstance(observations[0], dict):
        return {name: np.stack([each[name] for each in observations]) for name in observations[0]}
    return np.stack([np.asarray(each) for each in observations])


def _act(model: Any, observations: list[Any]) -> NDArray[Any]:
    actions: NDArray[Any] = model.predict(_stack(observations), deterministic=False)[0]
    return actions


def _value(model: Any, observation: Any) -> float:
    with torch.no_grad():
        tensor, _ = model.policy.obs_to_tensor(_stack([observation]))
        return float(model.policy.predict_values(tensor))
