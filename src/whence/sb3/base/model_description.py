"""Descriptions of models for run directories: in JSON types, and equal whenever the same thing is run."""

import hashlib
import inspect
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.common.vec_env import (
    VecEnv,
    VecEnvWrapper,
    VecExtractDictObs,
    VecFrameStack,
    unwrap_vec_normalize,
)
from torch.nn.parameter import is_lazy

from whence.runs import strip_addresses
from whence.sb3.base.environment_source import digest_sources, list_code
from whence.sb3.base.stored_spaces import describe_space
from whence.sb3.base.wrappers import describe_environments

# The arguments of PPO's constructor that are no hyper-parameters: what is trained, where, and what is logged.
_OTHERS = (
    *("self", "policy", "env", "policy_kwargs", "rollout_buffer_class", "rollout_buffer_kwargs", "seed", "device"),
    *("stats_window_size", "tensorboard_log", "verbose", "_init_setup_model"),
)

HYPERPARAMETERS: Mapping[str, Any] = MappingProxyType(
    {name: p.default for name, p in inspect.signature(PPO).parameters.items() if name not in _OTHERS}
)
"""PPO's hyper-parameters by SB3's names, with SB3's defaults; A2C, MaskablePPO and RecurrentPPO have no others."""

_NORMALISATION = (
    *("training", "norm_obs", "norm_reward", "norm_obs_keys"),
    *("clip_obs", "clip_reward", "gamma", "epsilon"),
)
"""VecNormalize's settings."""


def describe(model: Any) -> dict[str, Any]:
    """Return a model's algorithm, environments, policy, optimiser and hyper-parameters, in JSON types."""
    env, policy = model.get_env(), model.policy
    normalised = unwrap_vec_normalize(env)
    spec = _read_spec(env)
    settings = _select(model, (*HYPERPARAMETERS, "seed"))
    first, *others = describe_environments(env) or [[]]
    return {
        "algorithm": type(model).__name__,
        "env": None if spec is None else spec.id,
        "env_kwargs": {} if spec is None else to_json_types(spec.kwargs),
        "max_episode_steps": None if spec is None else spec.max_episode_steps,
        "env_wrappers": first,
        "other_env_wrappers": {str(index): each for index, each in enumerate(others, 1) if each != first},
        "env_source": digest_sources(env),
        "n_envs": env.num_envs,
        "observation_space": to_json_types(describe_space(model.observation_space)),
        "action_space": to_json_types(describe_space(model.action_space)),
        "vec_wrappers": list_vec_wrappers(env),
        **({} if normalised is None else {"VecNormalize": to_json_types(_select(normalised, _NORMALISATION))}),
        "policy": type(policy).__name__,
        "policy_kwargs": to_json_types(model.policy_kwargs),
        "parameters": sum(0 if is_lazy(parameter) else parameter.numel() for parameter in policy.parameters()),
        "optimizer": type(policy.optimizer).__name__,
        "hyperparameters": {name: _describe_setting(value) for name, value in settings.items()},
    }


def _read_spec(env: VecEnv) -> Any:
    """Return how Gymnasium made the first environment; None if it did not, as where a simulator is a `VecEnv`."""
    with suppress(Exception):
        return env.get_attr("spec")[0]
    return None


def _select(thing: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return those attributes that a thing has."""
    return {name: getattr(thing, name) for name in names if hasattr(thing, name)}


def list_vec_wrappers(env: VecEnv) -> list[str]:
    """Return the wrappers around vectorised environments, the outermost first; some with their argument."""
    names = []
    while isinstance(env, VecEnvWrapper):
        argument = ""
        if isinstance(env, VecFrameStack):
            argument = f"({env.stacked_obs.n_stack})"
        elif isinstance(env, VecExtractDictObs):
            argument = f"({env.key})"
        names.append(type(env).__name__ + argument)
        env = env.venv
    return names


def to_json_types(value: Any) -> Any:
    """Return a value in JSON types: classes and functions as their names, other objects as text without addresses."""
    if isinstance(value, Mapping):
        return {str(key): to_json_types(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_types(entry) for entry in value]
    if isinstance(value, np.ndarray | np.generic):
        return to_json_types(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    return strip_addresses(repr(value))


def is_own_schedule(schedule: Any) -> bool:
    """Return whether a schedule is of SB3's own classes, which have no state that a call changes."""
    inner = schedule.value_schedule if isinstance(schedule, FloatSchedule) else schedule
    return isinstance(inner, ConstantSchedule | LinearSchedule)


def _describe_setting(value: Any) -> Any:
    """Return a hyper-parameter in JSON types; SB3 makes schedules even of numbers.

    A schedule of the user's is not called: it may count its calls, or refuse a time at which SB3 never asks it. Its
    code and the numbers that it holds say what it is.
    """
    if not callable(value):
        return to_json_types(value)
    if is_own_schedule(value):
        start, end = float(value(1.0)), float(value(0.0))
        return to_json_types(start) if start == end else f"a schedule: {value!r}"
    inner = value.value_schedule if isinstance(value, FloatSchedule) else value
    call = inner if inspect.isfunction(inner) else type(inner).__call__
    digest = hashlib.sha256(repr(list_code(call)).encode()).hexdigest()[:8]
    return f"a schedule of the code {digest}"


def library_versions() -> dict[str, str]:
    """Return the versions of the installed libraries that a run's results depend on."""
    versions = {"whence": version("whence-rl")}
    versions |= {package: version(package) for package in ("torch", "stable-baselines3", "gymnasium", "numpy")}
    for package in ("sb3-contrib", "envpool", "minigrid", "highway-env", "Box2D"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
