"""The records of one round as columns, each record with an id that stays with it."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from whence.errors import InvalidRecords

Tree: TypeAlias = Any  # a tensor, or a (nested) dict, tuple or list of trees, all with the records' axis first
Array: TypeAlias = Any  # anything torch.as_tensor takes

UNKNOWN = -1  # in the integer columns: not known; null in tables


def map_tree(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Apply `function` to every tensor of a tree of dicts, tuples and lists."""
    if isinstance(tree, Mapping):
        return {key: map_tree(function, branch) for key, branch in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(map_tree(function, branch) for branch in tree)
    return function(tree)


def named_leaves(tree: Tree, name: str = "") -> list[tuple[str, Tensor]]:
    """List a tree's tensors with their dotted names."""
    if isinstance(tree, Mapping):
        branches = list(tree.items())
    elif isinstance(tree, tuple | list):
        branches = list(enumerate(tree))
    else:
        return [(name, tree)]
    return [leaf for key, branch in branches for leaf in named_leaves(branch, f"{name}.{key}" if name else str(key))]


def take(tree: Tree, index: Tensor | slice) -> Tree:
    """Take the records at `index` from every tensor of a tree."""
    return map_tree(lambda tensor: tensor[index], tree)


def check_one_per_record(name: str, column: Float[Tensor, "n ..."]) -> Float[Tensor, " n"]:
    """Return a column of a policy's outputs where it holds one number per record, (n,).

    Raises:
        InvalidRecords: it holds several.
    """
    if column.ndim != 1:
        raise InvalidRecords(
            f"The policy view returned `{name}` of shape {tuple(column.shape)} for {len(column)} records; one number "
            f"per record is needed here, shape ({len(column)},). Sum log-probs over a record's own axes, or pass an "
            "objective and a target that read several, such as TokenPPO and SequenceReturn of whence.llm."
        )
    return column


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as an array; bfloat16, which numpy lacks, as float32."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()


@dataclass(frozen=True, eq=False, repr=False)
class RecordBatch:
    """The n records of one round (LDA §2.1), as columns on the records' axis.

    Every column is copied on the way in, so a batch never aliases a live buffer. Arrays and tensors are taken;
    floating columns keep their dtype.

    Attributes:
        observations: (n, ...) tensor, or a nested dict of such.
        actions: (n, ...).
        log_probs: (n,) log-probability of the action under the policy that took it.
        advantages: (n,) advantage estimates as they came, not normalised.
        values: (n,) value estimates, or None.
        returns: (n,) targets of the value function, or None.
        rewards: (n,), or None. As SB3 stores them, they hold the bootstrap of a time limit.
        episode_starts: (n,) whether the record is the first of its episode, or None.
        record_ids: (n,) distinct integers >= 0; 0 ... n-1 where not given.
        env_index: (n,) index of the environment, -1 where unknown, or None.
        episode_ids: (n,) integer id of the episode, -1 where unknown, or None.
        steps: (n,) position in the episode, counted from 0, -1 where unknown, or None.
        action_masks: (n, ...) bool, True where an action was allowed, or None.
        gamma: discount factor, or None.
        gae_lambda: lambda of the advantage estimator, or None.

    Raises:
        InvalidRecords: lengths that differ, no record at all, a repeated or negative record id, observations of one
            dotted name, or a value that is not finite (the message names the record).
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
    action_masks: Bool[Tensor, "n ..."] | None = None
    gamma: float | None = None
    gae_lambda: float | None = None

    def __post_init__(self) -> None:
        for name in _COLUMNS:
            if (column := getattr(self, name)) is not None:
                object.__setattr__(self, name, _copied(name, column))
        _check_names(self.observations)
        _check_lengths(self)
        if self.record_ids is None:
            object.__setattr__(self, "record_ids", torch.arange(len(self.log_probs)))
        _check_ids(self.ids)
        _check_finite(self)

    def __len__(self) -> int:
        return len(self.log_probs)

    def __repr__(self) -> str:
        present = [name for name in _COLUMNS if getattr(self, name) is not None]
        return f"RecordBatch of {len(self)} records: {', '.join(present)}"

    @property
    def ids(self) -> Int[Tensor, " n"]:
        """The record ids, (n,) int64."""
        assert self.record_ids is not None
        return self.record_ids

    def take(self, index: Tensor | slice) -> Self:
        """Return the records at `index` (positions, mask or slice), each with its id.

        Raises:
            InvalidRecords: there is none.
        """
        taken = self.with_columns(take(self.columns, index))
        if len(taken) == 0:
            raise InvalidRecords(
                f"take() was to leave none of the {len(self)} records; a RecordBatch holds at least one. Pass "
                "positions, a mask or a slice that takes some."
            )
        return taken

    def to(self, device: torch.device | str) -> Self:
        """Return the records on a device; these same where they are there already."""
        wanted = torch.device(device)
        if all(tensor.device == wanted for _, tensor in named_leaves(self.columns)):
            return self
        return self.with_columns(map_tree(lambda t: t.to(device), self.columns))

    def with_advantages(self, advantages: Float[Tensor, " n"]) -> Self:
        """Return the same records with other advantages, (n,)."""
        return self.with_columns({"advantages": advantages})

    @property
    def columns(self) -> dict[str, Tree]:
        """The columns that are there, by name."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return {name: column for name, column in columns.items() if column is not None}

    def with_columns(self, columns: Mapping[str, Tree]) -> Self:
        """Return the records with these columns in the place of theirs, neither copied nor checked."""
        # Past __post_init__: columns were copied and checked once, and `loop` takes records one by one.
        batch = object.__new__(type(self))
        batch.__dict__.update(self.__dict__, **columns)
        batch.__dict__.pop("fingerprint", None)
        return batch

    @cached_property
    def fingerprint(self) -> str:
        """Digest of ids, log-probs and advantages: tells two rounds apart even where their ids agree."""
        digest = hashlib.sha256()
        for column in (self.ids, self.log_probs, self.advantages):
            digest.update(column.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def to_polars(self, *, observations: bool = False) -> pl.DataFrame:
        """Return one row a record: ids, episode, action, log-prob, value, advantage, return, reward.

        Columns of more than one number a record become fixed-size arrays; -1 in the integer columns becomes null;
        bfloat16 becomes float32.

        Args:
            observations: add the observations, where a record's take no more than 4 KiB in all.
        """
        series = [pl.Series("record_id", self.ids.cpu().numpy())]
        for name, singular in _IN_TABLES.items():
            if (column := getattr(self, name)) is not None:
                one = _series(singular, column)
                series.append(one.set(one == UNKNOWN, None) if name in _INTEGER else one)
        if observations:
            parts = named_leaves(self.observations, "observation")
            if sum(tensor[0].nbytes for _, tensor in parts) <= 4096:
                series += [_series(name, tensor) for name, tensor in parts]
        return pl.DataFrame(series)


def _series(name: str, column: Tensor) -> pl.Series:
    array = to_numpy(column).reshape(len(column), -1)
    return pl.Series(name, array[:, 0] if array.shape[1] == 1 else array)


_COLUMNS = tuple(field.name for field in fields(RecordBatch) if field.name not in ("gamma", "gae_lambda"))
_INTEGER = ("record_ids", "env_index", "episode_ids", "steps")
_BOOLEAN = ("episode_starts", "action_masks")
_FLOATING = ("log_probs", "advantages", "values", "returns", "rewards")
_IN_TABLES = {
    "env_index": "env_index",
    "episode_ids": "episode_id",
    "steps": "step",
    "actions": "action",
    "log_probs": "log_prob",
    "values": "value",
    "advantages": "advantage",
    "returns": "return",
    "rewards": "reward",
    "episode_starts": "episode_start",
    "action_masks": "action_mask",
}


def _copied(name: str, column: Array) -> Tree:
    if name == "observations":
        return _copied_tree(column)
    tensor = _as_tensor(column)
    if name in _INTEGER:
        return tensor.to(torch.int64, copy=True)
    if name in _BOOLEAN:
        return tensor.to(torch.bool, copy=True)
    if name in _FLOATING and not tensor.is_floating_point():
        return tensor.to(torch.get_default_dtype())
    return tensor.clone()


def _copied_tree(tree: Array) -> Tree:
    if isinstance(tree, Mapping):
        return {key: _copied_tree(branch) for key, branch in tree.items()}
    return _as_tensor(tree).clone()


def _as_tensor(array: Array) -> Tensor:
    # torch warns of arrays that cannot be written to, such as those of a table, although it would only read them.
    readable = array.copy() if isinstance(array, np.ndarray) and not array.flags.writeable else array
    return torch.as_tensor(readable).detach()


def _check_names(observations: Tree) -> None:
    # In tables and messages the keys of nested dicts are joined, which a key that holds a dot can make ambiguous.
    counts = Counter(name for name, _ in named_leaves(observations, "observations"))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise InvalidRecords(
            f"Two observations come out as `{twice[0]}`: the keys of nested dicts are joined by dots. Rename one, or "
            "use keys without dots."
        )


def _check_lengths(batch: RecordBatch) -> None:
    n = len(batch.log_probs) if batch.log_probs.ndim else 0
    if n == 0:
        raise InvalidRecords(
            f"A RecordBatch needs at least one record; log_probs came with shape {tuple(batch.log_probs.shape)}. "
            "Pass columns whose first axis is the records'."
        )
    for name in _COLUMNS:
        if (column := getattr(batch, name)) is None:
            continue
        for leaf, tensor in named_leaves(column, name):
            if tensor.ndim == 0 or len(tensor) != n:
                raise InvalidRecords(
                    f"`{leaf}` has shape {tuple(tensor.shape)}, but log_probs holds {n} records: every column "
                    f"needs {n} entries on its first axis. Flatten (steps, environments) columns before."
                )
            if name in (*_FLOATING, *_INTEGER, "episode_starts") and tensor.ndim != 1:
                raise InvalidRecords(
                    f"`{leaf}` has shape {tuple(tensor.shape)}; one number per record is needed, shape ({n},). "
                    f"Reshape it, or sum it over the axes of a record."
                )


def _check_ids(ids: Tensor) -> None:
    if (ids < 0).any():
        raise InvalidRecords(f"record_ids holds {int(ids.min())}; ids are integers >= 0.")
    values, counts = ids.unique(return_counts=True)
    if (counts > 1).any():
        raise InvalidRecords(
            f"record_ids holds {int(values[counts > 1][0])} {int(counts.max())} times; each record needs an id "
            "of its own. Leave record_ids out to number the records."
        )


def _check_finite(batch: RecordBatch) -> None:
    for name in (*_FLOATING, "observations", "actions"):
        if (column := getattr(batch, name)) is None:
            continue
        for leaf, tensor in named_leaves(column, name):
            if not tensor.is_floating_point() or torch.isfinite(tensor).all():
                continue
            bad = ~torch.isfinite(tensor).reshape(len(batch), -1).all(dim=1)
            first = int(bad.nonzero()[0])
            value = tensor[first].reshape(-1)
            raise InvalidRecords(
                f"`{leaf}` is {float(value[~torch.isfinite(value)][0])} at record {int(batch.ids[first])} "
                f"({int(bad.sum())} of {len(batch)} records are not finite). Scores of such records mean "
                "nothing: find where the value arises (reward, observation or a diverged policy), or leave "
                "the records out with `records.take(mask)` if they are yours to leave out."
            )
