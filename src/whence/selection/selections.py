"""Selections and the rules that make them: which records of a round train, and with which weights (LDA §5.1)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from whence.core import RecordBatch, WhenceError
from whence.influence import Influence


@dataclass(frozen=True, eq=False)
class Selection:
    """A rule's decision on the n records of a round.

    Attributes:
        keep: (n,) bool, True where the record trains.
        weights: (n,) float >= 0, how much the record counts; 0 for dropped records.
        reasons: n entries, why the record was dropped; None for kept records.
    """

    keep: Bool[Tensor, " n"]
    weights: Float[Tensor, " n"]
    reasons: Sequence[str | None]

    def __post_init__(self) -> None:
        n, weights = len(self.keep), self.weights
        fits = weights.shape == (n,) and len(self.reasons) == n and self.keep.dtype == torch.bool
        if not fits or not weights.isfinite().all() or (weights < 0).any() or weights[~self.keep].any():
            raise WhenceError(
                "A Selection needs keep (n,) bool, weights (n,), finite, not negative and 0 for dropped records, and "
                f"n reasons; got {self.keep}, {weights} and {len(self.reasons)} reasons."
            )
        if self.keep.any() and not weights.any():
            raise WhenceError(
                f"A Selection keeps {int(self.keep.sum())} of {n} records and gives all of them weight 0: weigh those "
                "that are to train, or drop the records (keep False)."
            )

    @property
    def uniform(self) -> bool:
        """Whether all kept records have the same weight."""
        weights = self.weights[self.keep]
        return len(weights) == 0 or bool((weights == weights[0]).all())

    @classmethod
    def dropping(cls, keep: Bool[Tensor, " n"], reason: str) -> "Selection":
        """Return a selection that drops the records with `keep` False for one reason, and gives the rest weight 1."""
        return cls(keep, keep.float(), [None if trains else reason for trains in keep.tolist()])


@dataclass(frozen=True)
class Progress:
    """How far training has come.

    Attributes:
        round: number of the present round, from 1.
        remaining: the share of all time steps still to come, from 1 down to 0, as SB3 passes it to its schedules.
    """

    round: int = 1
    remaining: float = 1.0


Share: TypeAlias = float | Callable[[float], float]
"""A share in [0, 1], or a schedule that returns one for `Progress.remaining`."""

DEFAULT_SHARE = 0.125
"""Of the records that a rule may drop, the share that it drops unless told otherwise."""


@runtime_checkable
class SelectionRule(Protocol):
    """Decides which records train. Records are scored only if the rule needs it."""

    @property
    def needs_influence(self) -> bool:
        """Whether `select` reads the influence; if not, it is called with None."""
        ...

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress) -> Selection:
        """Return the selection for one round."""
        ...


def check_rule(rule: object) -> None:
    """Refuse what is no selection rule, such as the class of one."""
    if isinstance(rule, type) or not isinstance(rule, SelectionRule):
        raise WhenceError(
            f"rule is {rule!r}; pass an instance, such as IIF(drop=0.125), with `needs_influence` and `select`."
        )


START = Progress()


@dataclass(frozen=True)
class KeepAll:
    """Keep every record, as training without a rule does."""

    needs_influence = False

    def select(self, records: RecordBatch, influence: Influence | None = None, progress: Progress = START) -> Selection:
        """Keep all."""
        return drop_positions([], len(records), "")


def share_at(drop: Share, warmup: int, progress: Progress) -> float:
    """Return the share to drop in a round: 0 in the warm-up, then `drop` or its value as a schedule.

    Raises:
        WhenceError: the schedule's value is not in [0, 1].
    """
    if progress.round <= warmup:
        return 0.0
    if not callable(drop):
        return drop
    share = float(drop(progress.remaining))
    if not 0 <= share <= 1:
        raise WhenceError(f"The drop schedule gives {share} at {progress.remaining:g} remaining; a share is in [0, 1].")
    return share


def count_to_drop(share: float, candidates: int) -> int:
    """Return `floor(share * candidates)`."""
    # 0.29 * 100 is 28.999...96 in floating point, so the product is rounded first.
    return math.floor(round(share * candidates, 9))


def check_share(drop: Share, warmup: int) -> None:
    """Refuse a share to drop outside (0, 1], or a negative warm-up."""
    if not callable(drop) and not (isinstance(drop, Real) and 0 < drop <= 1):
        raise WhenceError(
            f"drop is {drop!r}; it is the share of records to drop, in (0, 1], or a function of the remaining "
            "progress. Pass 0.125 to drop an eighth of them; KeepAll(), the arm ppo, drops none."
        )
    if not isinstance(warmup, Integral) or warmup < 0:
        raise WhenceError(f"warmup is {warmup!r}; it is a number of rounds, 0 or more.")


def drop_positions(positions: Tensor | NDArray[np.int64] | Sequence[int], total: int, reason: str) -> Selection:
    """Return the selection that drops the records at these positions, of `total`."""
    keep = torch.ones(total, dtype=torch.bool)
    keep[torch.as_tensor(positions, dtype=torch.int64)] = False
    return Selection.dropping(keep, reason)
