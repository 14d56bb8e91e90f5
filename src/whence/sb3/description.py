"""What a run directory says of a model: JSON types, and the same words whenever the same thing is run."""

import inspect
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from stable_baselines3 import PPO

from whence.runs import strip_addresses

# What PPO's constructor takes beside its hyper-parameters: what is trained, where, and what is told of it.
_OTHERS = (
    *("self", "policy", "env", "policy_kwargs", "rollout_buffer_class", "rollout_buffer_kwargs", "seed", "device"),
    *("stats_window_size", "tensorboard_log", "verbose", "_init_setup_model"),
)

HYPERPARAMETERS: Mapping[str, Any] = MappingProxyType(
    {name: p.default for name, p in inspect.signature(PPO).parameters.items() if name not in _OTHERS}
)
"""PPO's hyper-parameters by SB3's names, with SB3's defaults; A2C and MaskablePPO have no others."""


def describe(model: Any) -> dict[str, Any]:
    """Return what is trained, in JSON types: algorithm, environments, policy, optimiser, hyper-parameters."""
    env, policy = model.get_env(), model.policy
    spec = env.get_attr("spec")[0]
    settings = {name: getattr(model, name) for name in (*HYPERPARAMETERS, "seed") if hasattr(model, name)}
    return {
        "algorithm": type(model).__name__,
        "env": None if spec is None else spec.id,
        "env_kwargs": {} if spec is None else plain(spec.kwargs),
        "max_episode_steps": None if spec is None else spec.max_episode_steps,
        "n_envs": env.num_envs,
        "policy": type(policy).__name__,
        "policy_kwargs": plain(model.policy_kwargs),
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "optimizer": type(policy.optimizer).__name__,
        "hyperparameters": {name: _setting(value) for name, value in settings.items()},
    }


def plain(value: Any) -> Any:
    """Return a value in JSON types: classes and functions by name, what JSON lacks as text without addresses."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    return strip_addresses(repr(value))


def _setting(value: Any) -> Any:
    # SB3 makes schedules of numbers, too.
    if not callable(value):
        return plain(value)
    start, half, end = (float(value(remaining)) for remaining in (1.0, 0.5, 0.0))
    if start == half == end:
        return plain(start)
    return f"a schedule: {start} at the start, {half} half-way, {end} at the end"
