"""Descriptions of models for run directories: in JSON types, and equal whenever the same thing is run.

With them go the spaces, from which a policy is built again, and the names of actions and observations.
"""

import inspect
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gymnasium import Env, spaces
from gymnasium.vector import SyncVectorEnv
from stable_baselines3 import PPO
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.common.vec_env import VecEnv, VecExtractDictObs, VecFrameStack, unwrap_vec_normalize
from torch.nn.parameter import is_lazy

from whence.core import WhenceError, describe, library_versions
from whence.sb3.episodes import describe_environments, digest_function, iterate_vec_wrappers, select_settings

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
    settings = _select(model, (*HYPERPARAMETERS, "seed"))
    return {
        "algorithm": type(model).__name__,
        **describe_env(read_spec(env), describe_environments(env)),
        "n_envs": env.num_envs,
        "observation_space": describe(describe_space(model.observation_space)),
        "action_space": describe(describe_space(model.action_space)),
        "vec_wrappers": describe_vec_wrappers(env),
        **({} if normalised is None else {"VecNormalize": describe(_select(normalised, _NORMALISATION))}),
        "policy": type(policy).__name__,
        "policy_kwargs": describe(model.policy_kwargs),
        "parameters": sum(0 if is_lazy(parameter) else parameter.numel() for parameter in policy.parameters()),
        "optimizer": type(policy.optimizer).__name__ if hasattr(policy, "optimizer") else None,
        "hyperparameters": {name: _describe_setting(value) for name, value in settings.items()},
    }


def describe_env(spec: Any, environments: Sequence[Any]) -> dict[str, Any]:
    """Return what a run's configuration says of environments; see `describe_model`."""
    first, *others = environments or [[]]
    return {
        "env": None if spec is None else spec.id,
        "env_kwargs": {} if spec is None else describe(select_settings(spec.kwargs)),
        "max_episode_steps": None if spec is None else spec.max_episode_steps,
        "env_wrappers": first,
        "other_env_wrappers": {str(index): each for index, each in enumerate(others, 1) if each != first},
    }


def read_spec(env: VecEnv) -> Any:
    """Return how Gymnasium made the first environment; None if it did not, as where a simulator is a `VecEnv`."""
    with suppress(Exception):
        return env.get_attr("spec")[0]
    return None


