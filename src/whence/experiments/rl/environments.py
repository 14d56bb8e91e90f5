"""Environments by name, for training and for evaluation."""

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers import TransformObservation
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from whence.errors import Unsupported, WhenceError, suggest
from whence.experiments.rl.config import RunConfig
from whence.guards import eval_mode, preserve_rng_state
from whence.sb3 import (
    EnvPoolVecEnv,
    MaskableActorCriticPolicy,
    RecordResets,
    evaluate_pool,
    make_pool,
    reuses_world,
    use_fresh_noise,
)

_READABLE = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
"""The spaces that SB3's policies observe; also as the parts of a Dict."""

_PACKAGES = {"Box2D": "gymnasium[box2d]", "minigrid": "minigrid", "highway_env": "highway-env"}
"""For modules that environments need or are in: what pip installs."""

_MODULES = {"MiniGrid": "minigrid", "BabyAI": "minigrid", "highway": "highway_env"}
"""The module that registers an environment, by the first word of the environment's id."""


def list_libraries(config: RunConfig) -> list[str]:
    """Return the libraries whose environments a run uses: the one it collects with, then another it evaluates with."""
    return list(dict.fromkeys([config.collect_with, *([config.evaluate_with] if config.eval_episodes else [])]))


def check_environment(config: RunConfig) -> gym.Space[Any]:
    """Make the environments of a run once and return the observation space.

    Raises:
        WhenceError: an id is not known (the nearest are listed), an environment cannot be made, its observations lack
            the part to observe or are none that SB3 reads, or one policy cannot serve both the environments it is
            trained in and those it is evaluated in.
        Unsupported: EnvPool, or a package that an environment needs, is not installed.
    """
    # EnvPool first: what it lacks needs no environment of Gymnasium's.
    spaces = {library: _read_spaces(config, library) for library in sorted(list_libraries(config))}
    if len(spaces) > 1:
        for what, mine, other in zip(("observations", "actions"), spaces["gymnasium"], spaces["envpool"], strict=True):
            if _describe_form(mine) != _describe_form(other):
                raise WhenceError(
                    f"The {what} of {config.env} are {mine} in Gymnasium with {dict(config.env_kwargs)} and {other} in "
                    f"EnvPool with {dict(config.pool_kwargs)}: one policy cannot play in both. Make env_kwargs and "
                    "pool_kwargs say the same."
                )
    return spaces[config.collect_with][0]


def _read_spaces(config: RunConfig, library: str) -> tuple[gym.Space[Any], gym.Space[Any]]:
    """Return the spaces of the observed part and of the actions, in one library's environment."""
    env = make_pool(config.env, config.pool_kwargs, 1, 0) if library == "envpool" else _make_gymnasium(config)
    observations, actions = env.observation_space, env.action_space
    env.close()
    if config.observe is not None:
        if not isinstance(observations, gym.spaces.Dict) or config.observe not in observations.spaces:
            kind = f"a {type(observations).__name__}"
            parts = ", ".join(observations) if isinstance(observations, gym.spaces.Dict) else kind
            raise WhenceError(f"{config.env} has no part {config.observe!r} to observe; its observations are {parts}.")
        observations = observations[config.observe]
    _check_readable(config, observations)
    return observations, actions


def _check_readable(config: RunConfig, space: gym.Space[Any]) -> None:
    """Refuse observations that no policy of SB3 reads."""
    parts = dict(space.spaces) if isinstance(space, gym.spaces.Dict) else {"observation": space}
    readable = [name for name, part in parts.items() if isinstance(part, _READABLE)]
    if unreadable := [name for name in parts if name not in readable]:
        name = unreadable[0]
        remedy = "Register the environment with a wrapper that converts it."
        if readable:
            images = [other for other in readable if len(parts[other].shape or ()) == 3]
            remedy = f"Observe one part: --observe {(images or readable)[0]} (of {', '.join(readable)})."
        raise WhenceError(
            f"{config.env} observes {', '.join(parts)}, and {name} is a {type(parts[name]).__name__}, which "
            f"Stable-Baselines3 does not read. {remedy}"
        )


