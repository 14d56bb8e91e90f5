"""Quantities whose rise or fall a record's influence is measured on (LDA §3.2), all written to be raised."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from whence.errors import WhenceError
from whence.records import RecordBatch, Tree, check_one_per_record, named_leaves

if TYPE_CHECKING:
    from whence.policies import Outputs, Params, PolicyView

Target: TypeAlias = Callable[["PolicyView", "Params", RecordBatch], Tensor]
"""`target(view, params, records)` returns a scalar tensor, to be raised, differentiable in `params`.

`records` are the scored records as they came, with raw advantages.
"""


@runtime_checkable
class BatchTarget(Protocol):
    """A target that reads the scored records' own outputs and nothing else.

    An engine that has those outputs at hand need not run the policy a second time: at the policy that collected the
    records, one forward and backward pass hold all that the scores need. An attribute `reads`, where there is one,
    names the outputs that are read; without it all are computed.
    """

    def from_outputs(self, outputs: "Outputs", records: RecordBatch) -> Float[Tensor, ""]:
        """Return the target from the outputs of all records."""
        ...

    def __call__(self, view: "PolicyView", params: "Params", records: RecordBatch) -> Float[Tensor, ""]:
        """Return the target, running the policy: what an engine does that has no outputs at hand."""
        ...


@runtime_checkable
class SummedTarget(Protocol):
    """A target that runs the policy on records of its own, as a sum of parts.

    Engines differentiate one part after the other, so that the graph of one is all that is held at a time.
    """

    def parts(self) -> Iterable[Target]:
        """Return the parts, each a target."""
        ...

    def __call__(self, view: "PolicyView", params: "Params", records: RecordBatch) -> Float[Tensor, ""]:
        """Return the sum of the parts."""
        ...


@dataclass(frozen=True)
class Return:
    """The expected return's stand-in, `mean(log pi(a|s) A)` over the records, raw advantages (LDA §3.2).

    Its gradient at the policy that collected the records is the policy gradient, so the training buffer serves as
    validation set and no further environment step is needed.
    """

    reads = frozenset(["log_prob"])

    def from_outputs(self, outputs: "Outputs", records: RecordBatch) -> Float[Tensor, ""]:
        """Return the target from the outputs of all records."""
        return (check_one_per_record("log_prob", outputs.log_prob) * records.advantages).mean()

    def __call__(self, view: "PolicyView", params: "Params", records: RecordBatch) -> Float[Tensor, ""]:
        """Return the target, a scalar."""
        return self.from_outputs(view(params, view.prepare(records)), records)


@dataclass(frozen=True, eq=False)
class Action:
    """The log-probability of one action in one state, or its mean over a set of them (LDA §3.2).

    Attributes:
        observation: one observation, shaped as the policy's observation space; or m of them, first axis m.
        action: one action, or m of them; of the policy's action space, where the view knows it.
        action_mask: where the policy takes masks, what was allowed there, shaped as in the records; None: all.
    """

    observation: Any
    action: Any
    action_mask: Any = None

    def __call__(self, view: "PolicyView", params: "Params", records: RecordBatch) -> Float[Tensor, ""]:
        """Return the target, a scalar."""
        asked = self._as_records(records)
        _check_actions(getattr(view, "action_space", None), asked.actions)
        return check_one_per_record("log_prob", view(params, view.prepare(asked)).log_prob).mean()

    def _as_records(self, like: RecordBatch) -> RecordBatch:
        # Whether one state or a set came shows in the number of axes: a record's observation has one less.
        observation = _like("observation", self.observation, like.observations)
        action = _like("action", self.action, like.actions)
        columns = {"observations": observation, "actions": action}
        if self.action_mask is not None:
            if like.action_masks is None:
                raise WhenceError("Action() got an action_mask, but the records have none: leave it out.")
            columns["action_masks"] = _like("action_mask", self.action_mask, like.action_masks)
        counts = {len(leaf) for _, leaf in named_leaves(columns)}
        if len(counts) > 1:
            raise WhenceError(
                f"Action() got sets of different sizes, {sorted(counts)}: give one observation and one action, or "
                "as many actions as observations."
            )
        zeros = torch.zeros(counts.pop(), device=like.log_probs.device)
        return RecordBatch(**columns, log_probs=zeros, advantages=zeros)

    def __repr__(self) -> str:
        given = [self.observation, self.action] + ([] if self.action_mask is None else [self.action_mask])
        return f"Action({', '.join(_short(one) for one in given)})"


def _short(tree: Tree) -> str:
    """Write out a few numbers; of many say how many, and a digest that tells them apart."""
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key!r}: {_short(branch)}" for key, branch in tree.items()) + "}"
    tensor = torch.as_tensor(tree).detach().cpu()
    if len(text := str(tensor.tolist())) <= 40:
        return text
    digest = hashlib.sha256(tensor.double().numpy().tobytes()).hexdigest()
    return f"{'x'.join(map(str, tensor.shape))} numbers {digest[:8]}"


def _like(name: str, given: Tree, column: Tree) -> Tree:
    """Give `given` the records' axis, and the shape and dtype of a column of records."""
    if isinstance(column, dict):
        if not isinstance(given, dict) or given.keys() != column.keys():
            raise WhenceError(f"The {name} of Action() needs the keys {sorted(column)}, as the records have.")
        return {key: _like(f"{name}.{key}", given[key], column[key]) for key in column}
    tensor = _cast(name, torch.as_tensor(given), column.dtype).to(column.device)
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


def _cast(name: str, given: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to the records' dtype; whole numbers and booleans have to stay what they were."""
    cast = given.to(dtype)
    if not dtype.is_floating_point and (changed := cast.to(given.dtype) != given).any():
        raise WhenceError(
            f"The {name} of Action() holds {given[changed][0].item():g}, but the records' are {str(dtype)[6:]}, which "
            f"would make it {cast[changed][0].item():g}: pass numbers of that kind."
        )
    return cast


def _check_actions(space: Any, actions: Tensor) -> None:
    """Refuse an action that the space does not hold; a box's bounds do not count, since policies sample beyond them."""
    if not hasattr(space, "contains") or hasattr(space, "low"):
        return
    for action in actions.cpu():
        whole = action.long()
        if not torch.equal(whole.to(action.dtype), action) or not space.contains(whole.reshape(space.shape).numpy()):
            raise WhenceError(
                f"Action() got the action {action.tolist()}, which is not in the policy's action space, {space}: pass "
                "one that the policy can take."
            )


def as_target(target: Target) -> Target:
    """Return `target` where it can be called as one.

    Raises:
        WhenceError: it is a class, or cannot be called.
    """
    if isinstance(target, type):
        raise WhenceError(f"target is the class {target.__name__}; pass an instance: {target.__name__}().")
    if not callable(target):
        raise WhenceError(
            f"target is {target!r}; pass whence.Return(), whence.Action(observation, action) or a function "
            "`function(view, params, records)` that returns a scalar tensor."
        )
    return target


def target_name(target: object) -> str:
    """Name a target for provenance and tables."""
    return getattr(target, "__name__", None) or repr(target)
