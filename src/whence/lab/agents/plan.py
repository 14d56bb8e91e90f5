"""Runs from presets, environments and overrides, checked before anything is trained."""

import copy
import reprlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import numpy as np
from gymnasium import spaces

from whence.core import Action, WhenceError, preserve_rng_state, suggest
from whence.lab.agents.presets import read_presets
from whence.lab.agents.training import make_model
from whence.sb3 import default_policy, default_policy_kwargs
from whence.stored import ARMS, CONTROL, STANDARD, find_arm
from whence.stored.agents import RunConfig, check_environment, list_libraries, make_training_env

_MERGED = ("hyperparameters", "env_kwargs", "pool_kwargs", "policy_kwargs")


def configure(
    *, env: str | None = None, preset: str | None = None, arm: str = STANDARD, seed: int = 0, **overrides: Any
) -> RunConfig:
    """Return one run. The environment and the model are built once, so that what they refuse is refused here.

    Args:
        env: a Gymnasium id, trained with SB3's defaults; or
        preset: the name of a preset.
        arm: a key of `ARMS`.
        seed: seeds everything random.
        overrides: fields of `RunConfig`; None leaves a field as it is. `hyperparameters`, `env_kwargs`, `pool_kwargs`
            and `policy_kwargs` are merged with the preset's, one by one.

    Raises:
        WhenceError: an unknown name (the nearest are listed), a value out of range, a device that is not there,
            settings that Gymnasium, EnvPool or Stable-Baselines3 refuses, settings of an environment that would not
            reach all of them, or a target whose observation or action the environment does not have.
    """
    if (env is None) == (preset is None):
        raise WhenceError("Give either an environment, such as LunarLander-v3, or --preset NAME; not both, not none.")
    if preset is not None and preset not in read_presets():
        raise WhenceError(f"The preset {preset!r} is unknown.{suggest(preset, read_presets())}")
    known = [field.name for field in fields(RunConfig) if field.name not in ("env", "arm", "seed")]
    if unknown := [name for name in overrides if name not in known]:
        raise WhenceError(f"A run has no {unknown[0]!r}.{suggest(unknown[0], known)}")
    find_arm(arm)
    base: dict[str, Any] = dict(read_presets()[preset]) if preset is not None else {"env": env}
    changes = {name: value for name, value in overrides.items() if value is not None}
    tables = [name for name in _MERGED if isinstance(changes.get(name), Mapping)]  # others are refused below
    merged = {name: {**base.get(name, {}), **changes[name]} for name in tables}
    config = RunConfig(arm=arm, seed=seed, **copy.deepcopy({**base, **changes, **merged}))
    _check_reach(config, changes)
    space = check_environment(config)
    if "policy" not in base | changes:
        config = replace(config, policy=default_policy(space))
    config = replace(config, policy_kwargs=default_policy_kwargs(config.policy, config.policy_kwargs, space))
    with preserve_rng_state():  # PPO seeds the generators
        model_env = make_training_env(replace(config, n_envs=1))
        try:
            model = make_model(config, model_env)
        finally:
            model_env.close()
    if getattr(config.rule(), "needs_discrete", False):  # It compares the actions of a state, so that states recur.
        parts = list(space.values()) if isinstance(space, spaces.Dict) else [space]
        is_continuous = any(np.issubdtype(part.dtype, np.floating) for part in parts)
        if is_continuous or not isinstance(model.action_space, spaces.Discrete):
            raise WhenceError(
                f"The arm {config.arm} needs discrete observations, integers or images, and one discrete action; "
                f"{config.env} has {space} and {model.action_space}. Choose another arm."
            )
    if isinstance(target := config.make_target(), Action):
        check_action(target, model.observation_space, model.action_space)
    return config


