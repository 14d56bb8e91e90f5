"""Descriptions of models for run directories: in JSON types, and equal whenever the same thing is run."""

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from stable_baselines3 import PPO
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.common.vec_env import VecEnv, VecExtractDictObs, VecFrameStack, unwrap_vec_normalize
from torch.nn.parameter import is_lazy

from whence.core import describe
from whence.sb3.base.environment_source import digest_sources, list_code
from whence.sb3.base.stored_spaces import describe_space
from whence.sb3.base.wrappers import describe_environments, iterate_vec_wrappers

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


def describe_model(model: Any) -> dict[str, Any]:
    """Return a model's algorithm, environments, policy, optimiser and hyper-parameters, in JSON types."""
    env, policy = model.get_env(), model.policy
    normalised = unwrap_vec_normalize(env)
    spec = _read_spec(env)
    settings = _select(model, (*HYPERPARAMETERS, "seed"))
    first, *others = describe_environments(env) or [[]]
    return {
        "algorithm": type(model).__name__,
        "env": None if spec is None else spec.id,
        "env_kwargs": {} if spec is None else describe(spec.kwargs),
        "max_episode_steps": None if spec is None else spec.max_episode_steps,
        "env_wrappers": first,
        "other_env_wrappers": {str(index): each for index, each in enumerate(others, 1) if each != first},
        "env_source": digest_sources(env),
        "n_envs": env.num_envs,
        "observation_space": describe(describe_space(model.observation_space)),
        "action_space": describe(describe_space(model.action_space)),
        "vec_wrappers": describe_vec_wrappers(env),
        **({} if normalised is None else {"VecNormalize": describe(_select(normalised, _NORMALISATION))}),
        "policy": type(policy).__name__,
        "policy_kwargs": describe(model.policy_kwargs),
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


def describe_vec_wrappers(env: VecEnv) -> list[dict[str, Any]]:
    """Return the wrappers around vectorised environments as data, the outermost first; some with their argument."""
    wrappers = list[dict[str, Any]]()
    for wrapper in iterate_vec_wrappers(env):
        arguments: dict[str, Any] = {}
        if isinstance(wrapper, VecFrameStack):
            arguments = {"n_stack": wrapper.stacked_obs.n_stack}
        elif isinstance(wrapper, VecExtractDictObs):
            arguments = {"key": wrapper.key}
        wrappers.append({"class": type(wrapper).__name__, **arguments})
    return wrappers


def is_own_schedule(schedule: Any) -> bool:
    """Return whether a schedule is of SB3's own classes, which have no state that a call changes."""
    return isinstance(_unwrap_schedule(schedule), ConstantSchedule | LinearSchedule)


def is_schedule(setting: Any) -> bool:
    """Return whether a stored hyper-parameter is a schedule, and no number."""
    return isinstance(setting, Mapping) and "schedule" in setting


def _unwrap_schedule(schedule: Any) -> Any:
    return schedule.value_schedule if isinstance(schedule, FloatSchedule) else schedule


def _describe_setting(value: Any) -> Any:
    """Return a hyper-parameter in JSON types; SB3 makes schedules even of numbers.

    A schedule of the user's is not called: it may count its calls, or refuse a time at which SB3 never asks it. Its
    code and the numbers that it holds say what it is.
    """
    inner = _unwrap_schedule(value)
    if not callable(inner):
        return describe(inner)
    if isinstance(inner, ConstantSchedule | LinearSchedule):
        start, end = float(value(1.0)), float(value(0.0))
        return describe(start) if start == end else {"schedule": "linear", **describe(vars(inner))}
    call = inner if inspect.isfunction(inner) else type(inner).__call__
    return {"schedule": "function", "code": hashlib.sha256(repr(list_code(call)).encode()).hexdigest()[:8]}


LIBRARIES = (
    *("whence", "torch", "stable-baselines3", "gymnasium", "numpy"),
    *("sb3-contrib", "envpool", "minigrid", "highway-env", "Box2D"),
)
"""The libraries that an agent's results depend on, as far as they are installed."""
