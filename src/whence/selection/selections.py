"""Selections, what rules that make them share, and the columns of tables that hold them (LDA §5.1)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Protocol, TypeAlias, get_args, runtime_checkable

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from whence.core import RecordBatch, Unit, WhenceError, check_unit, to_numpy
from whence.scores import Influence


@dataclass(frozen=True, eq=False)
class Selection:
    """A rule's decision on the n records of a round.

    Attributes:
        keep: (n,) bool, True where the record trains.
        weights: (n,) float >= 0, what the record's whole loss is multiplied by, relative to the others'; 0 for dropped
            records.
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
class RoundResult:
    """What happened in one round; `Run.write_round` returns it, and `InfluenceCallback.round` holds the last one's.

    Attributes:
        number: the round's number, from 1.
        records: the rollout.
        influence: the rollout's scores; None if nothing was scored.
        selection: the records that train.
    """

    number: int
    records: RecordBatch
    influence: Influence | None
    selection: Selection


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


def check_rule(rule: object, units: Sequence[str] = get_args(Unit), fix: str = "") -> None:
    """Refuse what is no selection rule, such as the class of one, or a rule by another unit than a trainer's `units`.

    A rule's `unit` says what it keeps or drops as one, `needs_groups` that it compares the responses to one prompt.
    `fix` says how the trainer gets the missing unit.
    """
    if isinstance(rule, type) or not isinstance(rule, SelectionRule):
        raise WhenceError(
            f"rule is {rule!r}; pass an instance, such as IIF(drop=0.125), with `needs_influence` and `select`."
        )
    needed = "group" if getattr(rule, "needs_groups", False) else getattr(rule, "unit", "record")
    if needed is not None and needed not in units:
        raise WhenceError(f"{rule!r} selects by {needed}; the units here are {', '.join(units)}.{fix}")


START = Progress()


@dataclass(frozen=True)
class KeepAll:
    """Keep every record, as training without a rule does."""

    needs_influence = False

    def select(self, records: RecordBatch, influence: Influence | None = None, progress: Progress = START) -> Selection:
        """Keep all."""
        return Selection.dropping(torch.ones(len(records), dtype=torch.bool), "")


class ScoreAll(KeepAll):
    """Score every record and keep it: training is recorded, and nothing of it changes."""

    needs_influence = True


_LATER = ("unit", "like")
"""Settings that a rule's text has only where they are not the default. Older runs lack them, and are compared by it."""


class CheckedRule:
    """A rule with settings, which are checked when it is made."""

    drop: Share = 1.0
    warmup: int = 0
    unit: Unit = "record"
    seed: int = 0

    def __post_init__(self) -> None:
        if not callable(self.drop) and not (isinstance(self.drop, Real) and 0 < self.drop <= 1):
            raise WhenceError(
                f"drop is {self.drop!r}; it is the share of records to drop, in (0, 1], or a function of the remaining "
                "progress. Pass 0.125 to drop an eighth of them; KeepAll(), the arm ppo, drops none."
            )
        if not isinstance(self.warmup, Integral) or self.warmup < 0:
            raise WhenceError(f"warmup is {self.warmup!r}; it is a number of rounds, 0 or more.")
        check_unit(self.unit)
        if not isinstance(self.seed, Integral) or self.seed < 0:
            raise WhenceError(f"seed is {self.seed!r}; a whole number is needed, 0 or more.")

    def __repr__(self) -> str:
        rule: Any = self
        settings = [(each.name, getattr(rule, each.name), each.default) for each in fields(rule)]
        shown = [f"{name}={value!r}" for name, value, default in settings if name not in _LATER or value != default]
        return f"{type(self).__name__}({', '.join(shown)})"

    def share(self, progress: Progress) -> float:
        """Return the share to drop in a round: 0 in the warm-up, then `drop` or its value as a schedule.

        Raises:
            WhenceError: the schedule's value is not in [0, 1].
        """
        if progress.round <= self.warmup:
            return 0.0
        if not callable(self.drop):
            return self.drop
        share = float(self.drop(progress.remaining))
        if not 0 <= share <= 1:
            raise WhenceError(
                f"The drop schedule gives {share} at {progress.remaining:g} remaining; a share is in [0, 1]."
            )
        return share

    def count(self, candidates: int, progress: Progress) -> int:
        """Return how many of the candidates to drop in a round."""
        # 0.29 * 100 is 28.999...96 in floating point, so the product is rounded first.
        return math.floor(round(self.share(progress) * candidates, 9))


def drop_units(units: Int[Tensor, " k"], labels: Int[Tensor, " n"], reason: str) -> Selection:
    """Return the selection that drops the records with these labels."""
    return Selection.dropping(~torch.isin(labels, units), reason)


def check_selection(selection: object, records: RecordBatch, source: str, *, strict: bool = False) -> None:
    """Refuse what is no selection with one entry per record, or, if strict, one that keeps fewer than two.

    `source` names the call that returned it.
    """
    if not isinstance(selection, Selection) or len(selection.keep) != len(records):
        received = f"{len(selection.keep)} records" if isinstance(selection, Selection) else repr(selection)
        raise WhenceError(
            f"{source} returned a selection of {received} for a rollout of {len(records)}; it must return a "
            "whence.Selection with one entry per record."
        )
    if strict and not can_train(selection):
        raise WhenceError(
            f"{source} keeps {int(selection.keep.sum())} of {len(records)} records, and training needs two. Drop less, "
            "or pass strict=False to skip such rounds."
        )


def can_train(selection: Selection) -> bool:
    """Return whether a selection keeps two records, which advantages are normalised over; or all, if there is one."""
    return int(selection.keep.sum()) >= min(2, len(selection.keep))


def add_selection(table: pl.DataFrame, selection: Selection, influence: Influence | None) -> pl.DataFrame:
    """Return a table, in the order of a selection, with `keep`, `weight` and `reason`, and with scores and errors."""
    scores = []
    if influence is not None:
        scores = [pl.Series("score", to_numpy(influence.scores)), *influence.list_error_columns()]
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
        levels = (0, 5, 25, 50, 75, 95, 100)
        quantiles = np.quantile(scores, [level / 100 for level in levels]).tolist()
        row |= {"negative_share": float((scores < 0).mean()), "mean": float(scores.mean())}
        row |= {f"q{level:02d}": quantile for level, quantile in zip(levels, quantiles, strict=True)}
        if influence.errors is not None:
            row["significant_share"] = float(influence.is_significant().double().mean())
    return row
