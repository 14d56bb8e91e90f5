"""Selection rules that read columns of the records: rewards, advantages, or ids that somebody flagged."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.core import (
    InvalidRecords,
    RecordBatch,
    Unit,
    WhenceError,
    average_by_unit,
    label_units,
    name_owner,
    rank_units,
)
from whence.runs import RunDirectory
from whence.scores import Influence
from whence.selection.selections import START, CheckedRule, Progress, Selection, Share, drop_units

NEARLY_EQUAL = 4e-7
"""Rewards that differ by less, as a share of the larger one, are equal: float32 adds their parts up no closer."""

_SHOWN = 16  # ids that a rule's text has at most


@dataclass(frozen=True)
class ZeroVariance:
    """Drop the groups in which all responses have the same reward (dynamic sampling of DAPO, arXiv 2503.14476, §3.2).

    GRPO and RLOO give them no advantage, so they train nothing but a divergence. DAPO draws further groups in their
    place; here a step is on fewer. A group of one response is kept: there is nothing to compare it with.
    """

    needs_influence = False
    needs_groups = True
    unit = "group"

    def select(self, records: RecordBatch, influence: Influence | None = None, progress: Progress = START) -> Selection:
        """Drop the groups without differences.

        Raises:
            InvalidRecords: the records have no rewards or groups.
        """
        labels, rewards = _read_groups(records, type(self).__name__)
        zeros = rewards.new_zeros(int(labels.max()) + 1)
        lowest = zeros.scatter_reduce(0, labels, rewards, "amin", include_self=False)
        highest = zeros.scatter_reduce(0, labels, rewards, "amax", include_self=False)
        equal = highest - lowest <= NEARLY_EQUAL * torch.maximum(highest.abs(), lowest.abs())
        dropped = (equal & (labels.bincount() > 1)).nonzero().flatten()
        return drop_units(dropped, labels, "all responses of its group have the same reward")


@dataclass(frozen=True)
class MaxVariance:
    """Keep those `keep` responses of each group whose rewards have the largest variance (PODS, arXiv 2504.13818).

    They are the k highest and the `keep - k` lowest for some k (PODS); among equal variances the largest k wins. Equal
    rewards are in the order of their record ids. Groups of no more responses are kept whole.
    Advantages stay those of the whole group, while PODS computes them again.

    Attributes:
        keep: number of responses of a group that train.
    """

    keep: int
    needs_influence = False
    needs_groups = True

    def __post_init__(self) -> None:
        if type(self.keep) is not int or self.keep < 1:
            raise WhenceError(f"keep is {self.keep!r}; it is the number of responses kept of a group, 1 or more.")

    def select(self, records: RecordBatch, influence: Influence | None = None, progress: Progress = START) -> Selection:
        """Drop the responses that the largest variance leaves out.

        Raises:
            InvalidRecords: the records have no rewards or groups.
        """
        labels, rewards = _read_groups(records, type(self).__name__)
        ranks = rank_units(rewards, records, torch.arange(len(records)))
        keep = torch.zeros(len(records), dtype=torch.bool)
        for label in labels.unique():
            group = ranks[labels[ranks] == label]
            keep[group[self._choose(rewards[group])]] = True
        return Selection.dropping(keep, f"not of the {self.keep} responses of its group with the largest variance")

    def _choose(self, rewards: Float[Tensor, " g"]) -> list[int]:
        """Return the positions of the responses that are kept, of a group in ascending order of its rewards."""
        size, keep = len(rewards), min(self.keep, len(rewards))
        choices = [[*range(keep - high), *range(size - high, size)] for high in range(keep, 0, -1)]
        return max(choices, key=lambda choice: float(rewards[choice].var(correction=0)))


@dataclass(frozen=True, repr=False)
class AdvantageMagnitude(CheckedRule):
    """Drop the `floor(drop * m)` of the m records whose advantage is closest to 0 (CPPO, arXiv 2503.22342).

    CPPO prunes within each group; here a record's rank is among all. A language model's advantage is that of the
    response's last token.

    Attributes:
        drop: share to drop, in (0, 1]; or a schedule, as in `IIF`.
        warmup: number of rounds at the start in which none is dropped.
        unit: as in `IIF`; a unit's magnitude is the mean of its records'.
    """

    drop: Share
    warmup: int = 0
    unit: Unit = "record"
    needs_influence = False

    def select(self, records: RecordBatch, influence: Influence | None = None, progress: Progress = START) -> Selection:
        """Drop the smallest."""
        labels = label_units(records, self.unit)
        sizes = average_by_unit(records.advantages.double().abs(), labels)
        smallest = rank_units(sizes, records, labels)[: self.count(len(sizes), progress)]
        share = f"{100 * self.share(progress):.3g}%"
        return drop_units(smallest, labels, f"advantage{name_owner(self.unit)} among the {share} closest to 0")


@dataclass(frozen=True, repr=False)
class FromMask(CheckedRule):
    """Drop what somebody flagged: records by their ids, from a page, a table, or a check of their own.

    A record id is the number of a step or response since training began, and the same in a training that is repeated
    with the same seed, up to the first round that differs.

    Attributes:
        ids: the ids of the flagged records; or a text file of them, a line or a JSON list each; or a run directory
            whose records were flagged on its page.
        unit: as in `IIF`: a flagged record takes its whole unit with it.
    """

    ids: Iterable[int] | str | Path
    unit: Unit = "record"
    needs_influence = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ids", _read_ids(self.ids))

    def __repr__(self) -> str:
        ids: tuple[int, ...] = self.ids  # type: ignore[assignment]
        unit = "" if self.unit == "record" else f", unit={self.unit!r}"
        if len(ids) <= _SHOWN:
            return f"FromMask(ids={ids!r}{unit})"
        digest = hashlib.sha256(repr(ids).encode()).hexdigest()[:12]
        return f"FromMask(ids=<{len(ids)} ids, digest {digest}>{unit})"

    def select(self, records: RecordBatch, influence: Influence | None = None, progress: Progress = START) -> Selection:
        """Drop the flagged records."""
        labels = label_units(records, self.unit)
        flagged = torch.isin(records.ids.cpu(), torch.tensor(self.ids, dtype=torch.int64))
        return drop_units(labels[flagged], labels, f"flagged, or another record{name_owner(self.unit)}")


def _read_groups(records: RecordBatch, name: str) -> tuple[Int[Tensor, " n"], Float[Tensor, " n"]]:
    """Return the number of each record's group, and the records' rewards, float64."""
    if records.rewards is None:
        raise InvalidRecords(f"{name} needs rewards, which these records lack: pass them to RecordBatch or make_rows.")
    return label_units(records, "group"), records.rewards.double().cpu()


def _read_ids(source: Any) -> tuple[int, ...]:
    """Return the record ids of a file or a sequence, in ascending order; refuse any but whole numbers from 0."""
    values = source.tolist() if hasattr(source, "tolist") else source
    if isinstance(source, str | Path) and Path(source).is_dir():
        values = RunDirectory.open(source).flags()["record_id"]
    elif isinstance(source, str | Path):
        try:
            values = Path(source).read_text(encoding="utf-8").replace(",", " ").strip("[] \n").split()
        except (OSError, UnicodeDecodeError) as failure:
            raise WhenceError(f"The ids of FromMask cannot be read from {source}: {failure}.") from failure
    wrong = [values] if not isinstance(values, Iterable) else [v for v in values if not str(v).isdecimal()]
    if wrong:
        raise WhenceError(
            f"FromMask got {wrong[0]!r} for a record's id; ids are whole numbers, 0 or more, such as a run's "
            'record_id: table.filter(...)["record_id"]. In a file, each is on a line of its own, or they are a JSON '
            "list."
        )
    return tuple(sorted({int(value) for value in values}))
