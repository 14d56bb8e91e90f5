"""The records of one round as columns; each record has an id that never changes."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whence.core.columns import (
    Tree,
    add_observations,
    flatten_rollout,
    make_series,
    map_tree,
    named_leaves,
    read_numbers,
    read_observations,
    take,
)
from whence.core.errors import InvalidRecords, NonFinite

Array: TypeAlias = Any  # anything torch.as_tensor takes

UNKNOWN = -1  # stands for an unknown number in integer columns; null in tables


def check_one_per_record(name: str, column: Float[Tensor, "n ..."]) -> Float[Tensor, " n"]:
    """Return a column of a policy's outputs, called `name`, of shape (n,); several numbers per record are refused."""
    if column.ndim != 1:
        raise InvalidRecords(
            f"The policy view returned `{name}` of shape {tuple(column.shape)} for {len(column)} records; one number "
            f"per record is needed here, shape ({len(column)},). Sum log-probs over a record's own axes, or pass an "
            "objective and a target that read several, such as TokenPPO and SequenceReturn of whence.llm."
        )
    return column


def check_records(records: object) -> None:
    """Refuse anything but a `RecordBatch`, with an `InvalidRecords` that says how to make one."""
    if not isinstance(records, RecordBatch):
        raise InvalidRecords(
            f"records is a {type(records).__name__}; a RecordBatch is needed: whence.RecordBatch(observations=..., "
            "actions=..., log_probs=..., advantages=...). Of a model of Stable-Baselines3, whence.sb3.collect(model) "
            "collects one, and in a callback whence.sb3.snapshot(model) reads its rollout buffer."
        )


