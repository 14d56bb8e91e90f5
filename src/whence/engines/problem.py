"""One round to be scored, and the gradients of targets that every engine starts from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from whence.errors import WhenceError
from whence.objectives import Objective
from whence.policies import COLUMNS, ModuleView, Outputs, PolicyView
from whence.records import RecordBatch, Tree, take
from whence.targets import BatchTarget, Target, name_of

Gradient = dict[str, Tensor]
"""One tensor per parameter that a quantity depends on, shaped as the parameter."""

Engine = Callable[["Problem"], Float[Tensor, "targets n"]]
"""All per-record products `<grad target, grad objective_i>`, one row per target."""


class Refused(WhenceError):
    """An engine does not cover this policy; the message says which layer or parameter, and what to use instead."""


@dataclass(frozen=True, eq=False)
class Problem:
    """What an engine is given.

    Attributes:
        view: the policy.
        modules: its module and all submodules by their names, each once.
        own: its parameters, as it holds them; they tell whose parameter is whose, and no graph touches them.
        params: the same as fresh leaves that share their memory.
        records: the records as they came, on the parameters' device; targets read these.
        prepared: the records as the objective reads them (normalised advantages).
        inputs: `view.prepare(records)`.
        objective: one value per record.
        targets: one or more.
        chunk_size: the most records in one pass.
    """

    view: PolicyView
    modules: Mapping[str, nn.Module]
    own: dict[str, Tensor]
    params: dict[str, Tensor]
    records: RecordBatch
    prepared: RecordBatch
    inputs: Tree
    objective: Objective
    targets: Sequence[Target]
    chunk_size: int

    @cached_property
    def columns(self) -> frozenset[str]:
        """The outputs that the objective or a batch target reads."""
        readers = [self.objective, *(target for target in self.targets if isinstance(target, BatchTarget))]
        return frozenset().union(*(getattr(reader, "reads", COLUMNS) for reader in readers))

    def chunks(self) -> Iterator[slice]:
        """Yield slices of at most `chunk_size` records."""
        for start in range(0, len(self.records), self.chunk_size):
            yield slice(start, min(start + self.chunk_size, len(self.records)))

    def _is_all(self, chunk: slice) -> bool:
        return chunk == slice(0, len(self.records))

    def outputs(self, chunk: slice) -> Outputs:
        """Evaluate the policy on a chunk, with a graph."""
        inputs = self.inputs if self._is_all(chunk) else take(self.inputs, chunk)
        if isinstance(self.view, ModuleView):
            outputs = self.view.only(self.columns, self.params, inputs)
        else:
            outputs = self.view(self.params, inputs)
        expected = (len(self.prepared.log_probs[chunk]),)
        for name, column in zip(Outputs._fields, outputs, strict=True):
            if column is not None and column.shape != expected:
                raise WhenceError(
                    f"The policy view returned `{name}` of shape {tuple(column.shape)} for {expected[0]} records; "
                    f"one number per record is needed, shape {expected}. Sum log-probs over a record's own axes."
                )
        return outputs

    def objective_values(self, outputs: Outputs, chunk: slice) -> Float[Tensor, " chunk"]:
        """Evaluate the objective on a chunk."""
        values = self.objective(outputs, self.prepared if self._is_all(chunk) else self.prepared.take(chunk))
        if values.shape != outputs.log_prob.shape:
            raise WhenceError(
                f"The objective returned shape {tuple(values.shape)} for {len(outputs.log_prob)} records; it must "
                "return one value per record and leave the reduction to whence."
            )
        return values


class Seeds(NamedTuple):
    """One derivative per record in each output; None where there is no dependence."""

    log_prob: Float[Tensor, " n"] | None = None
    value: Float[Tensor, " n"] | None = None
    entropy: Float[Tensor, " n"] | None = None


def map_outputs(function: Callable[[Tensor], Tensor], outputs: Outputs) -> Outputs:
    """Apply `function` to the columns that are there."""
    log_prob, *rest = outputs
    return Outputs(function(log_prob), *(None if column is None else function(column) for column in rest))


def seeds(functions: Sequence[Callable[[Outputs], Tensor]], outputs: Outputs) -> list[Seeds]:
    """Return, for each function, the derivative of `function(outputs).sum()` in each output."""
    apart = [map_outputs(lambda column: column.detach().requires_grad_(), outputs) for _ in functions]
    sums = [function(own).sum() for function, own in zip(functions, apart, strict=True)]
    wanted = [column for own in apart for column in own if column is not None]
    dependent = [value for value in sums if value.requires_grad]
    if not dependent:
        return [Seeds() for _ in functions]
    # Each function has leaves of its own, so that one backward pass serves all.
    found = iter(torch.autograd.grad(dependent, wanted, allow_unused=True))
    return [Seeds(*(None if column is None else next(found) for column in own)) for own in apart]


def pullback(outputs: Outputs, seed: Seeds, wanted: Sequence[object], *, retain: bool) -> list[Tensor | None]:
    """Return the derivative of `sum(outputs * seed)` in each of `wanted` (tensors or gradient edges)."""
    pairs = [
        (column, weight)
        for column, weight in zip(outputs, seed, strict=True)
        if column is not None and weight is not None and column.requires_grad
    ]
    if not pairs or not wanted:
        return [None] * len(wanted)
    columns, weights = zip(*pairs, strict=True)
    found = torch.autograd.grad(columns, wanted, weights, allow_unused=True, retain_graph=retain)  # type: ignore[arg-type]
    return list(found)


def target_gradients(problem: Problem) -> list[Gradient]:
    """Return the gradient of every target, chunk by chunk where the target reads the records' outputs alone."""
    return [_target_gradient(problem, target) for target in problem.targets]


