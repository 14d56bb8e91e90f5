"""The arms of a comparison, as data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from whence.errors import WhenceError, suggest
from whence.experiments.shared import STANDARD

if TYPE_CHECKING:
    from whence.selection import SelectionRule

RULE_FIELDS = ("drop", "warmup", "seed")
"""Fields of a run that a rule may read."""

METHODS = ("trajectory", "optimizer", "optimizer-momentum", "unrolled", "smoothed")
"""The methods that score whole rounds. They repeat `whence.rounds.METHODS`, so that a list of arms needs no torch."""


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
        trains: "selection": on the records that the rule keeps; "matched": on every record, with an update as long, or
            as far, as the selection's (`MatchedUpdate`).
        settings: arguments of the callback: `method`, `advantage_norm`, `guard` and `keep_flat` of `ResearchCallback`,
            `by` of `MatchedUpdate`.
    """

    rule: str
    about: str
    reads: Sequence[str] = ()
    rule_settings: Mapping[str, Any] = field(default_factory=dict)
    counts_scoring: bool = True
    learning_rate_scale: float = 1.0
    trains: Literal["selection", "matched"] = "selection"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """How records are scored; see `ResearchCallback`."""
        return str(self.settings.get("method", "snapshot"))

    def make_rule(self, *, drop: float, warmup: int, seed: int) -> "SelectionRule":
        """Return the selection rule of a run with these fields."""
        from whence import heuristics, selection  # they import torch, which a list of arms does not need

        fields = {"drop": drop, "warmup": warmup, "seed": seed}
        rule_class = getattr(selection, self.rule, None) or getattr(heuristics, self.rule)
        rule: SelectionRule = rule_class(**self.rule_settings, **{name: fields[name] for name in self.reads})
        return rule


_SHARE = ("drop", "warmup")

RULES: Mapping[str, Arm] = MappingProxyType(
    {
        "iif": Arm("IIF", "drop the share `drop` of the records below 0", _SHARE),
        "mean": Arm("BelowMean", "drop the share `drop` of those below the mean", _SHARE),
    }
)
"""The arms whose names `PARTS` may follow, at most one of each group, in order: "mean-unrolled-guarded"."""


class Part(NamedTuple):
    """One part of an arm's name: the settings it adds, and a line for people."""

    settings: Mapping[str, Any]
    about: str


PARTS: Sequence[Mapping[str, Part]] = (
    {
        "crossfit": Part({"method": "crossfit"}, "each half of the episodes scored by the other"),
        **{
            method: Part({"method": method}, f"by the {method} score of the whole round, after a trial of it")
            for method in METHODS
        },
    },
    {"frozen": Part({"advantage_norm": "buffer"}, "on advantages normalised once, before anything is dropped")},
    {
        "guarded": Part({"guard": True}, "in rounds where held-out episodes speak for it, ppo in the others"),
        "rewarded": Part({"keep_flat": True}, "in rounds where actions earned different rewards, ppo in the others"),
    },
)
"""The parts in three groups: the score, how advantages are normalised, in which rounds it selects."""


def _compose_arms(rule: str) -> Iterator[tuple[str, Arm]]:
    """Yield the arms of a rule with every combination of parts, by name."""
    for names in product(*(["", *part_group] for part_group in PARTS)):
        parts = [part_group[name] for part_group, name in zip(PARTS, names, strict=True) if name]
        about = "; ".join([RULES[rule].about, *(part.about for part in parts)])
        settings = {name: value for part in parts for name, value in part.settings.items()}
        if parts:
            yield "-".join([rule, *filter(None, names)]), replace(RULES[rule], about=about, settings=settings)


COMPOSED: Mapping[str, Arm] = MappingProxyType({name: arm for rule in RULES for name, arm in _compose_arms(rule)})
"""The arms composed of a rule and parts. Studies compare them; none trained measurably better than its rule alone."""

_MATCHED = Arm("IIF", "", _SHARE, counts_scoring=False, trains="matched")

ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        STANDARD: Arm("KeepAll", "PPO as it is: every record trains", counts_scoring=False),
        **RULES,
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
        **COMPOSED,
        "ppo-frozen": Arm(
            "KeepAll",
            "PPO on advantages normalised once a round, not in each minibatch",
            counts_scoring=False,
            settings={"advantage_norm": "buffer"},
        ),
        "ppo-matched": replace(
            _MATCHED, about="every record trains; each round's update gets the norm that iif's would have"
        ),
        "ppo-as-far": replace(
            _MATCHED,
            about="every record trains; each round's update takes the policy as far as iif's would have",
            settings={"by": "divergence"},
        ),
        **{
            f"ppo-lr-{scale:g}": Arm(
                "KeepAll", f"PPO at {scale:g} times the learning rate", counts_scoring=False, learning_rate_scale=scale
            )
            for scale in (0.5, 2.0, 4.0)
        },
    }
)
"""Every arm by its name."""

PLAIN = tuple(name for name in ARMS if name not in COMPOSED)
"""The arms whose names have no parts."""

FIRST = (STANDARD, "iif", "random", "nonpositive", "negative-random", "ppo-lr-2", "ppo-lr-4", "ppo-as-far")
"""The arms to look at first."""


def describe_arms() -> str:
    """Return the names of all arms, for people."""
    scores = ", ".join(PARTS[0])
    then = "".join(f", then {' or '.join(part_group)}" for part_group in PARTS[1:])
    composed = f"after {' or '.join(RULES)} a score may follow ({scores}){then}, as in mean-unrolled-guarded"
    return f"{', '.join(PLAIN)}; {composed}"


def unknown_arm(name: str) -> WhenceError:
    """Return the error for a name that no arm has."""
    return WhenceError(f"The arm {name!r} is unknown.{suggest(name, ARMS, otherwise='')} Known: {describe_arms()}.")
