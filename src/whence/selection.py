"""Which records of a round train, and how much (LDA §5.1)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from whence.errors import InvalidInfluence, WhenceError
from whence.influence import Influence, ascending
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

    @property
    def uniform(self) -> bool:
        """Whether all kept records weigh the same."""
        kept = self.weights[self.keep]
        return len(kept) == 0 or bool((kept == kept[0]).all())

    @classmethod
    def dropping(cls, keep: Bool[Tensor, " n"], reason: str) -> "Selection":
        """Return a selection that drops the records with `keep` False, all for one reason, and weighs the rest 1."""
        return cls(keep, keep.float(), [None if kept else reason for kept in keep.tolist()])


@runtime_checkable
class SelectionRule(Protocol):
    """Decides which records train. Nothing is scored for a rule that does not need it."""

    @property
    def needs_influence(self) -> bool:
        """Whether `select` reads the influence; if not, it is None."""
        ...

    def select(self, records: RecordBatch, influence: Influence | None) -> Selection:
        """Return the selection for one round."""
        ...


@dataclass(frozen=True)
class KeepAll:
    """Keep every record: training as it is without a rule."""

    needs_influence = False

    def select(self, records: RecordBatch, influence: Influence | None = None) -> Selection:
        """Keep all."""
        return Selection.dropping(torch.ones(len(records), dtype=torch.bool), "")


@dataclass(frozen=True)
class IIF:
    """Iterative influence-based filtering: drop the `floor(drop * m)` lowest of the m negative scores (LDA Alg. 1).

    Of equal scores the record with the lower id is dropped first.

    Attributes:
        drop: share of the negatively scored records to drop, in (0, 1]. LDA's best: 0.5 for FrozenLake, Acrobot and
            Highway, 0.125 for MiniGrid and LunarLander, 0.0625 for BipedalWalker.
    """

    drop: float = 0.5
    needs_influence = True

    def __post_init__(self) -> None:
        _check_share(self.drop)

    def select(self, records: RecordBatch, influence: Influence | None) -> Selection:
        """Drop the lowest."""
        scores = scores_for(records, influence)
        keep = torch.ones(len(records), dtype=torch.bool)
        keep[ascending(scores, records.ids.cpu())[: _count_to_drop(self.drop, scores)]] = False
        return Selection.dropping(keep, f"influence among the lowest {self.drop:g} of the negative")


@dataclass(frozen=True)
class RandomDrop:
    """The control for IIF: drop as many records as IIF would, drawn at random from all (LDA §5.2).

    Attributes:
        drop: IIF's share, which sets how many to drop.
        seed: of the rule's own generator; no global generator is used. Rounds differ by their record ids.
    """

    drop: float = 0.5
    seed: int = 0
    needs_influence = True

    def __post_init__(self) -> None:
        _check_share(self.drop)

    def select(self, records: RecordBatch, influence: Influence | None) -> Selection:
        """Drop at random."""
        scores = scores_for(records, influence)
        generator = np.random.default_rng([self.seed, int(records.ids.min())])
        chosen = generator.choice(len(records), size=_count_to_drop(self.drop, scores), replace=False)
        keep = torch.ones(len(records), dtype=torch.bool)
        keep[torch.from_numpy(chosen)] = False
        return Selection.dropping(keep, "drawn at random")


def scores_for(records: RecordBatch, influence: Influence | None) -> Float[Tensor, " n"]:
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


def _count_to_drop(drop: float, scores: Tensor) -> int:
    # 0.29 * 100 is 28.999...96 in floating point: the product is rounded before it is cut off.
    return math.floor(round(drop * int((scores < 0).sum()), 9))


def _check_share(drop: float) -> None:
    if not 0 < drop <= 1:
        raise WhenceError(f"drop is {drop}; it is the share of negatively scored records to drop, in (0, 1].")