def _target_gradient(problem: Problem, target: Target) -> Gradient:
    if not isinstance(target, BatchTarget):
        return plain_target_gradient(problem, target)
    with torch.no_grad():
        parts = [problem.outputs(chunk) for chunk in problem.chunks()]
    columns = (None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True))
    whole = Outputs(*columns)
    (seed,) = seeds([lambda outputs: target.from_outputs(outputs, problem.records)], whole)
    names, total = list(problem.params), Gradient()
    for chunk in problem.chunks():
        part = Seeds(*(None if column is None else column[chunk] for column in seed))
        outputs = problem.outputs(chunk)
        found = pullback(outputs, part, list(problem.params.values()), retain=False)
        total = added(total, dict(zip(names, found, strict=True)))
    return checked(total, target)


def plain_target_gradient(problem: Problem, target: Target) -> Gradient:
    """Return the gradient of `target(view, params, records)` by one backward pass."""
    value = target(problem.view, problem.params, problem.records)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise WhenceError(f"The target {name_of(target)} returned {got}; a scalar tensor is needed.")
    found: Sequence[Tensor | None] = [None] * len(problem.params)
    if value.requires_grad:
        found = torch.autograd.grad(value.reshape(()), list(problem.params.values()), allow_unused=True)
    return checked(added({}, dict(zip(problem.params, found, strict=True))), target)


def added(total: Gradient, part: dict[str, Tensor | None]) -> Gradient:
    """Add two gradients by parameter; a missing one counts as zero."""
    present = {name: tensor for name, tensor in part.items() if tensor is not None}
    return total | {name: total[name] + tensor if name in total else tensor for name, tensor in present.items()}


def checked(gradient: Gradient, target: object) -> Gradient:
    """Return `gradient` where it has an entry.

    Raises:
        WhenceError: the target depends on no parameter.
    """
    if not gradient:
        raise WhenceError(
            f"The target {name_of(target)} depends on no trainable parameter of the policy, so no record can move "
            "it. Compute it from `view(params, inputs)`, not from the policy's own attributes, and without "
            "torch.no_grad() or .detach()."
        )
    return gradient
