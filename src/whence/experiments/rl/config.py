"""What one training run is, and how it follows from a preset or an environment's name."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Self

from stable_baselines3 import PPO

from whence.engines import ENGINES
from whence.errors import WhenceError, suggest
from whence.experiments.rl.arms import find_arm
from whence.experiments.shared import check_field_names, check_field_types, check_type
from whence.sb3.base.model_description import HYPERPARAMETERS as HYPERPARAMETERS
from whence.selection import DEFAULT_SHARE, IIF, SelectionRule
from whence.targets import Action, Return, Target

OPTIMIZERS = ("Adam", "AdamW", "RMSprop", "SGD")
"""Names in torch.optim."""

BACKENDS = ("gymnasium", "envpool")

POLICIES = tuple(PPO.policy_aliases)
"""SB3's names."""

TARGETS: Mapping[str, Callable[..., Target]] = MappingProxyType({"return": Return, "action": Action})

_RETIRED = ("kl_per_round",)
"""Fields that only published results have: the divergence to which a controller steered each round, or null."""

_RANGES: Mapping[str, tuple[str, Callable[[float], bool]]] = MappingProxyType(
    {
        "learning_rate": ("a finite number, 0 or more,", lambda value: 0 <= value < math.inf),
        **dict.fromkeys(("n_steps", "batch_size", "n_epochs"), ("1 or more", lambda value: value >= 1)),
        **dict.fromkeys(("gamma", "gae_lambda"), ("a number from 0 to 1", lambda value: 0 <= value <= 1)),
        **dict.fromkeys(("clip_range", "clip_range_vf", "max_grad_norm"), ("0 or more", lambda value: value >= 0)),
        **dict.fromkeys(("ent_coef", "vf_coef"), ("a finite number", lambda value: -math.inf < value < math.inf)),
        "target_kl": ("a number", lambda value: value == value),
    }
)
"""For each hyper-parameter, the allowed range; values outside it would fail in training, or train nothing."""