def _select(thing: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return those attributes that a thing has."""
    return {name: getattr(thing, name) for name in names if hasattr(thing, name)}


def describe_vec_wrappers(env: VecEnv) -> list[dict[str, Any]]:
    """Return the wrappers around vectorised environments as data, the outermost first; some with their argument."""
    return [
        {
            "class": type(wrapper).__name__,
            **({"n_stack": wrapper.stacked_obs.n_stack} if isinstance(wrapper, VecFrameStack) else {}),
            **({"key": wrapper.key} if isinstance(wrapper, VecExtractDictObs) else {}),
        }
        for wrapper in iterate_vec_wrappers(env)
    ]


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
    code and the values that it holds say what it is.
    """
    inner = _unwrap_schedule(value)
    if not callable(inner):
        return describe(inner)
    if isinstance(inner, ConstantSchedule | LinearSchedule):
        start, end = float(value(1.0)), float(value(0.0))
        return describe(start) if start == end else {"schedule": "linear", **describe(vars(inner))}
    return {"schedule": "function", "code": digest_function(inner)}


_LIBRARIES = (
    *("whence", "torch", "stable-baselines3", "gymnasium", "numpy"),
    *("sb3-contrib", "envpool", "minigrid", "highway-env", "Box2D"),
)


def read_versions() -> dict[str, str]:
    """Return the versions of the libraries, and what of the machine, an agent's results depend on, if it is there."""
    machine = {"torch threads": str(torch.get_num_threads()), "CPU": torch.backends.cpu.get_cpu_capability()}
    return {**library_versions(_LIBRARIES), "python": platform.python_version(), **machine}


def describe_space(space: spaces.Space[Any]) -> dict[str, Any] | None:
    """Return a space as a table of numbers, texts and arrays; None for one that SB3's policies do not read."""
    match space:
        case spaces.Dict():
            return {"type": "Dict", "spaces": {name: describe_space(part) for name, part in space.items()}}
        case spaces.Box():
            bounds = {"low": _shorten(space.low), "high": _shorten(space.high)}
            return {"type": "Box", **bounds, "shape": space.shape, "dtype": str(space.dtype)}
        case spaces.Discrete():
            return {"type": "Discrete", "n": space.n, "start": space.start}
        case spaces.MultiDiscrete():
            return {"type": "MultiDiscrete", "nvec": space.nvec, "start": space.start}
        case spaces.MultiBinary():
            return {"type": "MultiBinary", "n": space.n}
    return None


def _shorten(bounds: Any) -> Any:
    """Return the bounds of a box, as one number if they are equal."""
    return bounds.flat[0] if bounds.size and (bounds == bounds.flat[0]).all() else bounds


def make_space(stored: Mapping[str, Any]) -> spaces.Space[Any]:
    """Return the space that `describe_space` described."""
    values = {name: value for name, value in stored.items() if name != "type"}
    match stored["type"]:
        case "Dict":  # pairs keep their order, which is that of the extractor's features
            return spaces.Dict([(name, make_space(part)) for name, part in values["spaces"].items()])
        case "Box":
            shape, dtype = tuple(values["shape"]), np.dtype(values["dtype"])
            low, high = (np.broadcast_to(np.array(values[end], dtype), shape).copy() for end in ("low", "high"))
            return spaces.Box(low, high, shape, dtype.type)
        case "MultiDiscrete":
            return spaces.MultiDiscrete(np.array(values["nvec"]), start=np.array(values["start"]))
        case "Discrete":
            return spaces.Discrete(**values)
        case "MultiBinary":
            return spaces.MultiBinary(values["n"])
    raise ValueError(f"{stored['type']!r} is no space of Stable-Baselines3's.")


Names = Mapping[str, Sequence[str]]
"""Under "actions" the names of discrete actions, or of the axes of others; under "observations" those of entries."""


def check_names(names: object) -> Names:
    """Return the names that a user passes by "actions" and "observations"; refuse anything else."""
    is_table = isinstance(names, Mapping) and names.keys() <= {"actions", "observations"}
    if not is_table or not all(map(_are_names, names.values())):  # type: ignore[attr-defined]
        raise WhenceError(
            f"names is {names!r}. Pass lists of texts that differ, as "
            'names={"actions": ["left", "right"], "observations": ["x", "y"]}.'
        )
    return names  # type: ignore[return-value]


def read_names(model: Any, names: Names) -> dict[str, list[str]]:
    """Return the names that are known of a model's actions and observations, one for each.

    Those that `names` lacks are the environment's `action_names` or `get_action_meanings()`, and `observation_names`.
    Of stacked frames, each has its own names.

    Raises:
        WhenceError: `names` has other numbers of names.
    """
    env = model.get_env()
    stacks = [each.stacked_obs.n_stack for each in iterate_vec_wrappers(env) if isinstance(each, VecFrameStack)]
    return name_spaces(names, model.observation_space, model.action_space, env.unwrapped, stacks[-1] if stacks else 1)


def name_spaces(
    names: Names, observations: spaces.Space[Any], actions: spaces.Space[Any], env: Any, frames: int = 1
) -> dict[str, list[str]]:
    """Return the names that are known of one environment's actions and observations; see `read_names`.

    `names` are those that a user passed, `env` one or several environments that may have some, and `frames` says how
    many frames an observation stacks.
    """
    lists = {}
    for kind, space in {"actions": actions, "observations": observations}.items():
        count = _count(space)
        listed = names.get(kind) or _ask(env, kind)
        if kind == "observations" and len(listed) * frames == count:
            ages = [f" ({age} back)" if age else "" for age in reversed(range(frames))]
            listed = [f"{name}{age}" for age in ages for name in listed]
        if len(listed) == count:
            lists[kind] = [*listed]
        elif names.get(kind):
            remedy = f"Pass {count}, in their order" if count else "Leave them out"
            raise WhenceError(f"names has {len(listed)} {kind} ({', '.join(listed)}); {space} has {count}. {remedy}.")
    return lists


def _count(space: spaces.Space[Any]) -> int:
    """Return how many names a space has; 0: it has none."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    return prod(space.shape) if space.shape and len(space.shape) == 1 else 0


_MEANINGS = "get_action_meanings"


def _ask(env: Any, kind: str) -> Sequence[str]:
    """Return the names that the first environment has; none if it has none."""
    attribute = f"{kind[:-1]}_names"
    for name in (attribute, _MEANINGS) if kind == "actions" else (attribute,):
        with suppress(Exception):  # it may be of another library, or have something else by that name
            listed = _read_first(env, name)
            if listed and _are_names(listed):
                return list(listed)
    return []


def _read_first(env: Any, name: str) -> Any:
    """Return an attribute of the first environment of several, or what a method without arguments returns."""
    if isinstance(env, VecEnv):
        if not env.has_attr(name):  # to ask all the same would end another process
            return None
        is_method = name == _MEANINGS
        return env.env_method(name, indices=[0])[0] if is_method else env.get_attr(name, [0])[0]
    base = getattr(env, "unwrapped", env)
    first = base.envs[0] if isinstance(base, SyncVectorEnv) else env
    value = first.get_wrapper_attr(name) if isinstance(first, Env) else getattr(first, name)
    return value() if callable(value) else value


def _are_names(value: object) -> bool:
    """Return whether a value is a list of texts that differ."""
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        return False
    return len({*value}) == len(value)
