"""Environments by name, for training and for evaluation."""

from collections.abc import Mapping
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import load_env_creator
from gymnasium.wrappers import TransformObservation
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from whence.core import WhenceError, eval_mode, preserve_rng_state, suggest
from whence.sb3 import (
    EnvPoolVecEnv,
    RecordResets,
    evaluate_pool,
    find_object,
    make_pool,
    reuses_world,
    select_options,
    use_fresh_noise,
)
from whence.stored.agents.run_config import RunConfig

_READABLE = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
"""The spaces that SB3's policies observe; also as the parts of a Dict."""


def list_libraries(config: RunConfig) -> list[str]:
    """Return the libraries whose environments a run uses: the one it collects with, then another it evaluates with."""
    return list(dict.fromkeys([config.collect_with, *([config.evaluate_with] if config.eval_episodes else [])]))


def check_environment(config: RunConfig) -> gym.Space[Any]:
    """Make the environments of a run once and return the observation space.

    Raises:
        WhenceError: an id is not known (the nearest are listed), an environment cannot be made, or its observations
            lack the part to observe or are none that SB3 reads.
        Unsupported: EnvPool is not installed.
    """
    # EnvPool first: what it lacks needs no environment of Gymnasium's.
    spaces = {library: _read_space(config, library) for library in sorted(list_libraries(config))}
    return spaces[config.collect_with]


def _read_space(config: RunConfig, library: str) -> gym.Space[Any]:
    """Return the space of the observed part in one library's environment."""
    on_pool = library == "envpool"
    env = make_pool(config.env, config.pool_kwargs, 1, 0) if on_pool else make_env(config.env, config.env_kwargs)
    space: gym.Space[Any] = env.observation_space
    env.close()
    parts = dict(space.spaces) if isinstance(space, gym.spaces.Dict) else {}
    if config.observe is not None:
        if config.observe not in parts:
            known = ", ".join(parts) or f"a {type(space).__name__}"
            raise WhenceError(f"{config.env} has no part {config.observe!r} to observe; its observations are {known}.")
        return parts[config.observe]
    readable = [name for name, part in parts.items() if isinstance(part, _READABLE)]
    if not isinstance(space, _READABLE) and (not parts or len(readable) < len(parts)):
        remedy = "Register the environment with a wrapper that converts it."
        if readable:
            images = [name for name in readable if len(parts[name].shape or ()) == 3]
            remedy = f"Observe one part: --observe {(images or readable)[0]} (of {', '.join(readable)})."
        raise WhenceError(f"{config.env} observes a {space}, which Stable-Baselines3 does not read. {remedy}")
    return space


def make_env(
    name: str, kwargs: Mapping[str, Any], observe: str | None = None, *, checked: bool = True, **options: Any
) -> gym.Env[Any, Any]:
    """Return an environment by its name.

    Args:
        name: an id of Gymnasium's, module:Id, or module:function, of a function or class that makes one.
        kwargs: its arguments.
        observe: the part of dict observations to observe; None: all.
        checked: let Gymnasium check its first steps, and warn of them.
        options: further arguments, for an environment that takes them.

    Raises:
        WhenceError: it is not known, or its constructor or a wrapper's fails; the message names it.
    """
    module, _, attribute = name.rpartition(":")
    try:
        definitions = find_object(module) if module else None
        create = None if attribute in gym.registry else getattr(definitions, attribute, None)
        if create is not None:
            env = create(**kwargs, **select_options(create, options))
        else:
            entry = gym.spec(attribute).entry_point
            create = load_env_creator(entry) if isinstance(entry, str) else entry
            arguments = select_options(create, options) | dict(kwargs)
            env = gym.make(attribute, disable_env_checker=None if checked else True, **arguments)
    except gym.error.UnregisteredEnv:
        names = {each for each in gym.registry if ":" not in each and "/" not in each}
        raise WhenceError(
            f"No environment {name!r} is registered in Gymnasium; one of a package of its own is module:Id, and one "
            f"that a function makes is module:function.{suggest(name, names)}"
        ) from None
    except Exception as failure:
        raise WhenceError(
            f"The environment {name!r} cannot be made with {dict(kwargs)}: {type(failure).__name__}: {failure}"
        ) from failure
    if not isinstance(env, gym.Env):
        raise WhenceError(
            f"{name} returns a {type(env).__name__}; one environment of Gymnasium's in its wrappers is needed."
        )
    return env if observe is None else observe_part(env, observe)


