"""The arms of a comparison, as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from whence.selection import IIF, BelowMean, KeepAll, NegativeRandom, NonPositive, RandomDrop, SelectionRule


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        rule: makes the selection rule from the share to drop and the run's seed.
        counts_scoring: whether the time of scoring is the arm's own. A control that scores only to know how much to
            drop is not charged for it.
        about: one line for people.
    """

    rule: Callable[[float, int], SelectionRule]
    counts_scoring: bool
    about: str


STANDARD = "ppo"
"""The arm that the others are measured against."""

ARMS: Mapping[str, Arm] = MappingProxyType(
    {
        STANDARD: Arm(lambda drop, seed: KeepAll(), False, "PPO as it is: every record trains"),
        "iif": Arm(lambda drop, seed: IIF(drop), True, "drop the share `drop` of the records that score below 0"),
        "random": Arm(lambda drop, seed: RandomDrop(drop, seed), False, "drop as many as iif would, at random"),
        "negative-random": Arm(
            lambda drop, seed: NegativeRandom(drop, seed), True, "drop as many as iif would, at random below 0"
        ),
        "mean": Arm(
            lambda drop, seed: BelowMean(drop), True, "drop the share `drop` of the records below the mean score"
        ),
        "nonpositive": Arm(lambda drop, seed: NonPositive(), True, "drop every record that scores 0 or less"),
    }
)
