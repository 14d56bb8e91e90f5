"""Advantages measured by going on from a record many times with the policy that collected it."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs

from whence.core import ReplayError, map_tree, preserve_rng_state
from whence.runs import RunDirectory
from whence.sb3.episodes import StoredEpisode, open_env, read_episode, reseed, to_env_actions, use_fresh_noise
from whence.sb3.models import is_recurrent, repeat_states, zero_states
from whence.stored.agents.custom_agents import refuse_custom
from whence.stored.agents.replaying import AnyEnv, LockstepEnvs, make_lockstep, replay_exactly
from whence.stored.agents.rounds import load_agent, read_reward_scale

LONGEST = 10_000
"""Steps after which a continuation is cut off and the critic's value taken for the rest."""

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
    on_step: OnStep | None = None,
) -> pl.DataFrame:
    """Estimate records' advantages under the round's policy from fresh continuations, with standard errors.

    Each episode is played again and checked against what was stored. From a record each continuation goes on twice with
    the same randomness of the environment: once with the record's action first, once with the policy's. The estimate is
    the mean difference of the discounted returns. What a record's estimate is does not depend on the other records.
    Under gSDE each continuation has noise of its own; under MaskablePPO its environment says which actions it allows.
    The policy sees what its wrappers make of true states: stacked frames, and observations that VecNormalize normalises
    by the round's statistics. A recurrent policy goes on in the memory that it had at the record. Rewards and values
    are in the environment's units; see `read_reward_scale`.

    Args:
        run: the run, or its directory.
        number: the round.
        records: their ids.
        env: see `replay_episode`.
        continuations: at least 2.
        seed: with the record's id, seeds environments and actions from the record on.
        on_step: called before each step of the continuations; what it raises ends the estimate.

    Returns:
        A row for each record, in their order: `record_id`, `mc_advantage`, `mc_error`, and the value of the state by
        the continuations that follow the policy, `mc_value` with `mc_value_error`.

    Raises:
        ReplayError: an episode cannot be played again up to a record, a wrapper cannot be made again, or the
            environment fails, as one without the action masks that the policy reads.
        RunDirectoryError: the policy cannot be built again.
    """
    run = run if isinstance(run, RunDirectory) else RunDirectory.open(run)
    if continuations < 2:
        raise ReplayError(f"continuations is {continuations}; at least 2 are needed for an error.")
    refuse_custom(run, "act with its policy", "Its stored scores and advantages need no fresh rollouts.")
    by_episode = _group_by_episode(run, number, records)
    model, scale = load_agent(run, number, env=env), read_reward_scale(run, number)
    rows: dict[int, tuple[float, ...]] = {}
    episodes = {episode: read_episode(run, episode, near=number) for episode in by_episode}
    for index in sorted({stored.env_index for stored in episodes.values()}):
        # In each pair of environments one goes on with the record's action, the other with the policy's.
        make_envs = partial(make_lockstep, run, env, 2 * continuations, number, index=index)
        with open_env(make_envs) as envs:
            lockstep = envs.unwrapped
            assert isinstance(lockstep, LockstepEnvs)
            for stored in (each for each in episodes.values() if each.env_index == index):
                steps = by_episode[stored.episode_id]
                replay = replay_exactly(run, stored, max(steps.values()), env=env)
                assert stored.generator_state is not None  # else it was not played again
                begin, remembered = _read_memory(run, number, model, stored, envs.num_envs)
                for record, step in sorted(steps.items(), key=lambda item: item[1]):
                    lockstep.state = stored.generator_state
                    observations = envs.reset()
                    memory = copy.deepcopy(remembered)
                    for passed, action in enumerate(replay.actions[:step]):
                        if memory is not None and passed >= begin:
                            _act_from(memory, model, lockstep.alive, observations)
                        observations = envs.step([action] * envs.num_envs)[0]  # type: ignore[arg-type]
                    *env_seeds, action_seed = np.random.SeedSequence([seed, record]).spawn(continuations + 1)
                    last_action = replay.actions[step - 1] if step else None
                    for position, world in enumerate(lockstep.worlds):
                        reseed(world, env_seeds[position % continuations], last_action)
                    first = replay.actions[step]
                    returns = _continue(model, envs, observations, first, action_seed, scale, on_step, memory)
                    rows[record] = _summarise(returns)
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


