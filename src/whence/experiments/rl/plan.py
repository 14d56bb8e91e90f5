"""From what a person asks for to the runs it means, checked before anything is trained."""

import copy
import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
from gymnasium import spaces

from whence.errors import WhenceError, suggest
from whence.experiments.rl.arms import ARMS, METHODS, PLAIN, RULE_FIELDS, describe_arms
from whence.experiments.rl.config import RunConfig, check_types
from whence.experiments.rl.environments import check_environment, default_policy, list_libraries, make_model_env
from whence.experiments.rl.presets import presets
from whence.experiments.rl.training import make_model
from whence.experiments.shared import STANDARD
from whence.guards import preserve_rng_state
from whence.targets import Action

_MERGED = ("hyperparameters", "env_kwargs", "pool_kwargs", "policy_kwargs")


def configure(
    *, env: str | None = None, preset: str | None = None, arm: str = STANDARD, seed: int = 0, **overrides: Any
) -> RunConfig:
    """Return one run. The environment and the model were made once, so that what they refuse is refused here.

    Args:
        env: a Gymnasium id, trained with SB3's defaults; or
        preset: the name of a preset.
        arm: a key of `ARMS`.
        seed: of everything random.
        overrides: fields of `RunConfig`; None leaves a field as it is. `hyperparameters`, `env_kwargs`, `pool_kwargs`
            and `policy_kwargs` are merged with the preset's, one by one.

    Raises:
        WhenceError: a name that is not known (the nearest are given), a value out of range, settings that Gymnasium,
            EnvPool or Stable-Baselines3 refuses, settings of an environment that would not reach all of them, or a
            target whose observation or action the environment does not have.
    """
    if (env is None) == (preset is None):
        raise WhenceError("Give either an environment, such as LunarLander-v3, or --preset NAME; not both, not none.")
    if preset is not None and preset not in presets():
        raise WhenceError(f"The preset {preset!r} is unknown.{suggest(preset, presets())}")
    known = [field.name for field in fields(RunConfig) if field.name not in ("env", "arm", "seed")]
    if unknown := [name for name in overrides if name not in known]:
        raise WhenceError(f"A run has no {unknown[0]!r}.{suggest(unknown[0], known)}")
    values: dict[str, Any] = dict(presets()[preset]) if preset is not None else {"env": env}
    given = {name: value for name, value in overrides.items() if value is not None}
    check_types(given)
    merged = {name: {**values.get(name, {}), **given[name]} for name in _MERGED if name in given}
    config = RunConfig(arm=arm, seed=seed, **copy.deepcopy({**values, **given, **merged}))
    _check_reach(config, given)
    space = check_environment(config)
    if "policy" not in values | given:
        config = replace(config, policy=default_policy(space))
    with preserve_rng_state():  # PPO seeds them
        trial = make_model_env(config)
        try:
            model = make_model(config, trial)
        finally:
            trial.close()
    _check_discrete(config, model.observation_space, model.action_space)
    if isinstance(target := config.make_target(), Action):
        check_action(target, model.observation_space, model.action_space)
    return config


def _check_discrete(config: RunConfig, observations: spaces.Space[Any], actions: spaces.Space[Any]) -> None:
    """Refuse a rule that compares the actions of a state where states do not come again."""
    if not getattr(config.rule(), "needs_discrete", False):
        return
    continuous = [space for space in _parts(observations) if np.issubdtype(space.dtype, np.floating)]
    if continuous or not isinstance(actions, spaces.Discrete):
        raise WhenceError(
            f"The arm {config.arm} needs discrete observations, integers or images, and one discrete action; "
            f"{config.env} has {observations} and {actions}. Choose another arm."
        )


def _parts(space: spaces.Space[Any]) -> list[spaces.Space[Any]]:
    return [part for one in space.values() for part in _parts(one)] if isinstance(space, spaces.Dict) else [space]


def _check_reach(config: RunConfig, given: Mapping[str, Any]) -> None:
    """Refuse settings of an environment, as given, that would not reach every environment of the run."""
    used = list_libraries(config)
    if given.get("pool_kwargs") and "envpool" not in used:
        raise WhenceError(
            f"pool_kwargs {given['pool_kwargs']} are EnvPool's, and this run is in Gymnasium's environments only. "
            "Pass env_kwargs (--env-kwargs) instead."
        )
    if not given.get("env_kwargs") or "envpool" not in used:
        return
    if "gymnasium" not in used:
        raise WhenceError(
            f"env_kwargs {given['env_kwargs']} are Gymnasium's, and this run is in EnvPool's environments only. Pass "
            "pool_kwargs (--pool-kwargs) instead, by EnvPool's names."
        )
    if "pool_kwargs" not in given:
        raise WhenceError(
            f"env_kwargs {given['env_kwargs']} would reach Gymnasium's environments and not EnvPool's, but this run "
            f"collects with {config.collect_with} and evaluates with {config.evaluate_with}. Pass pool_kwargs "
            "(--pool-kwargs) as well, by EnvPool's names; {} where EnvPool's environment is so already."
        )