def _make_env(config: RunConfig, *, checked: bool = True) -> gym.Env[Any, Any]:
    return make_env(config.env, config.env_kwargs, config.observe, checked=checked)


def make_training_env(config: RunConfig) -> VecEnv:
    """Return the environments to collect from; Gymnasium's note what is needed to play their episodes again."""
    if config.collect_with == "envpool":
        return EnvPoolVecEnv(config.env, config.pool_kwargs, config.n_envs, config.seed, config.observe)
    return DummyVecEnv([lambda: Monitor(RecordResets(_make_env(config)))] * config.n_envs)


def make_evaluation_env(config: RunConfig, episodes: int) -> VecEnv:
    """Return Gymnasium's environments to evaluate on."""

    def make() -> gym.Env[Any, Any]:
        return Monitor(renew_world(_make_env(config, checked=False)))

    return DummyVecEnv([make] * min(64, episodes))


def renew_world(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Return an environment to evaluate on, in which no episode depends on those before it.

    A BipedalWalker keeps its Box2D world from episode to episode, so it gets a new one for each.
    """
    return RecordResets(env) if reuses_world(env.unwrapped) else env


def observe_part(env: gym.Env[Any, Any], part: str) -> gym.Env[Any, Any]:
    """Return an environment of which a part of the dict observations is observed."""
    space: Any = env.observation_space
    return TransformObservation(env, itemgetter(part), space[part])


def evaluate(model: BaseAlgorithm, env: VecEnv, *, episodes: int, seed: int) -> tuple[float, float]:
    """Return the mean return over episodes of sampled actions, and its standard error.

    Environments and torch's generator are seeded, so the same policy gives the same figures. The global generators and
    the policy's mode and noise are restored afterwards.
    """
    envs, masked = np.arange(env.num_envs), isinstance(model.policy, MaskableActorCriticPolicy)
    with preserve_rng_state(), eval_mode(model.policy.modules()), use_fresh_noise(model, len(envs)) as renew:

        def predict(observation: Any, state: Any, episode_start: Any, deterministic: bool) -> Any:
            renew(envs, episode_start)
            masks = {"action_masks": np.stack(env.env_method("action_masks"))} if masked else {}
            return model.predict(observation, state, episode_start, deterministic, **masks)

        torch.manual_seed(seed)
        env.seed(seed)
        playing: Any = SimpleNamespace(predict=predict)
        episode_returns, _ = evaluate_policy(playing, env, episodes, deterministic=False, return_episode_rewards=True)
    returns = np.asarray(episode_returns)
    return float(np.mean(returns)), float(np.std(returns, ddof=1) / np.sqrt(len(returns)))


def measure_return(
    config: RunConfig | None, model: BaseAlgorithm, env: VecEnv | None, *, episodes: int, seed: int
) -> tuple[float, float]:
    """Return a model's mean test return and its standard error; without `env`, in `config`'s EnvPool environments."""
    if env is not None:
        return evaluate(model, env, episodes=episodes, seed=seed)
    assert config is not None
    # EnvPool's seeds have 31 bits.
    returns = evaluate_pool(
        model, config.env, config.pool_kwargs, episodes=episodes, seed=seed >> 1, key=config.observe
    )
    return float(returns.mean()), float(returns.std(ddof=1) / np.sqrt(len(returns)))
