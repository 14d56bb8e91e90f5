"""Which records of a round train, and how much (LDA §5.1)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from whence.errors import InvalidInfluence, WhenceError
from whence.influence import Influence, argsort_ascending
from whence.records import RecordBatch


@dataclass(frozen=True, eq=False)
class Selection:
    """What a rule decided for the n records of a round.

    Attributes:
        keep: (n,) bool, True where the record trains.
        weights: (n,) float >= 0, how much it trains; 0 where dropped.
        reasons: n entries, why the record was dropped; None where it was kept.
    """

    keep: Bool[Tensor, " n"]
    weights: Float[Tensor, " n"]
    reasons: Sequence[str | None]

    def __post_init__(self) -> None:
        n = len(self.keep)
        if self.weights.shape != (n,) or len(self.reasons) != n or self.keep.dtype != torch.bool:
            raise WhenceError(
                f"A Selection needs keep (n,) bool, weights (n,) and n reasons; got {tuple(self.keep.shape)} "
                f"{self.keep.dtype}, {tuple(self.weights.shape)} and {len(self.reasons)}."
            )
        if not torch.isfinite(self.weights).all() or (self.weights < 0).any() or (self.weights[~self.keep] != 0).any():
            raise WhenceError("Weights of a Selection are finite, not negative, and 0 for dropped records.")
        if self.keep.any() and not self.weights.any():
            raise WhenceError(
                f"A Selection keeps {int(self.keep.sum())} of {n} records and gives all of them weight 0: weigh those "
                "that are to train, or drop the records (keep False)."
            )

    @property
    def uniform(self) -> bool:
        """Whether all kept records weigh the same."""
        kept = self.weights[self.keep]
        return len(kept) == 0 or bool((kept == kept[0]).all())

    @classmethod
    def dropping(cls, keep: Bool[Tensor, " n"], reason: str) -> "Selection":
        """Return a selection that drops the records with `keep` False, all for one reason, and weighs the rest 1."""
        return cls(keep, keep.float(), [None if kept else reason for kept in keep.tolist()])


@dataclass(frozen=True)
class Progress:
    """How far training has come.

    Attributes:
        round: the round under way, from 1.
        remaining: the share of all time steps that lies ahead, from 1 down to 0: what SB3's schedules are given.
    """

    round: int = 1
    remaining: float = 1.0


Share: TypeAlias = float | Callable[[float], float]
"""A share in [0, 1], or a schedule that makes one of `Progress.remaining`."""


@runtime_checkable
class SelectionRule(Protocol):
    """Decides which records train. Nothing is scored for a rule that does not need it."""

    @property
    def needs_influence(self) -> bool:
        """Whether `select` reads the influence; if not, it is None."""
        ...

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress) -> Selection:
        """Return the selection for one round."""
        ...


START = Progress()


@dataclass(frozen=True)
class KeepAll:
    """Keep every record: training as it is without a rule."""

    needs_influence = False

    def select(self, records: RecordBatch, influence: Influence | None = None, progress: Progress = START) -> Selection:
        """Keep all."""
        return _dropping([], len(records), "")


@dataclass(frozen=True)
class IIF:
    """Iterative influence-based filtering: drop the `floor(drop * m)` lowest of the m negative scores (LDA Alg. 1).

    Of equal scores the record with the lower id is dropped first.

    Attributes:
        drop: share of the negatively scored records to drop, in (0, 1]; or a function of the progress remaining, as
            SB3's schedules are. LDA's best: 0.5 for FrozenLake, Acrobot and Highway, 0.125 for MiniGrid and
            LunarLander, 0.0625 for BipedalWalker.
        warmup: rounds at the start in which nothing is dropped; they are scored all the same.
    """

    drop: Share = 0.5
    warmup: int = 0
    needs_influence = True

    def __post_init__(self) -> None:
        check_share(self.drop, self.warmup)

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop the lowest."""
        scores, share = read_scores(records, influence), share_at(self.drop, self.warmup, progress)
        lowest = argsort_ascending(scores, records.ids.cpu())[: count_to_drop(share, int((scores < 0).sum()))]
        return _dropping(lowest, len(records), f"influence among the lowest {share:g} of the negative")


@dataclass(frozen=True)
class BelowMean:
    """IIF with another threshold: drop the `floor(drop * m)` lowest of the m scores below the mean score.

    With the mean loss PPO uses, leaving a record out of one SGD step raises the target if it scores below the mean,
    not below 0.

    Attributes:
        drop: as in `IIF`, of the records below the mean.
        warmup: as in `IIF`.
    """

    drop: Share = 0.5
    warmup: int = 0
    needs_influence = True

    def __post_init__(self) -> None:
        check_share(self.drop, self.warmup)

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop the lowest."""
        scores, share = read_scores(records, influence).double(), share_at(self.drop, self.warmup, progress)
        lowest = argsort_ascending(scores, records.ids.cpu())[
            : count_to_drop(share, int((scores < scores.mean()).sum()))
        ]
        return _dropping(lowest, len(records), f"influence among the lowest {share:g} of those below the mean")


@dataclass(frozen=True)
class NonPositive:
    """Drop every record that does not score above 0 (LDA §5.3, for RLHF).

    Attributes:
        warmup: as in `IIF`.
    """

    warmup: int = 0
    needs_influence = True

    def __post_init__(self) -> None:
        check_share(1.0, self.warmup)

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop what is not positive."""
        scores = read_scores(records, influence)
        warm = progress.round <= self.warmup
        dropped = [] if warm else (scores <= 0).nonzero().flatten().tolist()
        return _dropping(dropped, len(records), "influence not above 0")


