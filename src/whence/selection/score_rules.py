"""Selection rules that read scores: the lowest are dropped, or those not above 0, or as many at random."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from whence.core import InvalidInfluence, RecordBatch, Unit, average_by_unit, label_units, name_owner, rank_units
from whence.scores import Influence
from whence.selection.selections import (
    DEFAULT_SHARE,
    START,
    CheckedRule,
    Progress,
    Selection,
    SelectionRule,
    Share,
    check_rule,
    drop_units,
)


class ScoreRule(CheckedRule):
    """A rule that reads scores."""

    needs_influence = True

    def _score_units(
        self, records: RecordBatch, influence: Influence | None
    ) -> tuple[Int[Tensor, " n"], Float[Tensor, " m"]]:
        """Return the number of each record's unit, and each unit's score."""
        scores, labels = read_scores(records, influence), label_units(records, self.unit)
        return labels, average_by_unit(scores, labels)


@dataclass(frozen=True, repr=False)
class IIF(ScoreRule):
    """Iterative influence-based filtering: drop the `floor(drop * m)` lowest of the m negative scores (LDA Alg. 1).

    Among equal scores the record with the lower id is dropped first.

    Attributes:
        drop: share of the negatively scored records to drop, in (0, 1]; or a function of the remaining progress, like
            SB3's schedules. With SB3's defaults, 0.125 trained better than 0.5 (results/practice). LDA's best, with its
            own settings: 0.5 for FrozenLake, Acrobot and Highway, 0.125 for MiniGrid and LunarLander, 0.0625 for
            BipedalWalker.
        warmup: number of rounds at the start in which records are scored and none is dropped.
        unit: what is kept or dropped as one: "record", "episode", "row" or "group", see `Unit`. A unit's score is the
            mean of its records' scores.
    """

    drop: Share = DEFAULT_SHARE
    warmup: int = 0
    unit: Unit = "record"
    _bound = "0"

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop the lowest."""
        labels, scores = self._score_units(records, influence)
        below = int((scores < self._measure_bound(scores)).sum())
        lowest = rank_units(scores, records, labels)[: self.count(below, progress)]
        share = f"{100 * self.share(progress):.3g}%"
        reason = f"influence{name_owner(self.unit)} among the lowest {share} of those below {self._bound}"
        return drop_units(lowest, labels, reason)

    def _measure_bound(self, scores: Float[Tensor, " m"]) -> float:
        return 0.0


@dataclass(frozen=True, repr=False)
class BelowMean(IIF):
    """IIF with another threshold: drop the `floor(drop * m)` lowest of the m scores below the mean score.

    PPO's loss is a mean over records, so leaving a record out of one SGD step raises the target if the record scores
    below the mean, not below 0. Attributes are those of `IIF`.
    """

    _bound = "the mean"

    def _measure_bound(self, scores: Float[Tensor, " m"]) -> float:
        return float(scores.mean())


@dataclass(frozen=True, repr=False)
class NonPositive(ScoreRule):
    """Drop every record that does not score above 0 (LDA §5.3, for RLHF).

    Attributes:
        warmup: as in `IIF`.
        unit: as in `IIF`.
    """

    warmup: int = 0
    unit: Unit = "record"

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop the records whose score is not positive."""
        labels, scores = self._score_units(records, influence)
        nonpositive = (scores <= 0).nonzero().flatten()
        dropped = nonpositive[:0] if progress.round <= self.warmup else nonpositive
        return drop_units(dropped, labels, f"influence{name_owner(self.unit)} not above 0")


@dataclass(frozen=True, repr=False)
class IPPO(ScoreRule):
    """Drop every record that does not score above 0, and weight the others by their scores (I-PPO).

    A kept record's weight is its score divided by the mean of the kept scores, so that weights are 1 on average.

    Attributes:
        weighted: False gives all kept records the same weight.
        warmup: as in `IIF`.
        unit: as in `IIF`; all records of a unit have its score.
    """

    weighted: bool = True
    warmup: int = 0
    unit: Unit = "record"

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop the records whose score is not positive, and weight the others."""
        positive = NonPositive(self.warmup, self.unit).select(records, influence, progress)
        if not self.weighted or progress.round <= self.warmup or not positive.keep.any():
            return positive
        labels, scores_of_units = self._score_units(records, influence)
        scores = scores_of_units[labels] * positive.keep
        weights = scores / scores[positive.keep].mean()
        return Selection(positive.keep, weights.float(), positive.reasons)


@dataclass(frozen=True, repr=False)
class RandomDrop(ScoreRule):
    """The control of a rule: drop as many units as it would, chosen at random from all (LDA §5.2).

    Attributes:
        drop: IIF's share, which sets how many to drop.
        seed: seed of the rule's generator; no global generator is used. Rounds differ through their record ids.
        warmup: as in `IIF`.
        zeros: whether to count scores of 0 as negative, as `NonPositive` does.
        unit: as in `IIF`: as many units are dropped as IIF would drop.
        like: the rule whose number of dropped units counts, instead of IIF's, in each group where it chooses within
            groups; of the other settings, `seed` alone is then read. Where `like` needs no influence, its control
            needs none.
    """

    drop: Share = DEFAULT_SHARE
    seed: int = 0
    warmup: int = 0
    zeros: bool = False
    unit: Unit = "record"
    like: SelectionRule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.like is not None:
            check_rule(self.like)
            object.__setattr__(self, "unit", getattr(self.like, "unit", "record"))

    @property
    def needs_influence(self) -> bool:  # type: ignore[override]
        """Whether the size depends on scores."""
        return self.like is None or self.like.needs_influence

    @property
    def needs_groups(self) -> bool:
        """Whether the size depends on the responses to one prompt."""
        return getattr(self.like, "needs_groups", False)

    def select(self, records: RecordBatch, influence: Influence | None = None, progress: Progress = START) -> Selection:
        """Drop at random."""
        if self.like is None:
            labels, scores = self._score_units(records, influence)
            count = self.count(int(((scores <= 0) if self.zeros else (scores < 0)).sum()), progress)
            pools = [(np.arange(int(labels.max()) + 1), count)]
        else:
            labels = label_units(records, self.unit)
            dropped = ~self.like.select(records, influence, progress).keep
            # A rule that chooses within groups, as MaxVariance does, has a control that does so, too.
            is_within = self.needs_groups and self.unit == "record"
            groups = label_units(records, "group") if is_within else torch.zeros(len(records))
            pools = [
                (labels[groups == group].unique().numpy(), len(labels[dropped & (groups == group)].unique()))
                for group in groups.unique()
            ]
        return drop_at_random(self.seed, records, labels, pools, "drawn at random")


def drop_at_random(
    seed: int,
    records: RecordBatch,
    labels: Int[Tensor, " n"],
    pools: Iterable[tuple[NDArray[np.int64], int]],
    reason: str,
) -> Selection:
    """Drop units at random, of each pool as many as stand beside it."""
    generator = np.random.default_rng([seed, int(records.ids.min())])
    chosen = [generator.choice(candidates, size=count, replace=False) for candidates, count in pools]
    return drop_units(torch.as_tensor(np.concatenate(chosen)), labels, reason)


def read_scores(records: RecordBatch, influence: Influence | None) -> Float[Tensor, " n"]:
    """Return the scores of exactly these records, in their order; others, or none, are an `InvalidInfluence`."""
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
