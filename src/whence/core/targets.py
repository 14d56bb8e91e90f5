"""Targets: the quantities that records influence (LDA §3.2), each written so that higher is better."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Self, TypeAlias, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor

from whence.core.columns import Tree, named_leaves
from whence.core.errors import WhenceError
from whence.core.objectives import Objective, policy_part
from whence.core.policies import COLUMNS, Outputs, Params, PolicyView
from whence.core.records import RecordBatch, check_one_per_record
from whence.core.units import Unit, check_unit, label_units

Target: TypeAlias = Callable[[PolicyView, Params, RecordBatch], Tensor]
"""`target(view, params, records)` returns a scalar tensor, to be raised, differentiable in `params`.

`records` are the scored records, with advantages that are not normalised.
"""


class BatchTarget(ABC):
    """Base of targets that read only the policy's outputs for the scored records.

    Engines pass such a target outputs that they have computed already, so one forward and one backward pass can give
    all that the scores need. A subclass needs `from_outputs` alone; the other members have defaults, and a subclass may
    set them as plain attributes.
    """

    @property
    def reads(self) -> frozenset[str]:
        """The names of the outputs that the target reads."""
        return COLUMNS

    @property
    def linear(self) -> bool:
        """Whether the derivatives in the outputs do not depend on them; it saves a pass where records take several."""
        return False

    @property
    def reads_prepared(self) -> bool:
        """Whether the target reads the records that the objective prepared, rather than the user's."""
        return False

    @property
    def rows(self) -> RecordBatch | None:
        """Other records that the target is over; None: the scored ones."""
        return None

    def with_objective(self, objective: Objective) -> Self:
        """Return the target for a scoring's objective; most do not depend on it."""
        return self

    @abstractmethod
    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, ""]:
        """Return the target from the outputs of all records."""

    def __call__(self, view: PolicyView, params: Params, records: RecordBatch) -> Float[Tensor, ""]:
        """Return the target after running the policy, for engines that have not computed the outputs."""
        return self.from_outputs(view.only(self.reads, params, view.prepare(records)), records)


