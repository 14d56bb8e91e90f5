"""Configurations from presets, environments and overrides, checked before anything is trained."""

import copy
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import fields, replace
from typing import Any

import numpy as np
from gymnasium import spaces

from whence.core import Action, WhenceError, preserve_rng_state, suggest
from whence.lab.agents.environments import (
    check_environment,
    default_policy,
    default_policy_kwargs,
    list_libraries,
    make_training_env,
)
from whence.lab.agents.run_config import RunConfig
from whence.lab.agents.training import make_model
from whence.lab.arms import ARMS, STANDARD, find_arm, read_presets
from whence.stored.agents import check_action

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
    with preserve_rng_state(), closing(make_training_env(replace(config, n_envs=1))) as model_env:
        model = make_model(config, model_env)  # it seeds the generators
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
    """Return one run of each arm, to be compared; overrides are those of `configure`, with `env` or `preset`."""
    configs = [configure(arm=arm, **overrides) for arm in arms]
    if not all(config.eval_episodes for config in configs):
        raise WhenceError("eval_episodes is 0, but arms are compared by their test returns: at least 2 are needed.")
    return configs