def _check_reach(config: RunConfig, changes: Mapping[str, Any]) -> None:
    """Refuse overrides of an environment's settings that would not reach every environment of the run."""
    libraries = list_libraries(config)
    for name, library, other in (("env_kwargs", "gymnasium", "pool_kwargs"), ("pool_kwargs", "envpool", "env_kwargs")):
        if changes.get(name) and library not in libraries:
            raise WhenceError(f"{name} are {library}'s, and this run is in no environment of it. Pass {other} instead.")
    if changes.get("env_kwargs") and "envpool" in libraries and "pool_kwargs" not in changes:
        raise WhenceError(
            f"env_kwargs {changes['env_kwargs']} would not reach EnvPool's environments. Pass pool_kwargs "
            "(--pool-kwargs) as well, by EnvPool's names; {} where its environment is so already."
        )


def check_action(target: Action, observations: spaces.Space[Any], actions: spaces.Space[Any]) -> None:
    """Refuse an observation or an action that a policy's spaces do not contain.

    Raises:
        WhenceError: a shape differs, a value is out of range, or the numbers of observations and actions differ.
    """
    if isinstance(actions, spaces.Box):
        # A policy's actions exceed the bounds, too: SB3 clips them only on their way to the environment.
        actions = spaces.Box(-np.inf, np.inf, actions.shape, np.float64)
    counts = _count_elements("observation", target.observation, observations)
    counts |= _count_elements("action", target.action, actions)
    if len(counts) > 1:
        raise WhenceError("The target has not as many actions as observations: give one of each, or m of each.")


def _count_elements(name: str, value: Any, space: spaces.Space[Any]) -> set[int]:
    """Return how many elements of a space a target's `name` holds, of a Dict those of its parts; refuse others."""
    if isinstance(space, spaces.Dict) and isinstance(value, Mapping) and value.keys() == space.keys():
        return set().union(*(_count_elements(f"{name}.{key}", value[key], part) for key, part in space.items()))
    with suppress(TypeError, ValueError):  # of rows of different lengths, or text
        array = np.asarray(value)
        rows = list(array.astype(space.dtype).reshape(-1, *(space.shape or ())))
        # In a dtype of whole numbers, 0.7 would have become 0.
        is_exact = np.issubdtype(space.dtype, np.floating) or np.array_equal(array, array.astype(space.dtype))
        if rows and is_exact and array.dtype.kind in "biuf" and all(space.contains(row) for row in rows):
            return {len(rows)}
    raise WhenceError(f"The {name} of the target is {reprlib.repr(value)}; one of {space}, or several, are needed.")


def reads(config: RunConfig, name: str) -> bool:
    """Return whether a run's arm reads a field: drop, warmup, unit, or one that says how records are scored."""
    if config.arm.removeprefix(CONTROL) not in ARMS:  # a study's
        return True
    rule: Any = config.rule()
    return name in rule.__dataclass_fields__ if name in ("drop", "warmup", "unit") else bool(rule.needs_influence)


def plan_comparison(*, arms: list[str], seeds: int, **overrides: Any) -> list[RunConfig]:
    """Return the runs of a comparison, arm by arm within each seed.

    Args:
        arms: keys of `ARMS`.
        seeds: the number of seeds, which are 0 to seeds - 1.
        overrides: see `configure`; also `env` or `preset`.

    Raises:
        WhenceError: see `configure`; or a comparison without evaluations.
    """
    if seeds < 1:
        raise WhenceError(f"seeds is {seeds}; at least 1 is needed, and 2 for intervals.")
    if not arms or len(set(arms)) < len(arms):
        raise WhenceError(f"arms is {','.join(arms)!r}; name each arm once. Known: {', '.join(ARMS)}.")
    if "seed" in overrides:
        raise WhenceError("A comparison has no 'seed': `seeds` says how many there are.")
    configs = configure_arms(arms, **overrides)
    return [replace(config, seed=seed) for seed in range(seeds) for config in configs]


def configure_arms(arms: Iterable[str], **overrides: Any) -> list[RunConfig]:
    """Return one run of each arm, to be compared.

    Args:
        arms: keys of `ARMS`.
        overrides: see `configure`; also `env` or `preset`.

    Raises:
        WhenceError: see `configure`; or a comparison without evaluations.
    """
    configs = [configure(arm=arm, **overrides) for arm in arms]
    if not all(config.eval_episodes for config in configs):
        raise WhenceError("eval_episodes is 0, but arms are compared by their test returns: at least 2 are needed.")
    return configs
