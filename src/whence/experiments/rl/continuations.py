"""Advantages measured by going on from a record many times with the policy that collected it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy

from whence.core import ReplayError, preserve_rng_state
from whence.experiments.rl.stored import AnyEnv, is_squashed, load_model, make_replay_env, reads_raw_observations
from whence.runs import RunDirectory
from whence.sb3 import (
    RecordResets,
    StoredEpisode,
    open_env,
    play_again,
    read_episode,
    reset_to,
    use_fresh_noise,
)

LONGEST = 10_000
"""Steps after which a continuation is cut off and the critic's value taken for the rest."""

OnRecord = Callable[[int, int], None]
"""Called with the number of records that are measured, and of all."""

OnStep = Callable[[], None]
"""Called between steps; what it raises ends the work."""

_SCHEMA = {"record_id": pl.Int64} | dict.fromkeys(
    ("mc_advantage", "mc_error", "mc_value", "mc_value_error"), pl.Float64
)


def estimate_advantages(
    run: RunDirectory | str | Path,
    number: int,
    records: Sequence[int],
    *,
    env: AnyEnv = None,
    continuations: int = 16,
    seed: int = 0,
    on_record: OnRecord | None = None,
    on_step: OnStep | None = None,
) -> pl.DataFrame:
    """Estimate records' advantages under the round's policy from fresh continuations, with standard errors.

    Each episode is played again and checked against what was stored. From a record each continuation goes on twice with
    the same randomness of the environment: once with the record's action first, once with the policy's. The estimate is
    the mean difference of the discounted returns. What a record's estimate is does not depend on the other records.
    Under gSDE each continuation has noise of its own; under MaskablePPO its environment says which actions it allows.

    Args:
        run: the run, or its directory.
        number: the round.
        records: their ids.
        env: see `replay_episode`.
        continuations: at least 2.
        seed: with the record's id, seeds environments and actions from the record on.
        on_record: called after each record.
        on_step: called before each step of the continuations; what it raises ends the estimate.

    Returns:
        A row for each record, in their order: `record_id`, `mc_advantage`, `mc_error`, and the value of the state by
        the continuations that follow the policy, `mc_value` with `mc_value_error`.

    Raises:
        ReplayError: an episode cannot be played again up to a record, observations were normalised, or the environment
            fails, as one without the action masks that the policy reads.
        RunDirectoryError: the policy cannot be built again.
    """
    run = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
    if continuations < 2:
        raise ReplayError(f"continuations is {continuations}; at least 2 are needed for an error.")
    if not reads_raw_observations(run):
        raise ReplayError("The policy reads normalised or stacked observations, which continuations do not rebuild.")
    by_episode = _group_by_episode(run, number, records)
    model, make_env = load_model(run, number, env=env), make_replay_env(run, env)
    rows: dict[int, tuple[float, ...]] = {}
    with ExitStack() as stack:
        # In each pair of environments one goes on with the record's action, the other with the policy's.
        envs = [stack.enter_context(open_env(make_env)) for _ in range(2 * continuations)]
        for episode, steps in by_episode.items():
            stored = read_episode(run, episode, near=number)
            replay = play_again(make_env, stored, last_step=max(steps.values()), squashed=is_squashed(run))
            if replay.mismatch is not None:
                raise ReplayError(replay.mismatch)
            for record, step in sorted(steps.items(), key=lambda item: item[1]):
                observations = [_play_to(env, stored, replay.actions[:step]) for env in envs]
                seeds = np.random.SeedSequence([seed, record])
                inner = [env.env for env in envs]
                rows[record] = _summarise(_continue(model, inner, observations, replay.actions[step], seeds, on_step))
                if on_record is not None:
                    on_record(len(rows), len(records))
    return pl.DataFrame([(record, *rows[record]) for record in records], schema=_SCHEMA, orient="row")


def _group_by_episode(run: RunDirectory, number: int, records: Sequence[int]) -> dict[int, dict[int, int]]:
    """Return the records' steps, by episode and record; refuse a record whose place in an episode is not known."""
    table = run.round("records", number)
    places = {record: place for record, *place in table.select("record_id", "episode_id", "step").iter_rows()}
    grouped: dict[int, dict[int, int]] = {}
    for record in records:
        if record not in places:
            raise ReplayError(f"Record {record} is not in round {number} of {run.path}.")
        episode, step = places[record]
        if episode is None or step is None:
            raise ReplayError(
                f"Record {record} of {run.path} has no known place in an episode, so its state cannot be rebuilt. Take "
                "a record of an episode that began in the run."
            )
        grouped.setdefault(episode, {})[record] = step
    return grouped


def _summarise(returns: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """Return the mean of the paired differences and of the policy's returns, each with its standard error."""
    pairs = len(returns) // 2
    numbers: list[float] = []
    for values in (returns[:pairs] - returns[pairs:], returns[pairs:]):
        numbers += [float(values.mean()), float(values.std(ddof=1) / np.sqrt(pairs))]
    return numbers[0], numbers[1], numbers[2], numbers[3]


def _play_to(env: RecordResets, stored: StoredEpisode, actions: NDArray[Any]) -> Any:
    """Play an episode's first actions again, and return the last observation."""
    assert stored.generator_state is not None  # else it was not played again before
    observation, _ = reset_to(env, stored.generator_state)
    for action in actions:
        observation = env.env.step(action)[0]
    return observation


def _continue(
    model: Any,
    envs: list[gym.Env[Any, Any]],
    observations: list[Any],
    first_action: Any,
    seeds: np.random.SeedSequence,
    on_step: OnStep | None,
) -> NDArray[np.float64]:
    """Return the discounted returns of continuations from a record's state, one in each of 2n environments.

    The first n begin with an action; the seed of each is also that of one of the others.
    """
    half = len(envs) // 2
    *env_seeds, action_seed = seeds.spawn(half + 1)
    returns = np.zeros(len(envs))
    for position, env in enumerate(envs):
        env.unwrapped.np_random = np.random.default_rng(env_seeds[position % half])
    alive, discount = list(range(len(envs))), 1.0
    with preserve_rng_state(), use_fresh_noise(model, len(envs)) as renew_noise:
        torch.manual_seed(int(action_seed.generate_state(1)[0]))
        for passed in range(LONGEST):
            if on_step is not None:
                on_step()
            renew_noise(np.array(alive), np.full(len(alive), passed == 0))
            chosen = _act(model, [envs[position] for position in alive], [observations[each] for each in alive])
            still = []
            for position, action in zip(alive, chosen, strict=True):
                taken = first_action if passed == 0 and position < half else action
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
    return returns


def _stack(observations: list[Any]) -> Any:
    if isinstance(observations[0], dict):
        return {name: np.stack([each[name] for each in observations]) for name in observations[0]}
    return np.stack([np.asarray(each) for each in observations])


def _act(model: Any, envs: list[gym.Env[Any, Any]], observations: list[Any]) -> NDArray[Any]:
    masks = {}
    if isinstance(model.policy, MaskableActorCriticPolicy):
        masks["action_masks"] = np.stack([env.get_wrapper_attr("action_masks")() for env in envs])
    actions: NDArray[Any] = model.predict(_stack(observations), deterministic=False, **masks)[0]
    return actions


def _value(model: Any, observation: Any) -> float:
    with torch.no_grad():
        tensor, _ = model.policy.obs_to_tensor(_stack([observation]))
        return float(model.policy.predict_values(tensor))
