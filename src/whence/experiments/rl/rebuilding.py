"""The environments and the policy of a run, made again from its configuration."""

from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium as gym
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack

from whence.errors import ReplayError, RunDirectoryError, WhenceError
from whence.experiments.rl import networks
from whence.experiments.rl.config import RunConfig
from whence.experiments.rl.environments import make_env
from whence.guards import preserve_rng_state
from whence.runs import RunDirectory
from whence.sb3 import building as sb3_building
from whence.sb3.building import CLASSES
from whence.sb3.episode_replay import MakeEnv

AnyEnv: TypeAlias = str | Callable[[], gym.Env[Any, Any]] | None
"""An environment's id, module:Id, or a function that makes one; None: what the run's configuration names."""

_REMEDY = "Build the model as the script does, and score its policy with RecordBatch.from_polars(...)."


def make_replay_env(run: RunDirectory, env: AnyEnv = None) -> MakeEnv:
    """Return a function that makes an environment like those that a run was trained in, to play and to draw.

    Raises:
        ReplayError: the run's configuration names no environment, and `env` was not given.
    """
    if env is not None and not isinstance(env, str):
        return env
    config = run.config
    if config.get("kind") == "language":
        raise ReplayError(f"{run.path} is a language-model run: it has no episodes of an environment.")
    if env is None and "algorithm" not in config:
        try:
            settings = RunConfig.from_json(config)
        except (TypeError, WhenceError) as wrong:
            raise ReplayError(
                f"The configuration of {run.path} names no environment that can be made: {wrong}"
            ) from None
        return lambda: make_env(settings, render_mode="rgb_array", disable_env_checker=True)
    name, kwargs = (env, {}) if env is not None else (config.get("env"), config.get("env_kwargs") or {})
    if not isinstance(name, str):
        raise ReplayError(
            f"{run.path} was trained in an environment that Gymnasium has no id for. Pass env= (or --env): an id, "
            "module:Id, or a function that makes one like those that were trained in."
        )
    options = {**kwargs, "render_mode": "rgb_array", "disable_env_checker": True}
    return lambda: gym.make(name, **options)


def reads_raw_observations(run: RunDirectory) -> bool:
    """Return whether a run's stored observations are those of its environment."""
    return not any(name.startswith(("VecNormalize", "VecFrameStack")) for name in run.config.get("vec_wrappers", ()))


def is_squashed(run: RunDirectory) -> bool:
    """Return whether a run's policy squashes its actions."""
    return bool((run.config.get("policy_kwargs") or {}).get("squash_output", False))


def build_model(run: RunDirectory, env: AnyEnv = None) -> Any:
    """Return an untrained model like the one that a callback's run trained.

    Raises:
        RunDirectoryError: the configuration names an algorithm, a policy or a class that is not known here.
    """
    vec_env = _make_vec_env(run, env)
    try:
        with preserve_rng_state():
            # Without its schedules: no score depends on them, since at the collecting policy no ratio is clipped.
            return sb3_building.build_model(run, vec_env, remedy=_REMEDY, classes=(*CLASSES, networks), device="cpu")
    finally:
        vec_env.close()


def _make_vec_env(run: RunDirectory, env: AnyEnv) -> VecEnv:
    try:
        vec_env: VecEnv = DummyVecEnv([make_replay_env(run, env)])
    except (ReplayError, gym.error.Error) as failure:
        raise RunDirectoryError(f"The environment of {run.path} cannot be made: {failure}") from failure
    for name in reversed(run.config.get("vec_wrappers", ())):
        if name.startswith("VecFrameStack("):
            vec_env = VecFrameStack(vec_env, int(name.removeprefix("VecFrameStack(").rstrip(")")))
    return vec_env
