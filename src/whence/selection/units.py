"""Units of selection: the records that a rule keeps or drops as one."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.core import RecordBatch, Unit
from whence.scores import argsort_ascending

AGENT_UNITS = ("record", "episode")
LANGUAGE_UNITS = ("record", "row", "group")


def average_by_unit(values: Float[Tensor, " n"], labels: Int[Tensor, " n"]) -> Float[Tensor, " m"]:
    """Return the mean over each unit's records, (m,) float64."""
    sums = torch.zeros(int(labels.max()) + 1, dtype=torch.float64).index_add(0, labels, values.double().cpu())
    means: Tensor = sums / labels.bincount()
    return means


def rank_units(scores: Float[Tensor, " m"], records: RecordBatch, labels: Int[Tensor, " n"]) -> Int[Tensor, " m"]:
    """Return the units in ascending order of their scores; among equal ones the lowest record id comes first."""
    first_ids = torch.full((len(scores),), torch.iinfo(torch.int64).max)
    return argsort_ascending(scores, first_ids.scatter_reduce(0, labels, records.ids.cpu(), "amin"))


def name_owner(unit: Unit) -> str:
    """Return " of its episode", or "" where a unit is a record; for the reasons of a selection."""
    return "" if unit in ("record", "row") else f" of its {unit}"