def _read_memory(
    run: RunDirectory, number: int, model: Any, stored: StoredEpisode, count: int
) -> tuple[int, RNNStates | None]:
    """Return the step with which an episode enters a round, and a recurrent policy's memory there, `count` times."""
    if not is_recurrent(model.policy):
        return 0, None
    steps = run.round("records", number).filter(pl.col("episode_id") == stored.episode_id)["step"]
    begin = int(steps.min())  # type: ignore[arg-type]
    if begin == 0:
        return begin, zero_states(model.policy, count)
    return begin, repeat_states(run.policy(number, name="states"), stored.env_index, count)


def _summarise(returns: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """Return the mean of the paired differences and of the policy's returns, each with its standard error."""
    pairs = len(returns) // 2
    values = np.stack([returns[:pairs] - returns[pairs:], returns[pairs:]])
    (mean, value), (error, value_error) = values.mean(1), values.std(1, ddof=1) / np.sqrt(pairs)
    return float(mean), float(error), float(value), float(value_error)


def _continue(
    model: Any,
    envs: VecEnv,
    observations: VecEnvObs,
    first_action: Any,
    action_seed: np.random.SeedSequence,
    scale: float,
    on_step: OnStep | None,
    memory: RNNStates | None,
) -> NDArray[np.float64]:
    """Return the discounted returns of continuations from a record's state, one in each of 2n environments.

    The first n begin with an action. `scale` is how many of the environment's rewards are one of the policy's values.
    `memory` is a recurrent policy's at the record, and goes on.
    """
    lockstep, half = envs.unwrapped, envs.num_envs // 2
    assert isinstance(lockstep, LockstepEnvs)
    returns = np.zeros(envs.num_envs)
    discount = 1.0
    with preserve_rng_state(), use_fresh_noise(model, envs.num_envs) as renew_noise:
        torch.manual_seed(int(action_seed.generate_state(1)[0]))
        for passed in range(LONGEST):
            if on_step is not None:
                on_step()
            alive = lockstep.alive
            renew_noise(alive, np.full(len(alive), passed == 0))
            actions: list[Any] = [None] * envs.num_envs
            chosen = _act(model, lockstep, alive, observations, memory)
            for position, action in zip(alive, chosen, strict=True):
                actions[position] = first_action if passed == 0 and position < half else action
            observations, rewards, _, _ = envs.step(actions)  # type: ignore[arg-type]
            returns += discount * rewards
            discount *= model.gamma
            for position in alive[(lockstep.truncated & ~lockstep.terminated)[alive]]:
                returns[position] += discount * scale * _value(model, observations, position, memory)
            if not len(lockstep.alive):
                break
        for position in lockstep.alive:
            returns[position] += discount * scale * _value(model, observations, position, memory)
    return returns


def _act(
    model: Any, lockstep: LockstepEnvs, alive: NDArray[np.int64], observations: Any, memory: RNNStates | None
) -> NDArray[Any]:
    if memory is not None:
        return _act_from(memory, model, alive, observations)
    is_masked = isinstance(model.policy, MaskableActorCriticPolicy)
    masks = {"action_masks": lockstep.read_masks(alive)} if is_masked else {}
    actions: NDArray[Any] = model.predict(_take(observations, alive), deterministic=False, **masks)[0]
    return actions


def _act_from(memory: RNNStates, model: Any, alive: NDArray[np.int64], observations: Any) -> NDArray[Any]:
    """Return a recurrent policy's actions in some environments, and let its memory, of all of them, go on."""
    policy = model.policy
    policy.set_training_mode(False)
    with torch.no_grad():
        tensor, _ = policy.obs_to_tensor(_take(observations, alive))
        states = RNNStates(*(tuple(each[:, alive] for each in pair) for pair in memory))
        actions, _, _, after = policy.forward(tensor, states, torch.zeros(len(alive)))
    for before, now in zip(chain(*memory), chain(*after), strict=True):
        before[:, alive] = now
    return to_env_actions(actions.numpy(), model.action_space, squashed=False)  # see `is_squashed`


def _value(model: Any, observations: Any, position: int, memory: RNNStates | None) -> float:
    with torch.no_grad():
        tensor, _ = model.policy.obs_to_tensor(_take(observations, np.array([position])))
        states = [] if memory is None else [tuple(each[:, [position]] for each in memory.vf), torch.zeros(1)]
        return float(model.policy.predict_values(tensor, *states))


def _take(observations: Any, indices: NDArray[np.int64]) -> Any:
    return map_tree(lambda part: part[indices], observations)