@dataclass(frozen=True)
class RunConfig:
    """One training run; everything its results depend on.

    Attributes:
        env: Gymnasium id.
        env_kwargs: passed to `gymnasium.make`, as {"map_name": "8x8"}; merged with the preset's.
        n_envs: environments stepped side by side.
        policy: SB3's name of the policy: MlpPolicy, CnnPolicy or MultiInputPolicy.
        policy_kwargs: passed to the policy, as {"net_arch": [64, 64]}.
        optimizer: Adam, AdamW, RMSprop or SGD.
        hyperparameters: PPO's, by SB3's names; what is missing has SB3's default.
        arm: a key of `ARMS`, or the name of a study's own; see `run`.
        drop: the share to drop; with iif, of the records that score below 0.
        warmup: rounds at the start in which nothing is dropped.
        target: what a record's score says it raises: return, or action (of an observation).
        target_args: passed to the target.
        engine: how scores are computed; see `whence list engines`.
        device: where the policy is trained: cpu, cuda, cuda:1 or auto.
        rounds: rollouts to train on.
        eval_episodes: episodes of each evaluation; 0: no evaluation.
        eval_every: rounds from one evaluation to the next; the untrained and the last policy are evaluated too.
        collect_with: the library whose environments are trained in: gymnasium or envpool.
        evaluate_with: the library whose environments are evaluated in: gymnasium or envpool.
        pool_kwargs: EnvPool's settings of the environment, as `env_kwargs` are Gymnasium's.
        observe: the part of a dict observation that is observed; None: all of it.
        seed: seeds everything random in the run.
    """

    env: str
    arm: str
    seed: int
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    n_envs: int = 1
    policy: str = "MlpPolicy"
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "Adam"
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    drop: float = DEFAULT_SHARE
    warmup: int = 0
    target: str = "return"
    target_args: Mapping[str, Any] = field(default_factory=dict)
    engine: str = "auto"
    rounds: int = 50
    eval_episodes: int = 100
    eval_every: int = 1
    device: str = "cpu"
    collect_with: str = "gymnasium"
    evaluate_with: str = "gymnasium"
    pool_kwargs: Mapping[str, Any] = field(default_factory=dict)
    observe: str | None = None

    def __post_init__(self) -> None:
        check_types(vars(self))
        for what, name, known in (
            ("policy", self.policy, POLICIES),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("target", self.target, TARGETS),
            ("engine", self.engine, ("auto", *ENGINES)),
            ("library to collect with", self.collect_with, BACKENDS),
            ("library to evaluate with", self.evaluate_with, BACKENDS),
        ):
            if name not in known:
                raise WhenceError(f"The {what} {name!r} is unknown.{suggest(name, known)}")
        if unknown := [name for name in self.hyperparameters if name not in HYPERPARAMETERS]:
            raise WhenceError(f"PPO has no hyper-parameter {unknown[0]!r}.{suggest(str(unknown[0]), HYPERPARAMETERS)}")
        for name, value in self.hyperparameters.items():
            _check_hyperparameter(name, value)
        for name, least in (("rounds", 1), ("eval_episodes", 0), ("eval_every", 1), ("n_envs", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise WhenceError(f"{name} is {getattr(self, name)}; at least {least} is needed.")
        bits = 31 if self.collect_with == "envpool" else 32  # EnvPool's seeds, and NumPy's
        if self.seed >= 2**bits:
            raise WhenceError(f"seed is {self.seed}; less than {2**bits} is needed, since seeds have {bits} bits here.")
        if self.eval_episodes == 1:
            raise WhenceError("eval_episodes is 1; a standard error needs 2, and 0 makes no evaluation.")
        IIF(self.drop, self.warmup)  # refuses what is out of range, even if the arm's rule does not read it
        self.make_target()

    def rule(self) -> SelectionRule:
        """Return the arm's selection rule.

        Raises:
            WhenceError: the arm is a study's own.
        """
        return find_arm(self.arm).make_rule(drop=self.drop, warmup=self.warmup, seed=self.seed)

    def make_target(self) -> Target:
        """Return the target.

        Raises:
            WhenceError: its arguments are not what it takes.
        """
        try:
            return TARGETS[self.target](**self.target_args)
        except TypeError as wrong:
            raise WhenceError(f"The target {self.target!r} does not take {dict(self.target_args)}: {wrong}.") from None

    def to_json(self) -> dict[str, Any]:
        """Return the configuration in JSON types; a number that is not finite as the string "inf", "-inf" or "nan"."""
        return _to_json(asdict(self))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration of which `to_json` returned these values; retired fields are ignored.

        Raises:
            WhenceError: a field is missing, unknown, or has a value that no run has.
        """
        check_field_names(cls, values, but=_RETIRED)
        fields = {name: value for name, value in values.items() if name not in _RETIRED}
        return cls(**_from_json(fields))


def list_evaluated_rounds(config: RunConfig) -> list[int]:
    """Return the rounds after which a run is evaluated; 0 is before the first."""
    return sorted({*range(0, config.rounds + 1, config.eval_every), config.rounds})


def check_types(values: Mapping[str, Any]) -> None:
    """Refuse values of a run's fields, by the fields' names, that do not have the field's type.

    Raises:
        WhenceError: names the first such field.
    """
    check_field_types(RunConfig, values)


def _check_hyperparameter(name: str, value: Any) -> None:
    default = HYPERPARAMETERS[name]
    check_type(name, value, *((float, type(None)) if default is None else (type(default),)))
    needed, is_met = _RANGES.get(name, ("", lambda value: True))
    if value is not None and not is_met(value):
        raise WhenceError(f"{name} is {value}; {needed} is needed.")


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _from_json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_from_json(entry) for entry in value]
    return float(value) if isinstance(value, str) and value in ("inf", "-inf", "nan") else value
