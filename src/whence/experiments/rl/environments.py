"""Environments by name, for training and for evaluation."""

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from whence.errors import Unsupported, WhenceError, suggest
from whence.experiments.rl.config import RunConfig
from whence.guards import eval_mode, preserve_rng_state
from whence.sb3 import RecordResets
from whence.sb3.envpool import EnvPoolVecEnv, evaluate_pool, make_pool
from whence.sb3.gsde import use_fresh_noise


def list_libraries(config: RunConfig) -> list[str]:
    """Return whose environments a run is played in: the library it collects with, then another it evaluates with."""
    return list(dict.fromkeys([config.collect_with, *([config.evaluate_with] if config.eval_episodes else [])]))


def check_environment(config: RunConfig) -> gym.Space[Any]:
    """Make the environments of a run once and return the observation space.

    Raises:
        WhenceError: an id is not known (the nearest are given), an environment cannot be made, its observations lack
            the part to observe, or one policy cannot serve both the environments it is trained in and those it is
            evaluated in.
        Unsupported: EnvPool, or a package that an environment needs, is not installed.
    """
    # EnvPool first: what it does not have needs no environment of Gymnasium's.
    spaces = {library: _spaces(config, library) for library in sorted(list_libraries(config))}
    if len(spaces) > 1:
        for what, mine, other in zip(("observations", "actions"), spaces["gymnasium"], spaces["envpool"], strict=True):
            if _form(mine) != _form(other):
                raise WhenceError(
                    f"The {what} of {config.env} are {mine} in Gymnasium with {dict(config.env_kwargs)} and {other} in "
                    f"EnvPool with {dict(config.pool_kwargs)}: one policy cannot play in both. Make env_kwargs and "
                    "pool_kwargs say the same."
                )
    return spaces[config.collect_with][0]


def _spaces(config: RunConfig, library: str) -> tuple[gym.Space[Any], gym.Space[Any]]:
    """Return the spaces of what is observed and of the actions, in one library's environment."""
    made = _trial_pool(config) if library == "envpool" else _trial(config)
    observed, actions = made.observation_space, made.action_space
    made.close()
    if config.observe is None:
        return observed, actions
    if not isinstance(observed, gym.spaces.Dict) or config.observe not in observed.spaces:
        there = ", ".join(observed) if isinstance(observed, gym.spaces.Dict) else f"a {type(observed).__name__}"
        raise WhenceError(f"{config.env} has no part {config.observe!r} to observe; its observations are {there}.")
    return observed[config.observe], actions


def _trial_pool(config: RunConfig) -> Any:
    try:
        return make_pool(config.env, config.pool_kwargs, 1, 0)
    except Unsupported as missing:
        asked = [name for name in ("collect_with", "evaluate_with") if getattr(config, name) == "envpool"]
        instead = " ".join(f"--set {name}=gymnasium" for name in asked)
        raise Unsupported(f"{missing} Or play in Gymnasium's environments: {instead}.") from missing


_PACKAGES = {"Box2D": "gymnasium[box2d]", "minigrid": "minigrid", "highway_env": "highway-env"}
"""What pip installs by a module that environments need, or lie in."""

_MODULES = {"MiniGrid": "minigrid", "BabyAI": "minigrid", "highway": "highway_env"}
"""In which module environments lie, by the first word of their ids."""


def _trial(config: RunConfig) -> gym.Env[Any, Any]:
    try:
        return gym.make(config.env, **config.env_kwargs)
    except gym.error.UnregisteredEnv:
        known = {name for name in gym.registry if ":" not in name and "/" not in name}
        module = _MODULES.get(config.env.partition("-")[0])
        hint = "" if module is None else f" It lies in a module of its own: name it {module}:{config.env}."
        raise WhenceError(
            f"No environment {config.env!r} is registered in Gymnasium.{hint or suggest(config.env, known)}"
        ) from None
    except Exception as failure:
        if (module := _missing(failure)) in _PACKAGES:
            raise Unsupported(
                f"The environment {config.env!r} needs {module}, which is not installed: "
                f"pip install '{_PACKAGES[module]}'."
            ) from failure
        kwargs = dict(config.env_kwargs)
        raise WhenceError(f"The environment {config.env!r} cannot be made with {kwargs}: {failure}") from failure


def _missing(failure: BaseException | None) -> str:
    """Return the module whose absence led to a failure; nothing where none did."""
    while failure is not None:
        if isinstance(failure, ModuleNotFoundError) and failure.name:
            return failure.name.partition(".")[0]
        failure = failure.__cause__
    return ""