class MeanTarget(BatchTarget):
    """Base of batch targets that are means over the records, so that some of them can be left out."""

    @property
    def total(self) -> float | None:
        """The mean's denominator, where the records are a part of those that it is over; None: their weights."""
        return None

    @abstractmethod
    def values(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return the values whose mean the target is; a record's value does not depend on other records."""

    @abstractmethod
    def weights(self, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return the values' weights in the mean, from all records."""

    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, ""]:
        """Return the mean from the outputs of all records."""
        weights = self.weights(records)
        return (weights * self.values(outputs, records)).sum() / (self.total or weights.sum())


@dataclass(frozen=True, eq=False)
class WrappedTarget(BatchTarget):
    """Base of targets that are made of another, and read what it reads.

    Attributes:
        target: the other one.
    """

    target: BatchTarget

    @property
    def reads(self) -> frozenset[str]:
        """The names of the outputs that the target reads."""
        return self.target.reads

    @property
    def linear(self) -> bool:
        """Whether the derivatives in the outputs do not depend on them."""
        return self.target.linear

    @property
    def reads_prepared(self) -> bool:
        """Whether the target reads the records that the objective prepared."""
        return self.target.reads_prepared

    def with_objective(self, objective: Objective) -> Self:
        """Return the target for a scoring's objective."""
        return replace(self, target=self.target.with_objective(objective))


class SummedTarget(ABC):
    """Base of targets that are sums of parts, each of which runs the policy on other records.

    Engines differentiate one part after the other, so that only one part's graph takes memory at a time.
    """

    @abstractmethod
    def parts(self) -> Iterable[Target]:
        """Return the parts, each a target."""

    def spare_part(self) -> Target | None:
        """Return a part for processes that have fewer than others, which counts nothing; None: any pass will do."""
        return None

    def __call__(self, view: PolicyView, params: Params, records: RecordBatch) -> Float[Tensor, ""]:
        """Return the sum of the parts."""
        return torch.stack([part(view, params, records) for part in self.parts()]).sum()


def reads_scored_records(target: object) -> TypeGuard[BatchTarget]:
    """Return whether a target reads the outputs of the scored records and nothing else."""
    return isinstance(target, BatchTarget) and target.rows is None


def is_mean(target: object) -> TypeGuard[MeanTarget]:
    """Return whether a target is a mean over the scored records, so that some can be left out of it."""
    return isinstance(target, MeanTarget) and target.rows is None


def rows_of(target: object) -> RecordBatch | None:
    """Return the other records that a target is over, if it says so."""
    return target.rows if isinstance(target, BatchTarget) else None


@dataclass(frozen=True)
class Return(MeanTarget):
    """A surrogate of the expected return: `mean(log pi(a|s) A)` over the records, advantages not normalised (LDA §3.2).

    Its gradient at the policy that collected the records is the policy gradient, so the training buffer serves as
    validation set and no further environment step is needed.
    """

    reads = frozenset(["log_prob"])
    linear = True

    def values(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return each record's log-prob times its advantage."""
        return check_one_per_record("log_prob", outputs.log_prob) * records.advantages

    def weights(self, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return ones."""
        return torch.ones_like(records.advantages)

    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, ""]:
        """Return the target from the outputs of all records."""
        return self.values(outputs, records).mean()


@dataclass(frozen=True)
class MeanObjective(MeanTarget):
    """The mean over units of their records' mean objective: what training itself raises, by its policy part (DTV).

    The objective is that of the scoring, without terms of value, entropy and divergence (`policy_part`). Its advantages
    are those of the objective, normalised or not.

    Attributes:
        unit: what the mean is over: "record", "episode", "row" or "group"; see `Unit`; None: as in `DTV`.
    """

    unit: Unit | None = "record"
    total: float | None = field(default=None, repr=False)  # the weights of all processes' records
    objective: Objective | None = field(default=None, repr=False)

    reads_prepared = True

    def __post_init__(self) -> None:
        check_unit(self.unit)

    @property
    def reads(self) -> frozenset[str]:
        """The outputs that the objective reads."""
        return frozenset(getattr(self._bound, "reads", COLUMNS))

    @property
    def _bound(self) -> Objective:
        if self.objective is None:
            raise WhenceError(
                "MeanObjective() takes its objective from the scoring, as in attribute(..., target=MeanObjective()). "
                "It is no target by itself, nor of scores of a whole round: pass Return() there."
            )
        return self.objective

    def with_objective(self, objective: Objective) -> Self:
        """Return the target for the scoring's objective."""
        return replace(self, objective=policy_part(objective))

    def values(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return the policy part of each record's objective; the records are those that the objective prepared."""
        return self._bound(outputs, records)

    def weights(self, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return one over the number of records of each record's unit."""
        units = label_units(records, self.unit)
        return (1 / units.bincount()[units]).to(records.advantages)


@dataclass(frozen=True, eq=False)
class Action:
    """The log-probability of one action in one state, or its mean over a set of them (LDA §3.2).

    Attributes:
        observation: one observation, shaped like the policy's observation space; or m of them, first axis m.
        action: one action, or m of them; inside the policy's action space, if the view knows it.
        action_mask: which actions were allowed, shaped like the records' masks; None: the policy takes no masks, or
            all actions were allowed.
        records: the m records that these are of, of a recurrent policy, which reads the steps before them; else None.
    """

    observation: Any
    action: Any
    action_mask: Any = None
    records: RecordBatch | None = None

    def __call__(self, view: PolicyView, params: Params, records: RecordBatch) -> Float[Tensor, ""]:
        """Return the target, a scalar."""
        states = self.as_records(records, view.action_space)
        return check_one_per_record("log_prob", view(params, view.prepare(states)).log_prob).mean()

    def as_records(self, like: RecordBatch, space: Any = None) -> RecordBatch:
        """Return the target's m states and actions as records, with zeros for all else.

        Args:
            like: records whose observations and actions have the shapes, dtypes and device to match.
            space: the policy's action space, which holds the actions; None: they are not checked.

        Raises:
            WhenceError: the target's do not match them.
        """
        # A set of states has one axis more than one state.
        observation = _match_column("observation", self.observation, like.observations)
        action = _match_column("action", self.action, like.actions)
        _check_actions(space, action)
        columns = {"observations": observation, "actions": action}
        if self.action_mask is not None:
            if like.action_masks is None:
                raise WhenceError("Action() got an action_mask, but the records have none: leave it out.")
            columns["action_masks"] = _match_column("action_mask", self.action_mask, like.action_masks)
        counts = {len(leaf) for _, leaf in named_leaves(columns)}
        if len(counts) > 1:
            raise WhenceError(
                f"Action() got sets of different sizes, {sorted(counts)}: give one observation and one action, or "
                "as many actions as observations."
            )
        zeros = torch.zeros(counts.pop(), device=like.log_probs.device)
        place: Any = {} if (of := self.records) is None else {"record_ids": of.ids, "history": of.history}
        return RecordBatch(**columns, log_probs=zeros, advantages=zeros, **place)

    def describe(self) -> dict[str, Any]:
        """Return what tells the target from another of its kind, for a run's configuration."""
        return {"observation": self.observation, "action": self.action, "action_mask": self.action_mask}

    def __repr__(self) -> str:
        arguments = [self.observation, self.action] + ([] if self.action_mask is None else [self.action_mask])
        return f"Action({', '.join(_shorten(argument) for argument in arguments)})"


def _shorten(tree: Tree) -> str:
    """Return a few numbers in full; many numbers as their shape and a digest."""
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key!r}: {_shorten(branch)}" for key, branch in tree.items()) + "}"
    tensor = torch.as_tensor(tree).detach().cpu()
    if len(text := str(tensor.tolist())) <= 40:
        return text
    digest = hashlib.sha256(tensor.double().numpy().tobytes()).hexdigest()
    return f"{'x'.join(map(str, tensor.shape))} numbers {digest[:8]}"


def _match_column(name: str, values: Tree, column: Tree) -> Tree:
    """Return `values` with a first axis for records, and the shape, dtype and device of a column of records."""
    if isinstance(column, dict):
        if not isinstance(values, dict) or values.keys() != column.keys():
            raise WhenceError(f"The {name} of Action() needs the keys {sorted(column)}, as the records have.")
        return {key: _match_column(f"{name}.{key}", values[key], column[key]) for key in column}
    source = torch.as_tensor(values)
    tensor = source.to(column)
    if not column.is_floating_point() and (tensor.to(source) != source).any():
        raise WhenceError(
            f"The {name} of Action() is {values}, and the records' are {column.dtype}: pass such numbers."
        )
    shape = column.shape[1:]
    if tensor.shape == shape or (tensor.ndim == 0 and shape.numel() == 1):
        return tensor.reshape(1, *shape)
    if tensor.ndim and tensor.shape[1:] == shape:
        return tensor
    if tensor.ndim == 1 and shape.numel() == 1:
        return tensor.reshape(-1, *shape)
    raise WhenceError(
        f"The {name} of Action() has shape {tuple(tensor.shape)}; the records' have shape {tuple(shape)}: pass one "
        f"of that shape, or several with shape {('m', *shape)}."
    )


def _check_actions(space: Any, actions: Tensor) -> None:
    """Refuse an action outside the space; a box's bounds are ignored, since policies sample beyond them."""
    if not hasattr(space, "contains") or hasattr(space, "low"):
        return
    # SB3 counts the actions of a Discrete from 0, wherever the space starts.
    offsets = {0, int(start)} if isinstance(start := getattr(space, "start", 0), Integral) else {0}
    for action in actions.cpu():
        whole = action.long()
        is_whole = torch.equal(whole.to(action.dtype), action)
        if not is_whole or not any(space.contains((whole + each).reshape(space.shape).numpy()) for each in offsets):
            raise WhenceError(
                f"Action() got the action {action.tolist()}, which is not in the policy's action space, {space}: pass "
                "one that the policy can take."
            )


def as_target(target: Target) -> Target:
    """Return `target` if it can be called, and is no class; else raise a `WhenceError`."""
    if isinstance(target, type) or not callable(target):
        raise WhenceError(
            f"target is {target!r}; pass whence.Return(), whence.Action(observation, action) or a function "
            "`function(view, params, records)` that returns a scalar tensor."
        )
    return target


def target_name(target: object) -> str:
    """Return a target's name for provenance and tables."""
    return getattr(target, "__name__", None) or repr(target)
