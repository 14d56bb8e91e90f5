"""Selection rules by scores."""

from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from whence.core import InvalidInfluence, RecordBatch, WhenceError
from whence.influence import Influence, argsort_ascending
from whence.selection.selections import (
    DEFAULT_SHARE,
    START,
    Progress,
    Selection,
    Share,
    check_share,
    count_to_drop,
    drop_positions,
    share_at,
)


class _Rule:
    """A rule that reads scores; its settings are checked when it is made."""

    needs_influence = True

    def __post_init__(self) -> None:
        check_share(getattr(self, "drop", 1.0), getattr(self, "warmup", 0))
        seed = getattr(self, "seed", 0)
        if not isinstance(seed, Integral) or seed < 0:
            raise WhenceError(f"seed is {seed!r}; a whole number is needed, 0 or more.")


@dataclass(frozen=True)
class IIF(_Rule):
    """Iterative influence-based filtering: drop the `floor(drop * m)` lowest of the m negative scores (LDA Alg. 1).

    Among equal scores the record with the lower id is dropped first.

    Attributes:
        drop: share of the negatively scored records to drop, in (0, 1]; or a function of the remaining progress, like
            SB3's schedules. With SB3's defaults, 0.125 trained better than 0.5 (results/practice). LDA's best, with its
            own settings: 0.5 for FrozenLake, Acrobot and Highway, 0.125 for MiniGrid and LunarLander, 0.0625 for
            BipedalWalker.
        warmup: number of rounds at the start in which records are scored and none is dropped.
    """

    drop: Share = DEFAULT_SHARE
    warmup: int = 0

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop the lowest."""
        scores = read_scores(records, influence)
        return _drop_lowest(self, records, scores, int((scores < 0).sum()), progress, "those below 0")


@dataclass(frozen=True)
class BelowMean(_Rule):
    """IIF with another threshold: drop the `floor(drop * m)` lowest of the m scores below the mean score.

    PPO's loss is a mean over records, so leaving a record out of one SGD step raises the target if the record scores
    below the mean, not below 0.

    Attributes:
        drop: as in `IIF`, of the records below the mean.
        warmup: as in `IIF`.
    """

    drop: Share = DEFAULT_SHARE
    warmup: int = 0

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop the lowest."""
        scores = read_scores(records, influence).double()
        count = int((scores < scores.mean()).sum())
        return _drop_lowest(self, records, scores, count, progress, "those below the mean")


@dataclass(frozen=True)
class NonPositive(_Rule):
    """Drop every record that does not score above 0 (LDA §5.3, for RLHF).

    Attributes:
        warmup: as in `IIF`.
    """

    warmup: int = 0

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop the records whose score is not positive."""
        scores = read_scores(records, influence)
        warm = progress.round <= self.warmup
        dropped = [] if warm else (scores <= 0).nonzero().flatten().tolist()
        return drop_positions(dropped, len(records), "influence not above 0")


@dataclass(frozen=True)
class IPPO(_Rule):
    """Drop every record that does not score above 0, and weight the others by their scores (I-PPO).

    A kept record's weight is its score divided by the mean of the kept scores, so that weights are 1 on average.

    Attributes:
        weighted: False gives all kept records the same weight.
        warmup: as in `IIF`.
    """

    weighted: bool = True
    warmup: int = 0

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop the records whose score is not positive, and weight the others."""
        positive = NonPositive(self.warmup).select(records, influence, progress)
        if not self.weighted or progress.round <= self.warmup or not positive.keep.any():
            return positive
        scores = read_scores(records, influence).double() * positive.keep
        weights = scores / scores[positive.keep].mean()
        return Selection(positive.keep, weights.float(), positive.reasons)


@dataclass(frozen=True)
class RandomDrop(_Rule):
    """The control for IIF: drop as many records as IIF would, chosen at random from all (LDA §5.2).

    Attributes:
        drop: IIF's share, which sets how many to drop.
        seed: seed of the rule's generator; no global generator is used. Rounds differ through their record ids.
        warmup: as in `IIF`.
        zeros: whether to count scores of 0 as negative, as `NonPositive` does.
    """

    drop: Share = DEFAULT_SHARE
    seed: int = 0
    warmup: int = 0
    zeros: bool = False

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop at random."""
        scores = read_scores(records, influence)
        count = int(((scores <= 0) if self.zeros else (scores < 0)).sum())
        return _drop_at_random(self, records, np.arange(len(records)), count, progress, "drawn at random")


@dataclass(frozen=True)
class NegativeRandom(_Rule):
    """The control between IIF and chance: drop as many as IIF would, chosen at random from the negatively scored.

    It uses the score's sign and ignores its rank.

    Attributes:
        drop: IIF's share.
        seed: as in `RandomDrop`.
        warmup: as in `IIF`.
    """

    drop: Share = DEFAULT_SHARE
    seed: int = 0
    warmup: int = 0

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop at random among the negative."""
        negative = (read_scores(records, influence) < 0).nonzero().flatten().numpy()
        return _drop_at_random(self, records, negative, len(negative), progress, "drawn at random from the negative")


def read_scores(records: RecordBatch, influence: Influence | None) -> Float[Tensor, " n"]:
    """Return the scores of exactly these records, in their order.

    Raises:
        InvalidInfluence: `influence` is None, or belongs to other records.
    """
    if influence is None:
        raise InvalidInfluence("This rule needs an influence: pass attribute(policy, records, target=Return()).")
    digest = influence.provenance.records
    if not torch.equal(influence.record_ids, records.ids.cpu()) or (
        digest is not None and digest != records.fingerprint
    ):
        raise InvalidInfluence(
            f"The influence holds {len(influence)} scores of other records than the {len(records)} to select from. "
            "Score these records: attribute(policy, records, ...), and pass the whole influence, not top() or bottom()."
        )
    return influence.scores


def _drop_lowest(
    rule: IIF | BelowMean, records: RecordBatch, scores: Tensor, count: int, progress: Progress, which: str
) -> Selection:
    """Drop the rule's share of the `count` lowest scores."""
    share = share_at(rule.drop, rule.warmup, progress)
    lowest = argsort_ascending(scores, records.ids.cpu())[: count_to_drop(share, count)]
    return drop_positions(lowest, len(records), f"influence among the lowest {100 * share:.3g}% of {which}")


def _drop_at_random(
    rule: RandomDrop | NegativeRandom,
    records: RecordBatch,
    candidates: NDArray[np.int64],
    count: int,
    progress: Progress,
    reason: str,
) -> Selection:
    """Drop the rule's share of `count` records at random among the candidates."""
    generator = np.random.default_rng([rule.seed, int(records.ids.min())])
    size = count_to_drop(share_at(rule.drop, rule.warmup, progress), count)
    return drop_positions(generator.choice(candidates, size=size, replace=False), len(records), reason)
