"""Selection rules that only comparisons train by: LDA's other baselines, and a control of its own."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch

from whence.core import RecordBatch, Unit, WhenceError
from whence.lab.visits import compute_td_errors, monte_carlo_advantages, number_visits, read_column
from whence.scores import Influence
from whence.selection import DEFAULT_SHARE, Progress, Selection
from whence.selection.score_rules import ScoreRule, drop_at_random
from whence.selection.selections import START, CheckedRule, Share, drop_units

Order: TypeAlias = Literal["distance", "product"]


@dataclass(frozen=True, repr=False)
class AdvantageMismatch(CheckedRule):
    """Drop records whose advantage and its Monte-Carlo estimate differ in sign (LDA §C.4; v2 §B.4).

    The estimate is the mean discounted return of a record's state and action over the rollout, minus that of its
    state. It needs states that occur again, so discrete states (compared by the bytes of the observation) and discrete
    actions. Of the m records that disagree, `floor(drop * m)` are dropped.

    Attributes:
        order: "distance" drops the records furthest from the estimate (LDA's Advantage 1), "product" those whose
            product with the estimate is lowest (Advantage 2).
        drop: as in `IIF`, but of the records that disagree.
        warmup: as in `IIF`.
    """

    order: Order = "distance"
    drop: Share = DEFAULT_SHARE
    warmup: int = 0
    needs_influence = False
    needs_discrete = True
    """Whether the rule needs observations that occur again and actions that are single integers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in get_args(Order):
            raise WhenceError(f"order is {self.order!r}; it is one of {', '.join(get_args(Order))}.")

    def select(self, records: RecordBatch, influence: Influence | None = None, progress: Progress = START) -> Selection:
        """Drop the records that disagree most.

        Raises:
            InvalidRecords: a column is missing, or an action is not a single integer.
        """
        advantages = read_column(records, "advantages")
        estimate = monte_carlo_advantages(*number_visits(records, type(self).__name__))
        disagree = np.flatnonzero(np.sign(estimate) != np.sign(advantages))
        agreement = -np.abs(estimate - advantages) if self.order == "distance" else estimate * advantages
        order = np.lexsort((records.ids.cpu().numpy()[disagree], agreement[disagree]))
        dropped = torch.from_numpy(disagree[order[: self.count(len(disagree), progress)]])
        return drop_units(dropped, torch.arange(len(records)), "advantage of another sign than the return shows")


@dataclass(frozen=True)
class TDErrorPriority:
    """Keep every record, weighted by the rank of its TD error's size: `(1 / rank) ** exponent` (LDA §C.5; v2 §B.5).

    `whence.sb3` turns weights into sampling probabilities.

    Attributes:
        exponent: at least 0; 0 gives all records the same weight.
    """

    exponent: float = 0.6
    needs_influence = False

    def __post_init__(self) -> None:
        if not self.exponent >= 0:
            raise WhenceError(f"exponent is {self.exponent}; it is 0 or more (prioritised replay's usual value: 0.6).")

    def select(self, records: RecordBatch, influence: Influence | None = None, progress: Progress = START) -> Selection:
        """Weight records by rank.

        Raises:
            InvalidRecords: a column is missing, or gamma or GAE's lambda.
        """
        sizes = np.abs(compute_td_errors(records))
        ranks = np.empty(len(sizes))
        ranks[np.lexsort((records.ids.cpu().numpy(), -sizes))] = np.arange(1, len(sizes) + 1)
        weights = torch.from_numpy(ranks**-self.exponent)
        return Selection(torch.ones(len(records), dtype=torch.bool), weights, [None] * len(records))


@dataclass(frozen=True, repr=False)
class NegativeRandom(ScoreRule):
    """The control between IIF and chance: drop as many as IIF would, chosen at random from the negatively scored.

    It uses the score's sign and ignores its rank.

    Attributes:
        drop: IIF's share.
        seed: as in `RandomDrop`.
        warmup: as in `IIF`.
        unit: as in `IIF`.
    """

    drop: Share = DEFAULT_SHARE
    seed: int = 0
    warmup: int = 0
    unit: Unit = "record"

    def select(self, records: RecordBatch, influence: Influence | None, progress: Progress = START) -> Selection:
        """Drop at random among the negative."""
        labels, scores = self._score_units(records, influence)
        negative = (scores < 0).nonzero().flatten().numpy()
        count = self.count(len(negative), progress)
        return drop_at_random(self.seed, records, labels, negative, count, "drawn at random from the negative")
