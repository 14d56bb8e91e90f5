"""From what a person asks for to the runs it means, checked before anything is trained."""

import copy
from dataclasses import fields, replace
from typing import Any

from whence.errors import WhenceError, nearest
from whence.experiments.arms import ARMS, STANDARD
from whence.experiments.config import RunConfig, presets
from whence.experiments.environments import check_environment, default_policy, evaluation_env
from whence.experiments.training import make_model
from whence.guards import kept_generators


def configure(
    *, env: str | None = None, preset: str | None = None, arm: str = STANDARD, seed: int = 0, **overrides: Any
) -> RunConfig:
    """Return one run. The environment and the model were made once, so that what they refuse is refused here.

    Args:
        env: a Gymnasium id, trained with SB3's defaults; or
        preset: the name of a preset.
        arm: a key of `ARMS`.
        seed: of everything random.
        overrides: fields of `RunConfig`; None leaves a field as it is, and `hyperparameters` are merged.

    Raises:
        WhenceError: a name that is not known (the nearest are given), a value out of range, or settings that
            Gymnasium or Stable-Baselines3 refuses.
    """
    if (env is None) == (preset is None):
        raise WhenceError("Give either an environment, such as LunarLander-v3, or --preset NAME; not both, not none.")
    if preset is not None and preset not in presets():
        raise WhenceError(f"The preset {preset!r} is unknown.{nearest(preset, presets())}")
    known = [field.name for field in fields(RunConfig) if field.name not in ("env", "arm", "seed")]
    if unknown := [name for name in overrides if name not in known]:
        raise WhenceError(f"A run has no {unknown[0]!r}.{nearest(unknown[0], known)}")
    values: dict[str, Any] = dict(presets()[preset]) if preset is not None else {"env": env}
    given = {name: value for name, value in overrides.items() if value is not None}
    if "hyperparameters" in given:
        given["hyperparameters"] = {**values.get("hyperparameters", {}), **given["hyperparameters"]}
    config = RunConfig(arm=arm, seed=seed, **copy.deepcopy({**values, **given}))
    space = check_environment(config)
    if "policy" not in values | given:
        config = replace(config, policy=default_policy(space))
    with kept_generators():  # PPO seeds them
        trial = evaluation_env(config, 1)
        try:
            make_model(config, trial)
        finally:
            trial.close()
    return config


def plan(*, arms: list[str], seeds: int, **asked: Any) -> list[RunConfig]:
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
        raise WhenceError(f"arms is {','.join(arms)!r}; name each arm once. Known: {', '.join(ARMS)}.")
    if "seed" in asked:
        raise WhenceError("A comparison has no 'seed': `seeds` says how many there are.")
    first = configure(arm=arms[0], **asked)
    if not first.eval_episodes:
        raise WhenceError("eval_episodes is 0, but arms are compared by their test returns: at least 2 are needed.")
    return [replace(first, arm=arm, seed=seed) for seed in range(seeds) for arm in arms]
