"""Ways to select a language model's responses, and targets of their scores, by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from whence.experiments.shared import STANDARD

if TYPE_CHECKING:
    from whence.selection import SelectionRule


@dataclass(frozen=True)
class LanguageArm:
    """One way to select responses.

    Attributes:
        rule: name of a selection rule in `whence.selection`.
        target: the target of the scores, unless a run names another; None: nothing is scored.
        about: a description in one line.
        rule_settings: arguments of the rule.
        seeded: whether the rule gets the run's seed.
    """

    rule: str
    target: str | None
    about: str
    rule_settings: Mapping[str, Any] = field(default_factory=dict)
    seeded: bool = False

    def make_rule(self, seed: int) -> "SelectionRule":
        """Return the selection rule of a run with this seed."""
        from whence import selection  # imports torch, which a list of arms does not need

        rule: SelectionRule = getattr(selection, self.rule)(
            **self.rule_settings, **({"seed": seed} if self.seeded else {})
        )
        return rule


LANGUAGE_ARMS: Mapping[str, LanguageArm] = MappingProxyType(
    {
        STANDARD: LanguageArm("KeepAll", None, "PPO itself: every response trains"),
        "random": LanguageArm(
            "RandomDrop",
            "sequence",
            "drop as many responses as iif, at random",
            {"drop": 1.0, "zeros": True},
            seeded=True,
        ),
        "iif": LanguageArm("NonPositive", "sequence", "drop every response that scores 0 or less (LDA)"),
        "ippo": LanguageArm(
            "IPPO", "validation", "the same with scores by demonstrations, which also weight the kept responses (I-PPO)"
        ),
        "ippo-unweighted": LanguageArm(
            "IPPO", "validation", "the same, with all kept responses weighted equally", {"weighted": False}
        ),
    }
)
"""Selections by name; the command calls the standard one `none`."""

LANGUAGE_TARGETS: Mapping[str, str] = MappingProxyType(
    {
        "sequence": "log-probs of whole responses, by the advantage of the last token",
        "token": "log-probs of tokens, each by its own advantage",
        "validation": "likelihood of trusted demonstrations",
        "held-out": "as sequence, over responses to prompts that do not train, drawn in every round",
    }
)


def split_arm(arm: str) -> tuple[str, str | None]:
    """Return an arm's selection, and its target if the arm's name has one."""
    if arm in LANGUAGE_ARMS:
        return arm, None
    for target in LANGUAGE_TARGETS:
        if arm.endswith(f"-{target}"):
            return arm.removesuffix(f"-{target}"), target
    selection, _, target = arm.rpartition("-")
    return (selection, target) if selection else (arm, None)
