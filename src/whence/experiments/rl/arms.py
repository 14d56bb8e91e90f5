"""The arms of a comparison, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from whence.errors import WhenceError, suggest
from whence.experiments.shared import STANDARD

if TYPE_CHECKING:
    from whence.selection import SelectionRule

RULE_FIELDS = ("drop", "warmup", "seed")
"""Fields of a run that a rule may read."""


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        rule: name of a selection rule in `whence.selection` or `whence.heuristics`.
        about: one line for people.
        reads: the fields of a run that the rule takes, from `RULE_FIELDS`.
        rule_settings: further arguments of the rule.
        counts_scoring: whether the seconds of an arm include scoring and selecting. Those of a control that scores
            only to know how much to drop do not.
        learning_rate_scale: factor of the run's learning rate.
    """

    rule: str
    about: str
    reads: Sequence[str] = ()
    rule_settings: Mapping[str, Any] = field(default_factory=dict)
    counts_scoring: bool = True
    learning_rate_scale: float = 1.0

    def make_rule(self, *, drop: float, warmup: int, seed: int) -> "SelectionRule":
        """Return the selection rule of a run with these fields."""
        from whence import heuristics, selection  # they import torch, which a list of arms does not need

        fields = {"drop": drop, "warmup": warmup, "seed": seed}
        rule_class = getattr(selection, self.rule, None) or getattr(heuristics, self.rule)
        rule: SelectionRule = rule_class(**self.rule_settings, **{name: fields[name] for name in self.reads})
        return rule


_SHARE = ("drop", "warmup")

ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        STANDARD: Arm("KeepAll", "PPO as it is: every record trains", counts_scoring=False),
        "iif": Arm("IIF", "drop the share `drop` of the records below 0", _SHARE),
        "mean": Arm("BelowMean", "drop the share `drop` of those below the mean", _SHARE),
        "nonpositive": Arm("NonPositive", "drop every record that scores 0 or less", ("warmup",)),
        "negative-random": Arm("NegativeRandom", "as many as iif, at random below 0", RULE_FIELDS),
        "random": Arm("RandomDrop", "as many as iif, at random among all", RULE_FIELDS, counts_scoring=False),
        "advantage-1": Arm(
            "AdvantageMismatch",
            "drop the share `drop` of those whose advantage has another sign than the return, furthest first",
            _SHARE,
            {"order": "distance"},
        ),
        "advantage-2": Arm(
            "AdvantageMismatch", "the same, lowest product with the return's first", _SHARE, {"order": "product"}
        ),
        "td-error": Arm("TDErrorPriority", "draw records of large TD errors more often"),
        **{
            f"ppo-lr-{scale:g}": Arm(
                "KeepAll", f"PPO at {scale:g} times the learning rate", counts_scoring=False, learning_rate_scale=scale
            )
            for scale in (0.5, 2.0, 4.0)
        },
    }
)
"""Every arm by its name. A study trains in further ways with `run(..., make_callback=...)`, under names of its own."""


def find_arm(name: str) -> Arm:
    """Return an arm by its name.

    Raises:
        WhenceError: there is none of this name.
    """
    if name not in ARMS:
        raise WhenceError(f"The arm {name!r} is unknown.{suggest(name, ARMS)}")
    return ARMS[name]


def is_control(name: str) -> bool:
    """Return whether an arm, or one of a study, trains on every record, but otherwise than plain PPO."""
    return name.startswith(f"{STANDARD}-")


def counts_scoring(name: str) -> bool:
    """Return whether the seconds of an arm, or of one of a study, include scoring and selecting."""
    return ARMS[name].counts_scoring if name in ARMS else not is_control(name)


def place_arm(name: str) -> float:
    """Return the place of an arm in tables; those of studies stand between the rules and the learning rates."""
    names = list(ARMS)
    return names.index(name) if name in ARMS else names.index("ppo-lr-0.5") - 0.5