@dataclass(frozen=True, eq=False, repr=False)
class RecordBatch:
    """The n records of one round (LDA §2.1), as columns on the records' axis.

    Columns are arrays or tensors. Each is copied, so a batch never aliases a live buffer; floating columns keep their
    dtype.

    Attributes:
        observations: (n, ...) tensor, or a nested dict of such.
        actions: (n, ...).
        log_probs: (n,) log-probability of the action under the policy that took it.
        advantages: (n,) advantage estimates, not normalised.
        values: (n,) value estimates, or None.
        returns: (n,) targets of the value function, or None.
        rewards: (n,), or None. They are those that trained: SB3's include the bootstrap value at a time limit, and
            VecNormalize's scale. A language model's row has the reward of the whole response.
        episode_starts: (n,) whether the record is the first of its episode, or None.
        record_ids: (n,) distinct integers >= 0; None numbers the records from 0.
        env_index: (n,) index of the environment, -1 where unknown, or None.
        episode_ids: (n,) integer id of the episode, -1 where unknown, or None.
        steps: (n,) position in the episode, counted from 0, -1 where unknown, or None.
        group_ids: (n,) integer id of the prompt that the record was drawn for, -1 where unknown, or None.
        action_masks: (n, ...) bool, True where an action was allowed, or None.
        gamma: discount factor, or None.
        gae_lambda: lambda of the advantage estimator, or None.
        history: the steps that a recurrent policy reads before a record's own, which all parts of a batch share; None.

    Raises:
        InvalidRecords: lengths differ, there is no record, or a record id is negative or occurs twice.
        NonFinite: a value is not finite; the message names the record.
    """

    _: KW_ONLY
    observations: Tree
    actions: Tensor
    log_probs: Float[Tensor, " n"]
    advantages: Float[Tensor, " n"]
    values: Float[Tensor, " n"] | None = None
    returns: Float[Tensor, " n"] | None = None
    rewards: Float[Tensor, " n"] | None = None
    episode_starts: Bool[Tensor, " n"] | None = None
    record_ids: Int[Tensor, " n"] | None = None
    env_index: Int[Tensor, " n"] | None = None
    episode_ids: Int[Tensor, " n"] | None = None
    steps: Int[Tensor, " n"] | None = None
    group_ids: Int[Tensor, " n"] | None = None
    action_masks: Bool[Tensor, "n ..."] | None = None
    gamma: float | None = None
    gae_lambda: float | None = None
    history: Any = None

    def __post_init__(self) -> None:
        for name in _COLUMNS:
            if (column := getattr(self, name)) is not None:
                object.__setattr__(self, name, _copy_column(name, column))
        _check_lengths(self)
        if self.record_ids is None:
            object.__setattr__(self, "record_ids", torch.arange(len(self.log_probs)))
        _check_ids(self.ids)
        _check_finite(self, (*_FLOATING, "observations", "actions"))

    @classmethod
    def from_rollout(
        cls,
        *,
        observations: Tree,
        actions: Any,
        log_probs: Any,
        advantages: Any,
        gamma: float | None = None,
        gae_lambda: float | None = None,
        **columns: Any,
    ) -> Self:
        """Return the records of a rollout, step by step: all environments' at step 0, then all at step 1, and so on.

        A selection's mask is in the order of `column.flatten(0, 1)`, so `column.flatten(0, 1)[selection.keep]` are the
        kept rows of any column of the rollout. Columns of one number per record may be (steps, environments) or (steps,
        environments, 1).

        Args:
            observations: (steps, environments, ...) array or tensor, or a nested dict of such.
            actions: (steps, environments, ...).
            log_probs: log-probability of the action under the policy that took it.
            advantages: advantage estimates, not normalised; where a library has normalised them, `returns - values`.
            gamma: discount factor, or None.
            gae_lambda: lambda of the advantage estimator, or None.
            columns: `values`, `returns`, `rewards`, `episode_starts` or `action_masks`, each (steps, environments, ...)
                or None. `episode_starts` gives the records `episode_ids` and `steps`; an episode that began before the
                rollout has an id, and steps of -1.

        Raises:
            InvalidRecords: a column does not begin with the axes of `log_probs`, is unknown, or is refused.
        """
        if unknown := sorted(columns.keys() - _OF_ROLLOUTS):
            raise InvalidRecords(f"from_rollout() got {unknown[0]!r}; further columns are {', '.join(_OF_ROLLOUTS)}.")
        columns |= {"observations": observations, "actions": actions, "log_probs": log_probs, "advantages": advantages}
        flat: dict[str, Any] = flatten_rollout(columns)
        return cls(**flat, gamma=gamma, gae_lambda=gae_lambda)

    def __len__(self) -> int:
        return len(self.log_probs)

    def __repr__(self) -> str:
        present = [name for name in _COLUMNS if getattr(self, name) is not None]
        return f"RecordBatch of {len(self)} records: {', '.join(present)}"

    def _repr_html_(self) -> str:
        columns = {name: column.double() for name, column in named_leaves(self.columns)}
        statistics: dict[str, list[Any]] = {
            "column": list(columns),
            "shape": [" × ".join(map(str, c.shape)) for c in columns.values()],
        }
        statistics |= {name: [float(getattr(c, name)()) for c in columns.values()] for name in ("min", "mean", "max")}
        return f"<p>RecordBatch of {len(self)} records</p>{pl.DataFrame(statistics)._repr_html_()}"

    @property
    def ids(self) -> Int[Tensor, " n"]:
        """The record ids, (n,) int64."""
        assert self.record_ids is not None
        return self.record_ids

    def take(self, index: Tensor | slice) -> Self:
        """Return the records at `index` (positions, mask or slice), each with its id.

        Raises:
            InvalidRecords: `index` selects no record.
        """
        part = self.with_columns(take(self.columns, index))
        if len(part) == 0:
            raise InvalidRecords(
                f"take() was to leave none of the {len(self)} records; a RecordBatch holds at least one. Pass "
                "positions, a mask or a slice that takes some."
            )
        return part

    def to(self, device: torch.device | str) -> Self:
        """Return the records on a device; the same object if all columns are on it already."""
        target = torch.device(device)
        if all(tensor.device == target for _, tensor in named_leaves(self.columns)):
            return self
        return self.with_columns(map_tree(lambda t: t.to(device), self.columns))

    def with_advantages(self, advantages: Float[Tensor, " n"]) -> Self:
        """Return the same records with other advantages; a tensor is not copied, and keeps its graph.

        Args:
            advantages: (n,) one finite number per record.

        Raises:
            InvalidRecords: the number of advantages differs, or a record has several.
            NonFinite: one is not finite.
        """
        column = torch.as_tensor(advantages)
        if not column.is_floating_point():
            column = column.to(torch.get_default_dtype())
        if column.shape != (len(self),):
            raise InvalidRecords(
                f"with_advantages() got advantages of shape {tuple(column.shape)} for {len(self)} records; one number "
                f"per record is needed, shape ({len(self)},), in the order of the records."
            )
        records = self.with_columns({"advantages": column})
        _check_finite(records, ("advantages",))
        return records

    @property
    def columns(self) -> dict[str, Tree]:
        """The columns that are not None, by name."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return {name: column for name, column in columns.items() if column is not None}

    def with_columns(self, columns: Mapping[str, Tree]) -> Self:
        """Return the records with these columns instead of their own; the columns are neither copied nor checked."""
        # This skips __post_init__: columns were copied and checked once, and `loop` takes records one by one.
        batch = object.__new__(type(self))
        batch.__dict__.update(self.__dict__, **columns)
        batch.__dict__.pop("fingerprint", None)
        return batch

    @cached_property
    def fingerprint(self) -> str:
        """Digest of ids, log-probs and advantages; it differs between rounds even if their ids agree."""
        digest = hashlib.sha256()
        for column in (self.ids, self.log_probs, self.advantages):
            digest.update(column.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def to_polars(self, *, observations: bool = False) -> pl.DataFrame:
        """Return a table with a row for each record: ids, episode, action, log-prob, value, advantage, return, reward.

        Columns with several numbers per record become fixed-size arrays; -1 in the integer columns becomes null;
        bfloat16 becomes float32.

        Args:
            observations: add the observations, unless those of one record take more than 4 KiB.
        """
        series = [pl.Series("record_id", self.ids.cpu().numpy())]
        for name, singular in _IN_TABLES.items():
            if (column := getattr(self, name)) is not None:
                values = make_series(singular, column)
                series.append(values.set(values == UNKNOWN, None) if name in _INTEGER else values)
        if observations:
            return add_observations(pl.DataFrame(series), dict(named_leaves(self.observations, "observation")))
        return pl.DataFrame(series)

    @classmethod
    def from_polars(
        cls, table: pl.DataFrame, *, space: Any = None, gamma: float | None = None, gae_lambda: float | None = None
    ) -> Self:
        """Return the records of a table that `to_polars(observations=True)` made, or of a run directory's round.

        Args:
            table: a row for each record; further columns are ignored. `trained_reward`, if it is there, is read for the
                rewards, and not the environment's `reward`.
            space: the observation space, whose shapes the observations get; None: they stay flat.
            gamma: discount factor, or None.
            gae_lambda: lambda of the advantage estimator, or None.

        Raises:
            InvalidRecords: a column is missing, or holds no numbers; the message says which.
        """
        columns: dict[str, Any] = {}
        for name, singular in {"record_ids": "record_id", **_IN_TABLES}.items():
            if singular in table.columns:
                column = table["trained_reward" if f"trained_{singular}" in table.columns else singular]
                columns[name] = read_numbers(singular, column.fill_null(UNKNOWN) if name in _INTEGER else column)
        needed = {"action": "actions", "log_prob": "log_probs", "advantage": "advantages"}
        if missing := [singular for singular, name in needed.items() if name not in columns]:
            raise InvalidRecords(f"The table has no column `{missing[0]}`, which records need; it has {table.columns}.")
        observations = read_observations(table, space, "observation")
        return cls(observations=observations, **columns, gamma=gamma, gae_lambda=gae_lambda)


_COLUMNS = tuple(field.name for field in fields(RecordBatch) if field.name not in ("gamma", "gae_lambda", "history"))
_OF_ROLLOUTS = ("values", "returns", "rewards", "episode_starts", "action_masks")
_INTEGER = ("record_ids", "env_index", "episode_ids", "steps", "group_ids")
_BOOLEAN = ("episode_starts", "action_masks")
_FLOATING = ("log_probs", "advantages", "values", "returns", "rewards")
_IN_TABLES = {
    "env_index": "env_index",
    "episode_ids": "episode_id",
    "steps": "step",
    "group_ids": "group_id",
    "actions": "action",
    "log_probs": "log_prob",
    "values": "value",
    "advantages": "advantage",
    "returns": "return",
    "rewards": "reward",
    "episode_starts": "episode_start",
    "action_masks": "action_mask",
}


def _copy_column(name: str, column: Array) -> Tree:
    if name == "observations":
        return _copy_tree(column)
    tensor = _as_tensor(column)
    if name in _INTEGER:
        return tensor.to(torch.int64, copy=True)
    if name in _BOOLEAN:
        return tensor.to(torch.bool, copy=True)
    if name in _FLOATING and not tensor.is_floating_point():
        return tensor.to(torch.get_default_dtype())
    return tensor.clone()


def _copy_tree(tree: Array) -> Tree:
    if isinstance(tree, Mapping):
        return {key: _copy_tree(branch) for key, branch in tree.items()}
    return _as_tensor(tree).clone()


def _as_tensor(array: Array) -> Tensor:
    # torch warns about read-only arrays, such as those of a table, although it would only read them.
    writeable = array.copy() if isinstance(array, np.ndarray) and not array.flags.writeable else array
    return torch.as_tensor(writeable).detach()


def _check_lengths(batch: RecordBatch) -> None:
    n = len(batch.log_probs) if batch.log_probs.ndim else 0
    if n == 0:
        raise InvalidRecords(
            f"log_probs came with shape {tuple(batch.log_probs.shape)}; at least one record is needed."
        )
    for name, tensor in named_leaves(batch.columns):
        is_single = name in (*_FLOATING, *_INTEGER, "episode_starts")
        if tensor.shape[:1] != (n,) or (is_single and tensor.ndim != 1):
            raise InvalidRecords(
                f"`{name}` has shape {tuple(tensor.shape)}, but log_probs holds {n} records: shape ({n},"
                f"{'' if is_single else ' ...'}) is needed. Flatten (steps, environments) columns before."
            )


def _check_ids(ids: Tensor) -> None:
    values, counts = ids.unique(return_counts=True)
    if (ids < 0).any() or (counts > 1).any():
        raise InvalidRecords(
            f"record_ids holds {int(values[counts.argmax()])} {int(counts.max())} times, and {int(ids.min())} is the "
            "least; ids are integers >= 0, each record's its own. Leave record_ids out to number the records."
        )


def _check_finite(batch: RecordBatch, names: Sequence[str]) -> None:
    columns = batch.columns
    for name, tensor in named_leaves({name: columns[name] for name in names if name in columns}):
        if not tensor.is_floating_point() or torch.isfinite(tensor).all():
            continue
        bad = ~torch.isfinite(tensor).reshape(len(batch), -1).all(dim=1)
        first = int(bad.nonzero()[0])
        value = tensor[first].reshape(-1)
        raise NonFinite(
            f"`{name}` is {float(value[~torch.isfinite(value)][0])} at record {int(batch.ids[first])} "
            f"({int(bad.sum())} of {len(batch)} records are not finite). Scores of such records mean nothing: find "
            "where the value arises (reward, observation or a diverged policy), or leave the records out with "
            "`records.take(mask)`.",
            record_ids=batch.ids[bad].tolist(),
        )
