"""Ways to select among a language model's responses, by name, and what scores are of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from whence.experiments.arms import STANDARD
from whence.selection import IPPO, KeepAll, NonPositive, RandomDrop, SelectionRule


@dataclass(frozen=True)
class LanguageArm:
    """One way to select responses.

    Attributes:
        rule: makes the selection rule of a run's seed.
        target: what scores are of, unless a run says otherwise; None: nothing is scored.
        about: one line for people.
    """

    rule: Callable[[int], SelectionRule]
    target: str | None
    about: str


LANGUAGE_ARMS: Mapping[str, LanguageArm] = MappingProxyType(
    {
        STANDARD: LanguageArm(lambda seed: KeepAll(), None, "PPO as it is: every response trains"),
        "random": LanguageArm(
            lambda seed: RandomDrop(1.0, seed, zeros=True), "sequence", "as many as iif, at random among all"
        ),
        "iif": LanguageArm(lambda seed: NonPositive(), "sequence", "drop every response that scores 0 or less (LDA)"),
        "ippo": LanguageArm(
            lambda seed: IPPO(), "validation", "the same by demonstrations, the kept weighed by their scores (I-PPO)"
        ),
        "ippo-unweighted": LanguageArm(
            lambda seed: IPPO(weighted=False), "validation", "the same, the kept all weighing alike"
        ),
    }
)
"""Selections by name; `none` is another name of the standard one."""

LANGUAGE_TARGETS: Mapping[str, str] = MappingProxyType(
    {
        "sequence": "log-probs of whole responses, by the advantage of the last token",
        "token": "log-probs of tokens, each by its own advantage",
        "validation": "likelihood of trusted demonstrations",
        "held-out": "as sequence, over responses drawn in every round to prompts that do not train",
    }
)


def split_arm(arm: str) -> tuple[str, str | None]:
    """Return an arm's selection and, where its name says one, its target."""
    if arm in LANGUAGE_ARMS:
        return arm, None
    for target in LANGUAGE_TARGETS:
        if arm.endswith(f"-{target}"):
            return arm.removesuffix(f"-{target}"), target
    selection, _, target = arm.rpartition("-")
    return (selection, target) if selection else (arm, None)
