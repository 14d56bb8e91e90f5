"""The configuration of an agent's training run."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, field
from types import MappingProxyType
from typing import Annotated, Any, Self

from stable_baselines3 import PPO

from whence.core import AGENT_UNITS, Action, Return, Target, WhenceError, describe, read_numbers, suggest
from whence.engines import ENGINES
from whence.lab.arms import ARMS, CONTROL, find_arm
from whence.sb3.models import HYPERPARAMETERS
from whence.selection import DEFAULT_SHARE, IIF, SelectionRule
from whence.validation import Count, Natural, one_of, read_table, settings

BACKENDS = ("gymnasium", "envpool")

TARGETS: Mapping[str, Callable[..., Target]] = MappingProxyType({"return": Return, "action": Action})


@settings("A run")
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
        unit: what is kept or dropped as one, by its records' mean score: record or episode; None: record.
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
    seed: Natural
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    n_envs: Count = 1
    policy: Annotated[str, one_of(PPO.policy_aliases)] = "MlpPolicy"
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Annotated[str, one_of(("Adam", "AdamW", "RMSprop", "SGD"))] = "Adam"
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    drop: float = DEFAULT_SHARE
    warmup: int = 0
    unit: Annotated[str, one_of(AGENT_UNITS)] | None = None
    target: Annotated[str, one_of(TARGETS)] = "return"
    target_args: Mapping[str, Any] = field(default_factory=dict)
    engine: Annotated[str, one_of(("auto", *ENGINES))] = "auto"
    rounds: Count = 50
    eval_episodes: Natural = 100
    eval_every: Count = 1
    device: str = "cpu"
    collect_with: Annotated[str, one_of(BACKENDS)] = "gymnasium"
    evaluate_with: Annotated[str, one_of(BACKENDS)] = "gymnasium"
    pool_kwargs: Mapping[str, Any] = field(default_factory=dict)
    observe: str | None = None

    def __post_init__(self) -> None:
        bits = 31 if self.collect_with == "envpool" else 32  # EnvPool's seeds, and NumPy's
        if self.seed >= 2**bits:
            raise WhenceError(f"seed is {self.seed}; less than {2**bits} is needed, since seeds have {bits} bits here.")
        if unknown := [name for name in self.hyperparameters if name not in HYPERPARAMETERS]:
            raise WhenceError(f"PPO has no {unknown[0]!r}.{suggest(unknown[0], HYPERPARAMETERS)}")
        if self.eval_episodes == 1:
            raise WhenceError("eval_episodes is 1; a standard error needs 2, and 0 makes no evaluation.")
        IIF(self.drop, self.warmup)  # refuses what is out of range, even if the arm's rule does not read it
        self.make_target()

    def rule(self) -> SelectionRule:
        """Return the arm's selection rule; a `WhenceError` if the arm is a study's own."""
        return find_arm(self.arm).make_rule(drop=self.drop, warmup=self.warmup, unit=self.unit, seed=self.seed)

    def reads(self, name: str) -> bool:
        """Return whether the arm reads a field: drop, warmup, unit, or one that says how records are scored."""
        if self.arm.removeprefix(CONTROL) not in ARMS:  # a study's
            return True
        rule: Any = self.rule()
        return name in rule.__dataclass_fields__ if name in ("drop", "warmup", "unit") else bool(rule.needs_influence)

    def make_target(self) -> Target:
        """Return the target; a `WhenceError` if its arguments are not what it takes."""
        try:
            return TARGETS[self.target](**self.target_args)
        except TypeError as wrong:
            raise WhenceError(f"The target {self.target!r} does not take {dict(self.target_args)}: {wrong}.") from None

    @property
    def evaluated_rounds(self) -> list[int]:
        """The rounds after which the run is evaluated; 0 is before the first."""
        if not self.eval_episodes:
            return []
        return sorted({*range(0, self.rounds + 1, self.eval_every), self.rounds})

    def to_json(self) -> dict[str, Any]:
        """Return the configuration in JSON types; a number that is not finite as the string "inf", "-inf" or "nan"."""
        return describe(asdict(self))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration of which `to_json` returned these values; refuse values that no run has."""
        return read_table(cls, "A run", read_numbers(values))