@dataclass(frozen=True)
class IPPO:
    """Drop every record that does not score above 0, and weigh the others by their scores (I-PPO).

    A kept record weighs its score over the mean of the kept scores, so that weights are 1 on average.

    Attributes:
        weighted: False weighs all kept records alike.
        warmup: as in `IIF`.
    """

    weighted: bool = True
    warmup: int = 0
    needs_influence = True

    def __post_init__(self) -> None:
        check_share(1.0, self.warmup)

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop what is not positive, and weigh what is."""
        kept = NonPositive(self.warmup).select(records, influence, progress)
        if not self.weighted or progress.round <= self.warmup or not kept.keep.any():
            return kept
        scores = read_scores(records, influence).double() * kept.keep
        weights = scores / scores[kept.keep].mean()
        return Selection(kept.keep, weights.float(), kept.reasons)


@dataclass(frozen=True)
class RandomDrop:
    """The control for IIF: drop as many records as IIF would, drawn at random from all (LDA §5.2).

    Attributes:
        drop: IIF's share, which sets how many to drop.
        seed: of the rule's own generator; no global generator is used. Rounds differ by their record ids.
        warmup: as in `IIF`.
        zeros: whether scores of 0 count too, as they do for `NonPositive`.
    """

    drop: Share = 0.5
    seed: int = 0
    warmup: int = 0
    zeros: bool = False
    needs_influence = True

    def __post_init__(self) -> None:
        check_share(self.drop, self.warmup)

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop at random."""
        chosen = _drawn(self, records, influence, progress, from_negative=False)
        return _dropping(chosen, len(records), "drawn at random")


@dataclass(frozen=True)
class NegativeRandom:
    """The control between IIF and chance: drop as many as IIF would, drawn at random from the negatively scored.

    It keeps the sign of the score and throws its rank away.

    Attributes:
        drop: IIF's share.
        seed: as in `RandomDrop`.
        warmup: as in `IIF`.
    """

    drop: Share = 0.5
    seed: int = 0
    warmup: int = 0
    needs_influence = True

    def __post_init__(self) -> None:
        check_share(self.drop, self.warmup)

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop at random among the negative."""
        chosen = _drawn(self, records, influence, progress, from_negative=True)
        return _dropping(chosen, len(records), "drawn at random from the negative")


def read_scores(records: RecordBatch, influence: Influence | None) -> Float[Tensor, " n"]:
    """Return the scores of exactly these records, in their order.

    Raises:
        InvalidInfluence: no influence, or that of other records.
    """
    if influence is None:
        raise InvalidInfluence("This rule needs an influence: pass attribute(policy, records, target=Return()).")
    theirs, digest = influence.record_ids, influence.provenance.records
    if not torch.equal(theirs, records.ids.cpu()) or (digest is not None and digest != records.fingerprint):
        raise InvalidInfluence(
            f"The influence holds {len(influence)} scores of other records than the {len(records)} to select from. "
            "Score these records: attribute(policy, records, ...), and pass the whole influence, not top() or bottom()."
        )
    return influence.scores


def share_at(drop: Share, warmup: int, progress: Progress) -> float:
    """Return the share to drop in a round: 0 while warming up; a schedule's value.

    Raises:
        WhenceError: a schedule gives no share.
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
    # 0.29 * 100 is 28.999...96 in floating point: the product is rounded before it is cut off.
    return math.floor(round(share * candidates, 9))


def _drawn(
    rule: RandomDrop | NegativeRandom,
    records: RecordBatch,
    influence: Influence | None,
    progress: Progress,
    *,
    from_negative: bool,
) -> NDArray[np.int64]:
    """Draw as many records as IIF would drop, from all or from the negatively scored; return their positions."""
    scores, share = read_scores(records, influence), share_at(rule.drop, rule.warmup, progress)
    counted = scores <= 0 if getattr(rule, "zeros", False) else scores < 0
    negative = counted.nonzero().flatten().numpy()
    candidates = negative if from_negative else np.arange(len(records))
    generator = np.random.default_rng([rule.seed, int(records.ids.min())])
    return generator.choice(candidates, size=count_to_drop(share, len(negative)), replace=False)


def _dropping(dropped: Tensor | NDArray[np.int64] | Sequence[int], total: int, reason: str) -> Selection:
    keep = torch.ones(total, dtype=torch.bool)
    keep[torch.as_tensor(dropped, dtype=torch.int64)] = False
    return Selection.dropping(keep, reason)


def check_share(drop: Share, warmup: int) -> None:
    """Refuse a share to drop outside (0, 1], or a negative warm-up."""
    if not callable(drop) and not 0 < drop <= 1:
        raise WhenceError(
            f"drop is {drop}; it is the share of records to drop, in (0, 1], or a function of the progress remaining."
        )
    if warmup < 0:
        raise WhenceError(f"warmup is {warmup}; it is a number of rounds, 0 or more.")