def check_action(target: Action, observations: spaces.Space[Any], actions: spaces.Space[Any]) -> None:
    """Refuse an observation or an action that a policy's spaces do not hold.

    Raises:
        WhenceError: a shape is another one, a value is out of range, or there are more of the one than of the other.
    """
    if isinstance(actions, spaces.Box):
        # A policy's own actions go beyond the bounds, too: SB3 clips them only on their way to the environment.
        actions = spaces.Box(-np.inf, np.inf, actions.shape, np.float64)
    counts = _counts("observation", target.observation, observations) | _counts("action", target.action, actions)
    if len(counts) > 1:
        raise WhenceError("The target has not as many actions as observations: give one of each, or m of each.")


def _counts(name: str, given: Any, space: spaces.Space[Any]) -> set[int]:
    """Return how many values of a space were given; of a dict, for each part."""
    if isinstance(space, spaces.Dict):
        if not isinstance(given, Mapping) or given.keys() != space.keys():
            raise WhenceError(
                f"The {name} of the target is {reprlib.repr(given)}; the keys {', '.join(space)} are needed."
            )
        return set().union(*(_counts(f"{name}.{key}", given[key], part) for key, part in space.items()))
    rows = _rows(given, space)
    if not rows or not all(space.contains(row) for row in rows):
        raise WhenceError(
            f"The {name} of the target is {reprlib.repr(given)}; it has to be one of {space}, or several such."
        )
    return {len(rows)}


def _rows(given: Any, space: spaces.Space[Any]) -> list[Any]:
    """Return the values given, in a space's dtype and shape; none where they have another, or would become others."""
    try:
        array = np.asarray(given)
    except ValueError:  # rows of different lengths
        return []
    if array.dtype.kind not in "biuf":
        return []
    converted, shape = array.astype(space.dtype), space.shape or ()
    if converted.dtype.kind != "f" and not np.array_equal(array, converted):  # 0.7 became 0
        return []
    alone = math.prod(shape) == 1 and converted.ndim <= 1
    if not alone and shape not in (converted.shape, converted.shape[1:]):
        return []
    return list(converted.reshape(-1, *shape))


def reads(config: RunConfig, name: str) -> bool:
    """Return whether a run's arm reads a field: drop, warmup, or one that says how records are scored."""
    arm = ARMS[config.arm]
    if name in RULE_FIELDS:
        return name in arm.reads
    is_of_round = name == "engine" and arm.method in METHODS
    return config.rule().needs_influence and not is_of_round


def check_read(configs: Iterable[RunConfig], given: Iterable[str]) -> None:
    """Refuse fields of rules and scoring that were given, and that none of the runs reads.

    Raises:
        WhenceError: names the field and the arms that read it.
    """
    configs = list(configs)
    for name in given:
        if not any(reads(config, name) for config in configs):
            arms = ", ".join(dict.fromkeys(config.arm for config in configs))
            plain = replace(configs[0], engine="auto", target="return", target_args={})  # which every arm takes
            able = ", ".join(arm for arm in PLAIN if reads(replace(plain, arm=arm), name))
            raise WhenceError(f"{name} has no effect with {arms}. Leave it out, or take an arm that reads it: {able}.")


def plan_comparison(*, arms: list[str], seeds: int, **asked: Any) -> list[RunConfig]:
    """Return the runs of a comparison, arm by arm within each seed.

    Args:
        arms: keys of `ARMS`.
        seeds: how many; they are 0 ... seeds - 1.
        asked: see `configure`.

    Raises:
        WhenceError: see `configure`; or a comparison without evaluations.
    """
    if seeds < 1:
        raise WhenceError(f"seeds is {seeds}; at least 1 is needed, and 2 for intervals.")
    if not arms or len(set(arms)) < len(arms):
        raise WhenceError(f"arms is {','.join(arms)!r}; name each arm once. Known: {describe_arms()}.")
    if "seed" in asked:
        raise WhenceError("A comparison has no 'seed': `seeds` says how many there are.")
    configs = configure_arms(arms, **asked)
    return [replace(config, seed=seed) for seed in range(seeds) for config in configs]


def configure_arms(arms: Iterable[str], **asked: Any) -> list[RunConfig]:
    """Return one run of each arm, to be compared.

    Args:
        arms: keys of `ARMS`.
        asked: see `configure`.

    Raises:
        WhenceError: see `configure`; or a comparison without evaluations.
    """
    configs = [configure(arm=arm, **asked) for arm in arms]
    if not all(config.eval_episodes for config in configs):
        raise WhenceError("eval_episodes is 0, but arms are compared by their test returns: at least 2 are needed.")
    return configs