def _make_gymnasium(config: RunConfig, **options: Any) -> gym.Env[Any, Any]:
    """Return Gymnasium's environment of a run.

    Raises:
        WhenceError: Gymnasium does not know it, or its constructor or a wrapper's fails; the message names it.
        Unsupported: a package that it needs is not installed.
    """
    try:
        return gym.make(config.env, **{**config.env_kwargs, **options})
    except gym.error.UnregisteredEnv:
        known = {name for name in gym.registry if ":" not in name and "/" not in name}
        module = _MODULES.get(config.env.partition("-")[0])
        hint = "" if module is None else f" It lies in a module of its own: name it {module}:{config.env}."
        raise WhenceError(
            f"No environment {config.env!r} is registered in Gymnasium.{hint or suggest(config.env, known)}"
        ) from None
    except Exception as failure:
        if (module := _find_missing_module(failure)) in _PACKAGES:
            raise Unsupported(
                f"The environment {config.env!r} needs {module}, which is not installed: "
                f"pip install '{_PACKAGES[module]}'."
            ) from failure
        raise WhenceError(
            f"The environment {config.env!r} cannot be made with {dict(config.env_kwargs)}: "
            f"{type(failure).__name__}: {failure}"
        ) from failure


def _find_missing_module(failure: BaseException | None) -> str:
    """Return the module whose absence led to a failure; "" if none did."""
    while failure is not None:
        if isinstance(failure, ModuleNotFoundError) and failure.name:
            return failure.name.partition(".")[0]
        failure = failure.__cause__
    return ""


def _describe_form(space: gym.Space[Any]) -> Any:
    """Return what two spaces must share for one policy to serve both: bounds and sizes of numbers may differ."""
    if isinstance(space, gym.spaces.Dict):
        return {key: _describe_form(part) for key, part in space.items()}
    if isinstance(space, gym.spaces.Discrete):
        return "Discrete", int(space.n), int(space.start)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return "MultiDiscrete", space.nvec.tolist()
    return type(space).__name__, space.shape, None if space.dtype is None else np.dtype(space.dtype).kind


def make_training_env(config: RunConfig) -> VecEnv:
    """Return the environments to collect from; Gymnasium's note what is needed to play their episodes again."""
    if config.collect_with == "envpool":
        return EnvPoolVecEnv(config.env, config.pool_kwargs, config.n_envs, config.seed, config.observe)
    return DummyVecEnv([lambda: Monitor(RecordResets(make_env(config)))] * config.n_envs)


def make_evaluation_env(config: RunConfig, episodes: int) -> VecEnv:
    """Return Gymnasium's environments to evaluate on."""

    def make() -> gym.Env[Any, Any]:
        return Monitor(renew_world(make_env(config, disable_env_checker=True)))

    return DummyVecEnv([make] * min(64, episodes))


def renew_world(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Return an environment to evaluate on, in which no episode depends on those before it.

    A BipedalWalker keeps its Box2D world from episode to episode, so it gets a new one for each.
    """
    return RecordResets(env) if reuses_world(env.unwrapped) else env


def make_model_env(config: RunConfig) -> VecEnv:
    """Return one environment of the library that a run collects with, to build its model on; no step is taken."""
    if config.collect_with == "envpool":
        return EnvPoolVecEnv(config.env, config.pool_kwargs, 1, config.seed, config.observe)
    return make_evaluation_env(config, 1)


def make_env(config: RunConfig, **options: Any) -> gym.Env[Any, Any]:
    """Return Gymnasium's environment of a run, which shows the part to observe."""
    env = _make_gymnasium(config, **options)
    if (key := config.observe) is None:
        return env
    assert isinstance(env.observation_space, gym.spaces.Dict)  # `check_environment` has refused another
    return TransformObservation(env, lambda observation: observation[key], env.observation_space[key])


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
    config: RunConfig, model: BaseAlgorithm, env: VecEnv | None, *, episodes: int, seed: int
) -> tuple[float, float]:
    """Return a model's mean test return and its standard error, with the library that the run evaluates with.

    Args:
        config: the run.
        model: holds the policy to test.
        env: from `make_evaluation_env`; None: EnvPool's environments are used.
        episodes: at least 2.
        seed: seeds environments and actions; below 2**32.
    """
    if env is not None:
        return evaluate(model, env, episodes=episodes, seed=seed)
    # EnvPool's seeds have 31 bits.
    returns = evaluate_pool(
        model, config.env, config.pool_kwargs, episodes=episodes, seed=seed >> 1, key=config.observe
    )
    return float(returns.mean()), float(returns.std(ddof=1) / np.sqrt(len(returns)))
