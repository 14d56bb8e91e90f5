"""Units: the records that a rule keeps or drops as one, or that a target is without."""

from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.core.errors import InvalidRecords, WhenceError, suggest
from whence.core.records import RecordBatch

Unit: TypeAlias = Literal["record", "episode", "row", "group"]
"""What a rule keeps or drops as one.

"record": each record on its own. "row": the same, of a language model, a record of which is a response. "episode": a
stretch of one environment between ends of episodes, or of the rollout. "group": all responses to one prompt.
"""


AGENT_UNITS = ("record", "episode")
LANGUAGE_UNITS = ("record", "row", "group")
"""The units of agents and of language models."""


def resolve_unit(records: RecordBatch, unit: Unit | None) -> Unit:
    """Return the unit; None becomes the response of a language model, or the episode of an agent."""
    is_language = isinstance(records.observations, dict) and "response_mask" in records.observations
    return unit or ("row" if is_language else "episode")


def label_units(records: RecordBatch, unit: Unit | None = "record") -> Int[Tensor, " n"]:
    """Return the number of each record's unit, from 0, (n,) int64 on the CPU; `unit` is as in `resolve_unit`."""
    unit = resolve_unit(records, unit)
    if unit in ("record", "row"):
        return torch.arange(len(records))
    if unit == "group":
        if (groups := _read_known(records.group_ids)) is None:
            raise InvalidRecords(
                "unit='group' needs the number of each record's prompt, which these records lack: pass group_ids to "
                "RecordBatch or make_rows, one number for all responses to a prompt."
            )
        return _number_pairs(groups, None)
    ids, environments = _read_known(records.episode_ids), _read_known(records.env_index)
    if ids is None and records.episode_starts is not None and environments is not None:
        # An environment's records are in the order of time, but those of several may alternate.
        order = environments.argsort(stable=True)
        ids = torch.empty_like(order)
        ids[order] = records.episode_starts.cpu()[order].cumsum(0)
    if ids is None:
        raise InvalidRecords(
            "These records do not say where episodes begin: pass episode_ids, or episode_starts and env_index, to "
            "RecordBatch. whence.RecordBatch.from_rollout makes them of a rollout's episode_starts."
        )
    return _number_pairs(ids, environments)


def _read_known(numbers: Int[Tensor, " n"] | None) -> Int[Tensor, " n"] | None:
    return None if numbers is None or (numbers < 0).any() else numbers.cpu()


def _number_pairs(ids: Int[Tensor, " n"], environments: Int[Tensor, " n"] | None) -> Int[Tensor, " n"]:
    """Return a number from 0 for each record, the same where both its id and its environment are the same."""
    numbers: Tensor
    distinct, numbers = ids.cpu().unique(return_inverse=True)
    if environments is not None:
        # Pairs as one number each: `unique` along an axis takes a hundred times as long.
        places = environments.cpu().unique(return_inverse=True)[1]
        numbers = (places * len(distinct) + numbers).unique(return_inverse=True)[1]
    return numbers


def check_unit(unit: object) -> None:
    """Refuse a name that is no unit's; None is a rule's own choice."""
    if unit is not None and unit not in get_args(Unit):
        raise WhenceError(f"unit is {unit!r}.{suggest(str(unit), get_args(Unit))}")


def argsort_ascending(keys: Float[Tensor, " n"], record_ids: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Return the positions that sort `keys` in ascending order; among equal keys the lower record id comes first."""
    by_id = record_ids.argsort()
    return by_id[keys[by_id].argsort(stable=True)]


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