def _form(space: gym.Space[Any]) -> Any:
    """Return what two spaces must share for one policy to serve both: bounds and sizes of numbers may differ."""
    if isinstance(space, gym.spaces.Dict):
        return {key: _form(part) for key, part in space.items()}
    if isinstance(space, gym.spaces.Discrete):
        return "Discrete", int(space.n), int(space.start)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return "MultiDiscrete", space.nvec.tolist()
    return type(space).__name__, space.shape, None if space.dtype is None else np.dtype(space.dtype).kind


def default_policy(space: gym.Space[Any]) -> str:
    """Return SB3's name of the policy for an observation space."""
    if isinstance(space, gym.spaces.Dict):
        return "MultiInputPolicy"
    return "CnnPolicy" if is_image_space(space) else "MlpPolicy"


def make_training_env(config: RunConfig) -> VecEnv:
    """Return environments to collect from; Gymnasium's tell how to play their episodes again."""
    if config.collect_with == "envpool":
        return EnvPoolVecEnv(config.env, config.pool_kwargs, config.n_envs, config.seed, config.observe)
    return DummyVecEnv([lambda: Monitor(RecordResets(_made(config)))] * config.n_envs)


def make_evaluation_env(config: RunConfig, episodes: int) -> VecEnv:
    """Return Gymnasium's environments to evaluate on."""
    return DummyVecEnv([lambda: Monitor(_made(config, disable_env_checker=True))] * min(64, episodes))


def make_model_env(config: RunConfig) -> VecEnv:
    """Return one environment of the library that a run collects with, to build its model on; no step is taken."""
    if config.collect_with == "envpool":
        return EnvPoolVecEnv(config.env, config.pool_kwargs, 1, config.seed, config.observe)
    return make_evaluation_env(config, 1)


def _made(config: RunConfig, **more: Any) -> gym.Env[Any, Any]:
    env: gym.Env[Any, Any] = gym.make(config.env, **config.env_kwargs, **more)
    return env if config.observe is None else _Part(env, config.observe)


class _Part(gym.ObservationWrapper[Any, Any, Any]):
    """Show one part of a dict observation."""

    def __init__(self, env: gym.Env[Any, Any], key: str) -> None:
        super().__init__(env)
        assert isinstance(env.observation_space, gym.spaces.Dict)
        self.observation_space, self._key = env.observation_space[key], key

    def observation(self, observation: Any) -> Any:
        """Return the part."""
        return observation[self._key]


def evaluate(model: BaseAlgorithm, env: VecEnv, *, episodes: int, seed: int) -> tuple[float, float]:
    """Return the mean return over episodes of sampled actions, and its standard error.

    Environments and torch's generator are seeded, so the same policy gives the same figures; the global generators and
    the policy's mode and noise are as before afterwards.
    """
    envs = np.arange(env.num_envs)
    with preserve_rng_state(), eval_mode(model.policy.modules()), use_fresh_noise(model, len(envs)) as renew:

        def predict(observation: Any, state: Any, episode_start: Any, deterministic: bool) -> Any:
            renew(envs, episode_start)
            return model.predict(observation, state, episode_start, deterministic)

        torch.manual_seed(seed)
        env.seed(seed)
        playing: Any = SimpleNamespace(predict=predict)
        found, _ = evaluate_policy(playing, env, episodes, deterministic=False, return_episode_rewards=True)
    returns = np.asarray(found)
    return float(np.mean(returns)), float(np.std(returns, ddof=1) / np.sqrt(len(returns)))


def measure_return(
    config: RunConfig, model: BaseAlgorithm, env: VecEnv | None, *, episodes: int, seed: int
) -> tuple[float, float]:
    """Return a model's mean test return and its standard error, with the library that the run evaluates with.

    Args:
        config: of the run.
        model: with the policy to test.
        env: from `make_evaluation_env`; None: EnvPool's environments are used.
        episodes: at least 2.
        seed: of environments and actions, below 2**32.
    """
    if env is not None:
        return evaluate(model, env, episodes=episodes, seed=seed)
    # EnvPool's seeds have 31 bits.
    asked = model, config.env, config.pool_kwargs
    returns = evaluate_pool(*asked, episodes=episodes, seed=seed >> 1, key=config.observe)
    return float(returns.mean()), float(returns.std(ddof=1) / np.sqrt(len(returns)))
