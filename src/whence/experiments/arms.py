"""The arms of a comparison, as data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from whence.errors import WhenceError, nearest
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

    @property
    def score(self) -> str:
        """What records are scored by; see `InfluenceCallback`."""
        return str(self.settings.get("score", "snapshot"))


STANDARD = "ppo"
"""The arm that the others are measured against."""

RULES: Mapping[str, Arm] = MappingProxyType(
    {
        "iif": Arm(lambda run: IIF(run.drop, run.warmup), True, "drop the share `drop` of the records below 0"),
        "mean": Arm(lambda run: BelowMean(run.drop, run.warmup), True, "drop the share `drop` of those below the mean"),
    }
)
"""The arms whose names parts may follow, one of each of `PARTS` at most, in their order: "mean-unrolled-guarded"."""


class Part(NamedTuple):
    """What follows a rule in an arm's name: what it sets, and a line for people."""

    settings: Mapping[str, Any]
    about: str


PARTS: Sequence[Mapping[str, Part]] = (
    {
        "crossfit": Part({"score": "crossfit"}, "each half of the episodes scored by the other"),
        **{score: Part({"score": score}, f"by the {score} score of the whole round, rehearsed") for score in METHODS},
    },
    {"frozen": Part({"advantage_norm": "buffer"}, "on advantages normalised once, before anything is dropped")},
    {"guarded": Part({"guard": True}, "in rounds where held-out episodes speak for it, ppo in the others")},
)
"""Scores; how advantages are normalised; whether there is a guard."""


def _composed(rule: str) -> Iterator[tuple[str, Arm]]:
    """Yield the arms of a rule with every combination of parts, by name."""
    for choice in product(*(["", *alike] for alike in PARTS)):
        chosen = [alike[part] for alike, part in zip(PARTS, choice, strict=True) if part]
        about = "; ".join([RULES[rule].about, *(part.about for part in chosen)])
        settings = {name: value for part in chosen for name, value in part.settings.items()}
        if chosen:
            yield "-".join([rule, *filter(None, choice)]), replace(RULES[rule], about=about, settings=settings)


_COMPOSED = {name: arm for rule in RULES for name, arm in _composed(rule)}

ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        STANDARD: Arm(lambda run: KeepAll(), False, "PPO as it is: every record trains"),
        **RULES,
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
        **_COMPOSED,
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
        "ppo-as-far": Arm(
            lambda run: IIF(run.drop, run.warmup),
            False,
            "every record trains; each round's update takes the policy as far as iif's would have",
            callback=MatchedUpdate,
            settings={"by": "divergence"},
        ),
        **{
            f"ppo-lr-{scale:g}": Arm(
                lambda run: KeepAll(), False, f"PPO at {scale:g} times the learning rate", learning_rate_scale=scale
            )
            for scale in (0.5, 2.0, 4.0)
        },
    }
)
"""Every arm by its name."""

PLAIN = tuple(name for name in ARMS if name not in _COMPOSED)
"""The arms whose names have no parts."""


def known_arms() -> str:
    """Return the names of arms that there are, for people."""
    scores, *others = (", ".join(alike) for alike in PARTS)
    then = "".join(f", then {other}" for other in others)
    composed = f"after {' or '.join(RULES)} a score may follow ({scores}){then}, as in mean-unrolled-guarded"
    return f"{', '.join(PLAIN)}; {composed}"


def unknown_arm(name: str) -> WhenceError:
    """Return the error that says of a name that no arm has it, and which there are."""
    return WhenceError(f"The arm {name!r} is unknown.{nearest(name, ARMS, otherwise='')} Known: {known_arms()}.")
