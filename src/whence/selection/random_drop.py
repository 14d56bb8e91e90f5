"""The control of a selection rule: as many records, drawn at random."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from whence.core import RecordBatch, Unit, label_units
from whence.scores import Influence
from whence.selection.score_rules import ScoreRule
from whence.selection.selections import (
    DEFAULT_SHARE,
    START,
    Progress,
    Selection,
    SelectionRule,
    Share,
    check_rule,
    drop_units,
)


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
