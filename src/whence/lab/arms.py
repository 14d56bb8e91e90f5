"""The arms of a comparison and the presets of agents, as data.

An arm is a way to train an agent, or to select a language model's responses. A preset is an environment with settings.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from whence.core import WhenceError, suggest

if TYPE_CHECKING:
    from whence.selection import SelectionRule

STANDARD = "ppo"
"""The arm that the others are measured against."""


SCORES, GROUPS, DISCRETE = "scores", "groups", "discrete"
"""What a rule needs: scores; several responses to a prompt; discrete states and actions."""

ANY = "any"
"""The unit of a rule that can keep or drop by any."""

_RULES = "whence.lab.rules"


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        rule: name of a selection rule.
        about: one line for people.
        rule_settings: arguments of the rule that a run does not set.
        learning_rate_scale: factor of the run's learning rate.
        target: what a language model's responses are scored by, unless a run names another; None: nothing is scored,
            or the rule brings its own.
        unit: what the rule keeps or drops as one; `ANY`: what the run says, by default a record.
        needs: what the rule needs besides the records.
        is_control: whether as many units are dropped as the rule would drop, but at random.
        module: where the rule is.
    """

    rule: str
    about: str
    rule_settings: Mapping[str, Any] = field(default_factory=dict)
    learning_rate_scale: float = 1.0
    target: str | None = None
    unit: str = ANY
    needs: str = SCORES
    is_control: bool = False
    module: str = "whence.selection"

    def make_rule(self, **run_fields: Any) -> "SelectionRule":
        """Return the selection rule of a run, with those of the run's fields that the rule has; None is no setting."""
        from whence import selection  # it imports torch, which a list of arms does not need

        rule_class = getattr(import_module(self.module), self.rule)
        fields = rule_class.__dataclass_fields__
        of_run = {name: value for name, value in run_fields.items() if name in fields and value is not None}
        rule: SelectionRule = rule_class(**{**of_run, **self.rule_settings})
        return selection.RandomDrop(seed=run_fields["seed"], like=rule) if self.is_control else rule


ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        STANDARD: Arm("KeepAll", "PPO as it is: every record trains", unit="", needs=""),
        "iif": Arm("IIF", "drop the share `drop` of the records below 0"),
        "mean": Arm("BelowMean", "drop the share `drop` of those below the mean"),
        "nonpositive": Arm("NonPositive", "drop every record that scores 0 or less"),
        "dtv": Arm("DTV", "drop the units whose gradient opposes the mean of all; an episode each by default"),
        "dtv-loo": Arm("DTV", "the same, by the mean of the others", {"leave_one_out": True}),
        "negative-random": Arm("NegativeRandom", "as many as iif, at random below 0", module=_RULES),
        "random": Arm("RandomDrop", "as many as iif, at random among all"),
        "advantage-magnitude": Arm("AdvantageMagnitude", "drop the share `drop` of advantages closest to 0", needs=""),
        "advantage-1": Arm(
            "AdvantageMismatch",
            "drop the share `drop` of those whose advantage has another sign than the return, furthest first",
            {"order": "distance"},
            unit="record",
            needs=DISCRETE,
            module=_RULES,
        ),
        "advantage-2": Arm(
            "AdvantageMismatch",
            "the same, lowest product with the return's first",
            {"order": "product"},
            unit="record",
            needs=DISCRETE,
            module=_RULES,
        ),
        "td-error": Arm(
            "TDErrorPriority",
            "draw records of large TD errors more often",
            unit="record",
            needs="",
            module=_RULES,
        ),
        **{
            f"ppo-lr-{scale:g}": Arm(
                *("KeepAll", f"PPO at {scale:g} times the learning rate"), learning_rate_scale=scale, unit="", needs=""
            )
            for scale in (0.5, 2.0, 4.0)
        },
    }
)
"""Every arm of agents. A study trains in further ways with `run(..., make_callback=...)`, under names of its own."""

CONTROL = "random-"
"""What the name of an arm's control begins with: `random-ARM` drops as many as ARM, at random."""


