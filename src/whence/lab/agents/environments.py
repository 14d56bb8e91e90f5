"""The environments of a run, and the policy that suits what they show."""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from whence.core import WhenceError
from whence.lab.agents.envpool import EnvPoolVecEnv
from whence.lab.agents.run_config import RunConfig
from whence.sb3 import MiniGridCNN, Pool, RecordResets
from whence.stored.agents import make_env, renew_world

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
    env = _pool_of(config).make(1, 0) if library == "envpool" else make_env(config.env, config.env_kwargs)
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


def _pool_of(config: RunConfig) -> Pool:
    return Pool(config.env, config.pool_kwargs, config.observe)


def make_training_env(config: RunConfig) -> VecEnv:
    """Return the environments to collect from; Gymnasium's note what is needed to play their episodes again."""
    if config.collect_with == "envpool":
        return EnvPoolVecEnv(_pool_of(config), config.n_envs, config.seed)

    def make() -> gym.Env[Any, Any]:
        return Monitor(RecordResets(make_env(config.env, config.env_kwargs, config.observe)))

    return DummyVecEnv([make] * config.n_envs)


def make_evaluation_env(config: RunConfig, episodes: int) -> VecEnv | Pool:
    """Return the environments to evaluate on, for `measure_return`."""
    if config.evaluate_with == "envpool":
        return _pool_of(config)

    def make() -> gym.Env[Any, Any]:
        return Monitor(renew_world(make_env(config.env, config.env_kwargs, config.observe, checked=False)))

    return DummyVecEnv([make] * min(64, episodes))


_SMALLEST = {"NatureCNN": 36, "MiniGridCNN": 5}
"""The least height and width, in pixels, that the convolutions leave anything of."""


def default_policy(space: gym.Space[Any]) -> str:
    """Return SB3's name of the policy for an observation space."""
    if isinstance(space, gym.spaces.Dict):
        return "MultiInputPolicy"
    if isinstance(space, gym.spaces.Box) and is_image_space(space):
        return "CnnPolicy" if _read_image_size(space) >= _SMALLEST["MiniGridCNN"] else "MlpPolicy"
    return "MlpPolicy"


def default_policy_kwargs(policy: str, policy_kwargs: Mapping[str, Any], space: gym.Space[Any]) -> dict[str, Any]:
    """Return a policy's arguments, with LDA's MiniGrid network if the images are too small for SB3's NatureCNN.

    A features extractor that `policy_kwargs` names stays.
    """
    if policy == "CnnPolicy" and isinstance(space, gym.spaces.Box) and is_image_space(space):
        size = _read_image_size(space)
        if _SMALLEST["MiniGridCNN"] <= size < _SMALLEST["NatureCNN"]:
            return {"features_extractor_class": MiniGridCNN.__name__, **policy_kwargs}
    return dict(policy_kwargs)


def _read_image_size(space: gym.spaces.Box) -> int:
    """Return the smaller of an image's height and width."""
    height_and_width = space.shape[1:] if is_image_space_channels_first(space) else space.shape[:2]
    return min(height_and_width)
