"""What one training run is, and how it follows from a preset or an environment's name."""

import copy
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any, Self

from whence.errors import WhenceError, nearest
from whence.experiments.arms import ARMS
from whence.experiments.environments import check_environment, default_policy
from whence.selection import IIF

OPTIMIZERS = ("Adam", "AdamW", "RMSprop", "SGD")
"""Names in torch.optim."""


@dataclass(frozen=True)
class RunConfig:
    """One training run; everything its results depend on.

    Attributes:
        env: Gymnasium id.
        env_kwargs: passed to `gymnasium.make`.
        n_envs: environments stepped side by side.
        policy: SB3's name of the policy.
        optimizer: its name in torch.optim.
        hyperparameters: PPO's, by SB3's names; what is missing has SB3's default.
        arm: a key of `ARMS`.
        drop: the share of negatively scored records to drop.
        rounds: rollouts to train on.
        eval_episodes: episodes of each evaluation.
        seed: of everything random in the run.
    """

    env: str
    arm: str
    seed: int
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    n_envs: int = 1
    policy: str = "MlpPolicy"
    optimizer: str = "Adam"
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    drop: float = 0.5
    rounds: int = 50
    eval_episodes: int = 100

    def __post_init__(self) -> None:
        if self.arm not in ARMS:
            raise WhenceError(f"The arm {self.arm!r} is unknown.{nearest(self.arm, ARMS)}")
        if self.optimizer not in OPTIMIZERS:
            raise WhenceError(f"The optimizer {self.optimizer!r} is unknown.{nearest(self.optimizer, OPTIMIZERS)}")
        for name, least in (("rounds", 1), ("eval_episodes", 2), ("n_envs", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise WhenceError(f"{name} is {getattr(self, name)}; at least {least} is needed.")
        IIF(self.drop)  # refuses a share outside (0, 1]

    def to_json(self) -> dict[str, Any]:
        """Return the configuration in JSON types; a number that is not finite as the string "inf", "-inf" or "nan"."""
        return _json(asdict(self))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration that `to_json` gave."""
        return cls(**_from_json(values))


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_json(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _from_json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_from_json(entry) for entry in value]
    return float(value) if isinstance(value, str) and value in ("inf", "-inf", "nan") else value


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Return the built-in presets by name."""
    return tomllib.loads((files("whence.experiments") / "presets.toml").read_text(encoding="utf-8"))


def plan(
    *, env: str | None = None, preset: str | None = None, arms: list[str], seeds: int, **overrides: Any
) -> list[RunConfig]:
    """Return the runs of a comparison, arm by arm within each seed.

    Args:
        env: a Gymnasium id, trained with SB3's defaults; or
        preset: the name of a preset.
        arms: keys of `ARMS`.
        seeds: how many; they are 0 ... seeds - 1.
        overrides: fields of `RunConfig`; None leaves a field as it is.

    Raises:
        WhenceError: a name that is not known (the nearest are given), or a value out of range.
    """
    if (env is None) == (preset is None):
        raise WhenceError("Give either an environment, such as LunarLander-v3, or --preset NAME; not both, not none.")
    if seeds < 1:
        raise WhenceError(f"seeds is {seeds}; at least 1 is needed, and 2 for intervals.")
    if not arms or len(set(arms)) < len(arms):
        raise WhenceError(f"arms is {','.join(arms)!r}; name each arm once. Known: {', '.join(ARMS)}.")
    if preset is not None and preset not in presets():
        raise WhenceError(f"The preset {preset!r} is unknown.{nearest(preset, presets())}")
    known = [field.name for field in fields(RunConfig) if field.name not in ("env", "arm", "seed")]
    if unknown := [name for name in overrides if name not in known]:
        raise WhenceError(f"A run has no {unknown[0]!r}.{nearest(unknown[0], known)}")
    given = {name: value for name, value in overrides.items() if value is not None}
    values = copy.deepcopy({**presets()[preset], **given} if preset is not None else {"env": env, **given})
    first = RunConfig(arm=arms[0], seed=0, **values)
    space = check_environment(first.env, first.env_kwargs)
    if "policy" not in values:
        first = replace(first, policy=default_policy(space))
    return [replace(first, arm=arm, seed=seed) for seed in range(seeds) for arm in arms]
