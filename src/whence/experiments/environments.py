"""Environments by name, for training and for evaluation."""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from whence.errors import WhenceError, nearest
from whence.guards import eval_mode, kept_generators
from whence.sb3 import RecordResets


def check_environment(env: str, kwargs: Mapping[str, Any]) -> gym.Space[Any]:
    """Make the environment once and return its observation space.

    Raises:
        WhenceError: the id is not registered (the nearest are given), or the environment cannot be made.
    """
    try:
        made = gym.make(env, **kwargs)
    except gym.error.UnregisteredEnv:
        known = {name for name in gym.registry if ":" not in name and "/" not in name}
        raise WhenceError(f"No environment {env!r} is registered in Gymnasium.{nearest(env, known)}") from None
    except Exception as failure:
        raise WhenceError(f"The environment {env!r} cannot be made with {dict(kwargs)}: {failure}") from failure
    space = made.observation_space
    made.close()
    return space


def default_policy(space: gym.Space[Any]) -> str:
    """Return SB3's name of the policy for an observation space."""
    if isinstance(space, gym.spaces.Dict):
        return "MultiInputPolicy"
    return "CnnPolicy" if is_image_space(space) else "MlpPolicy"


def training_env(env: str, kwargs: Mapping[str, Any], n_envs: int) -> VecEnv:
    """Return environments to collect from, which tell how to play their episodes again."""
    return DummyVecEnv([lambda: Monitor(RecordResets(gym.make(env, **kwargs)))] * n_envs)


def evaluation_env(env: str, kwargs: Mapping[str, Any], episodes: int) -> VecEnv:
    """Return environments to evaluate on."""
    make = lambda: Monitor(gym.make(env, disable_env_checker=True, **kwargs))  # noqa: E731
    return DummyVecEnv([make] * min(64, episodes))


def evaluate(model: BaseAlgorithm, env: VecEnv, *, episodes: int, seed: int) -> tuple[float, float]:
    """Return the mean return over episodes of sampled actions, and its standard error.

    Environments and torch's generator are seeded, so the same policy gives the same figures; the global generators and
    the policy's mode are as before afterwards.
    """
    with kept_generators(), eval_mode(model.policy.modules()):
        torch.manual_seed(seed)
        env.seed(seed)
        found, _ = evaluate_policy(model, env, episodes, deterministic=False, return_episode_rewards=True)
    returns = np.asarray(found)
    return float(np.mean(returns)), float(np.std(returns, ddof=1) / np.sqrt(len(returns)))
