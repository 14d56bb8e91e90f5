"""The arms of a comparison, as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from whence.experiments.controls import MatchedUpdate
from whence.heuristics import AdvantageMismatch, TDErrorPriority
from whence.rounds import METHODS
from whence.sb3 import InfluenceCallback
from whence.selection import IIF, BelowMean, KeepAll, NegativeRandom, NonPositive, RandomDrop, SelectionRule

if TYPE_CHECKING:
    from whence.experiments.config import RunConfig


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        rule: makes the selection rule of a run.
        counts_scoring: whether the time of scoring and selecting is the arm's own. A control that scores only to know
            how much to drop is not charged for it.
        about: one line for people.
        learning_rate_scale: what the run's learning rate is multiplied by.
        callback: what selects and trains.
        settings: passed to it: how records are scored, how advantages are normalised, whether there is a guard.
    """

    rule: Callable[["RunConfig"], SelectionRule]
    counts_scoring: bool
    about: str
    learning_rate_scale: float = 1.0
    callback: type[InfluenceCallback] = InfluenceCallback
    settings: Mapping[str, Any] = field(default_factory=dict)


def _iif(about: str, **settings: Any) -> Arm:
    return Arm(lambda run: IIF(run.drop, run.warmup), True, about, settings=settings)


def _by(score: str) -> Arm:
    return _iif(f"iif by the {score} score of the whole round, rehearsed", score=score)


STANDARD = "ppo"
"""The arm that the others are measured against."""

ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        STANDARD: Arm(lambda run: KeepAll(), False, "PPO as it is: every record trains"),
        "iif": _iif("drop the share `drop` of the records below 0"),
        "mean": Arm(lambda run: BelowMean(run.drop, run.warmup), True, "drop the share `drop` of those below the mean"),
        "nonpositive": Arm(lambda run: NonPositive(run.warmup), True, "drop every record that scores 0 or less"),
        "negative-random": Arm(
            lambda run: NegativeRandom(run.drop, run.seed, run.warmup), True, "as many as iif, at random below 0"
        ),
        "random": Arm(
            lambda run: RandomDrop(run.drop, run.seed, run.warmup), False, "as many as iif, at random among all"
        ),
        "advantage-1": Arm(
            lambda run: AdvantageMismatch("distance", run.drop, run.warmup),
            True,
            "drop the share `drop` of those whose advantage has another sign than the return, furthest first",
        ),
        "advantage-2": Arm(
            lambda run: AdvantageMismatch("product", run.drop, run.warmup),
            True,
            "the same, lowest product with the return's first",
        ),
        "td-error": Arm(lambda run: TDErrorPriority(), True, "draw records of large TD errors more often"),
        "iif-crossfit": _iif("iif, each half of the episodes scored by the other", score="crossfit"),
        **{f"iif-{score}": _by(score) for score in METHODS},
        "iif-frozen": _iif("iif on advantages normalised once, before anything is dropped", advantage_norm="buffer"),
        "iif-guarded": _iif("iif in rounds where held-out episodes speak for it, ppo in the others", guard=True),
        "ppo-frozen": Arm(
            lambda run: KeepAll(),
            False,
            "PPO on advantages normalised once a round, not in each minibatch",
            settings={"advantage_norm": "buffer"},
        ),
        "ppo-matched": Arm(
            lambda run: IIF(run.drop, run.warmup),
            False,
            "every record trains; each round's update gets the norm that iif's would have",
            callback=MatchedUpdate,
        ),
        **{
            f"ppo-lr-{scale:g}": Arm(
                lambda run: KeepAll(), False, f"PPO at {scale:g} times the learning rate", learning_rate_scale=scale
            )
            for scale in (0.5, 2.0, 4.0)
        },
    }
)