def find_arm(name: str, arms: Mapping[str, Arm] = ARMS) -> Arm:
    """Return an arm by its name, or the control of one; a `WhenceError` if there is none."""
    if name in arms:
        return arms[name]
    if (controlled := name.removeprefix(CONTROL)) == name or controlled not in arms:
        raise WhenceError(f"The arm {name!r} is unknown.{suggest(name, arms)}")
    return replace(arms[controlled], about=f"as many as {controlled}, at random", is_control=True)


def counts_scoring(name: str) -> bool:
    """Return whether the seconds of an arm include scoring; a control scores only to know how much to drop."""
    return name not in (STANDARD, "random") and not name.startswith((f"{STANDARD}-", CONTROL))


def place_arm(name: str) -> float:
    """Return the place of an arm in tables; those of studies stand between the rules and the learning rates."""
    names = list(ARMS)
    return names.index(name) if name in ARMS else names.index("ppo-lr-0.5") - 0.5


LANGUAGE_ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        STANDARD: Arm("KeepAll", "every response trains", unit="", needs=""),
        "score": Arm("ScoreAll", "every response trains, and is scored", unit=""),
        "random": Arm(
            "RandomDrop",
            "drop as many responses as iif, at random",
            {"drop": 1.0, "zeros": True},
            target="sequence",
        ),
        "iif": Arm("NonPositive", "drop every response that scores 0 or less (LDA)", target="sequence"),
        "ippo": Arm(
            "IPPO",
            "the same with scores by demonstrations, which also weight the kept responses (I-PPO)",
            target="validation",
        ),
        "ippo-unweighted": Arm(
            "IPPO",
            "the same, with all kept responses weighted equally",
            rule_settings={"weighted": False},
            target="validation",
        ),
        "dtv": Arm("DTV", "drop the responses whose gradient opposes the mean, within a prompt's (DTV)"),
        "dtv-loo": Arm("DTV", "the same, by the mean of the others (DTV-Loo)", {"leave_one_out": True}),
        "zero-variance": Arm(
            "ZeroVariance", "drop the responses to a prompt if all have one reward (DAPO)", unit="group", needs=GROUPS
        ),
        "max-variance": Arm(
            "MaxVariance",
            "keep the half of a prompt's responses whose rewards differ most (PODS)",
            unit="row",
            needs=GROUPS,
        ),
        "advantage-magnitude": Arm(
            "AdvantageMagnitude",
            "drop the half of the responses whose advantages are closest to 0 (CPPO)",
            {"drop": 0.5},
            needs="",
        ),
    }
)
"""Selections by name; the command calls the standard one `none`."""

LANGUAGE_TARGETS: Mapping[str, str] = MappingProxyType(
    {
        "sequence": "log-probs of whole responses, by the advantage of the last token",
        "token": "log-probs of tokens, each by its own advantage",
        "reward": "log-probs of whole responses, by the reward alone",
        "validation": "likelihood of trusted demonstrations",
        "objective": "what training itself raises: in the step, by the last round's own gradient, which costs nothing",
    }
)


def split_arm(arm: str) -> tuple[str, str | None]:
    """Return an arm's selection, and its target if the arm's name has one."""
    if arm.removeprefix(CONTROL) in LANGUAGE_ARMS:
        return arm, None
    selection, _, target = arm.rpartition("-")
    return (selection, target) if selection else (arm, None)


@cache
def read_presets() -> Mapping[str, Mapping[str, Any]]:
    """Return the built-in presets by name; a preset's values override those of its `base`."""
    tables: dict[str, dict[str, Any]] = tomllib.loads((files("whence.lab") / "presets.toml").read_text("utf-8"))
    for name, values in tables.items():
        if "base" in values:
            base = tables[values.pop("base")]
            hyperparameters = {**base["hyperparameters"], **values.get("hyperparameters", {})}
            tables[name] = {**base, **values, "hyperparameters": hyperparameters}
    return tables
