"""Selection rules: which records of a round train, and with which weights (LDA §5.1)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from whence.core import InvalidInfluence, RecordBatch, WhenceError, to_numpy
from whence.influence import Influence, argsort_ascending


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
        return _drop_positions([], len(records), "")


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
        return _drop_positions(dropped, len(records), "influence not above 0")


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


def _drop_lowest(
    rule: IIF | BelowMean, records: RecordBatch, scores: Tensor, count: int, progress: Progress, which: str
) -> Selection:
    """Drop the rule's share of the `count` lowest scores."""
    share = share_at(rule.drop, rule.warmup, progress)
    lowest = argsort_ascending(scores, records.ids.cpu())[: count_to_drop(share, count)]
    return _drop_positions(lowest, len(records), f"influence among the lowest {100 * share:.3g}% of {which}")


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
    return _drop_positions(generator.choice(candidates, size=size, replace=False), len(records), reason)


def _drop_positions(positions: Tensor | NDArray[np.int64] | Sequence[int], total: int, reason: str) -> Selection:
    keep = torch.ones(total, dtype=torch.bool)
    keep[torch.as_tensor(positions, dtype=torch.int64)] = False
    return Selection.dropping(keep, reason)


def check_share(drop: Share, warmup: int) -> None:
    """Refuse a share to drop outside (0, 1], or a negative warm-up."""
    if not callable(drop) and not (isinstance(drop, Real) and 0 < drop <= 1):
        raise WhenceError(
            f"drop is {drop!r}; it is the share of records to drop, in (0, 1], or a function of the remaining "
            "progress. Pass 0.125 to drop an eighth of them; KeepAll(), the arm ppo, drops none."
        )
    if not isinstance(warmup, Integral) or warmup < 0:
        raise WhenceError(f"warmup is {warmup!r}; it is a number of rounds, 0 or more.")


def add_selection(table: pl.DataFrame, selection: Selection, influence: Influence | None) -> pl.DataFrame:
    """Return a table of records with the columns `keep`, `weight` and `reason`; and `score` and `error`, if known.

    Args:
        table: a row for each record, in the order of `selection`.
        selection: which records trained, with which weights.
        influence: the records' scores, or None.
    """
    scores = [] if influence is None else [pl.Series("score", to_numpy(influence.scores))]
    if influence is not None and influence.errors is not None:
        scores.append(pl.Series("error", to_numpy(influence.errors)))
    return table.with_columns(
        *scores,
        pl.Series("keep", selection.keep.numpy()),
        pl.Series("weight", selection.weights.numpy()),
        pl.Series("reason", list(selection.reasons), dtype=pl.String),
    )


def read_weights(table: pl.DataFrame) -> NDArray[np.float64]:
    """Return how much each record of a round trained, (n,): 0 for dropped ones, 1 on average for the others.

    Training reads weights as shares, so that their scale says nothing.
    """
    weights = table["weight"] if "weight" in table.columns else table["keep"] if "keep" in table.columns else None
    if weights is None:
        return np.ones(len(table))
    shares = weights.cast(pl.Float64).fill_null(1.0).to_numpy()
    total = shares.sum()
    return shares * np.count_nonzero(shares) / total if total > 0 else shares


def summarise_selection(selection: Selection, influence: Influence | None) -> dict[str, Any]:
    """Return a round's row of the metrics: numbers of records, and quantiles of the scores if there is an influence."""
    trained, total = int(selection.keep.sum()), len(selection.keep)
    row: dict[str, Any] = {"records": total, "kept": trained, "dropped_share": 1 - trained / total}
    if influence is not None:
        scores = influence.scores.double().numpy()
        quantiles = {f"q{level:02d}": float(np.quantile(scores, level / 100)) for level in (0, 5, 25, 50, 75, 95, 100)}
        row |= {"negative_share": float((scores < 0).mean()), "mean": float(scores.mean()), **quantiles}
        if influence.errors is not None:
            row["significant_share"] = float(influence.is_significant().double().mean())
    return row
