"""One round to be scored, and the gradients of targets that every engine starts from."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from whence.errors import WhenceError
from whence.objectives import Objective
from whence.policies import COLUMNS, Outputs, Params, PolicyView, compute_outputs
from whence.records import RecordBatch, Tree, map_tree, take
from whence.targets import BatchTarget, SummedTarget, Target, target_name

Gradient = dict[str, Tensor]
"""One tensor per parameter that a quantity depends on, shaped as the parameter."""

Engine = Callable[["Problem"], Float[Tensor, "targets n"]]
"""All per-record products `<grad target, grad objective_i>`, one row per target."""


class Refused(WhenceError):
    """An engine does not cover this policy; the message says which layer or parameter, and what to use instead."""


@dataclass(frozen=True, eq=False)
class Problem:
    """What an engine is given: a round's records, or a part of them.

    Attributes:
        view: the policy.
        modules: its module and all submodules by their names, each once.
        own: its parameters, as it holds them; they tell whose parameter is whose, and no graph touches them.
        params: the same as fresh leaves that share their memory.
        records: the records as they came, on the parameters' device; targets read these.
        prepared: the records as the objective reads them (normalised advantages).
        objective: one value per record.
        targets: one or more.
        chunk_size: the most records in one pass.
        known_inputs: the records' inputs where they are at hand.
        summed: sums a gradient over processes that share the records; None: one process holds them all.
    """

    view: PolicyView
    modules: Mapping[str, nn.Module]
    own: dict[str, Tensor]
    params: dict[str, Tensor]
    records: RecordBatch
    prepared: RecordBatch
    objective: Objective
    targets: Sequence[Target]
    chunk_size: int
    known_inputs: Tree = None
    summed: Callable[[Gradient], Gradient] | None = None

    @cached_property
    def columns(self) -> frozenset[str]:
        """The outputs that the objective or a batch target reads."""
        readers = [self.objective, *(target for target in self.targets if isinstance(target, BatchTarget))]
        return frozenset().union(*(getattr(reader, "reads", COLUMNS) for reader in readers))

    @cached_property
    def inputs(self) -> Tree:
        """`view.prepare(records)`, when it is first asked for: only the part at hand takes memory."""
        if self.known_inputs is not None:
            return self.known_inputs
        return map_tree(lambda tensor: tensor.detach(), self.view.prepare(self.records))

    def part(self, index: slice) -> "Problem":
        """Return the problem of the records at `index`, for the same targets."""
        known = take(self.inputs, index) if "inputs" in self.__dict__ else None
        records, prepared = self.records.take(index), self.prepared.take(index)
        return replace(self, records=records, prepared=prepared, known_inputs=known)

    def parts(self) -> "Iterator[Problem]":
        """Yield parts of at most `chunk_size` records; the problem itself where it fits into one."""
        if len(self.records) <= self.chunk_size:
            yield self
            return
        for start in range(0, len(self.records), self.chunk_size):
            yield self.part(slice(start, start + self.chunk_size))

    def outputs(self, params: Params | None = None) -> Outputs:
        """Evaluate the policy on the records, at `params` where given, with a graph."""
        params = self.params if params is None else params
        outputs = compute_outputs(self.view, self.columns, params, self.inputs)
        n = len(self.records)
        for name, column in zip(Outputs._fields, outputs, strict=True):
            if column is not None and (column.ndim == 0 or len(column) != n):
                raise WhenceError(
                    f"The policy view returned `{name}` of shape {tuple(column.shape)} for {n} records; the records "
                    f"are needed first, shape ({n},): one number per record, or {(n, 'R')} where objective and target "
                    "read several."
                )
        return outputs

    def objective_values(self, outputs: Outputs) -> Float[Tensor, " n"]:
        """Evaluate the objective of each record."""
        values = self.objective(outputs, self.prepared)
        if values.shape != outputs.log_prob.shape[:1]:
            raise WhenceError(
                f"The objective returned shape {tuple(values.shape)} for {len(outputs.log_prob)} records; it must "
                "return one value per record, for any part of the records, and leave the reduction to whence."
            )
        return values


def takes_no_part(problem: Problem) -> bool:
    """Tell whether the objective goes through for all records, but not for two of them."""

    def takes(records: RecordBatch, like: Tensor) -> bool:
        zeros = like.new_zeros(len(records), *like.shape[1:])
        return bool(problem.objective(Outputs(zeros, zeros, zeros), records).shape == zeros.shape[:1])

    try:
        with torch.no_grad():
            like = problem.part(slice(0, 2)).outputs().log_prob
        if not takes(problem.prepared, like):
            return False
    except Exception:
        return False
    try:
        return not takes(problem.prepared.take(slice(0, 2)), like)
    except Exception:
        return True


class Seeds(NamedTuple):
    """The derivatives in each output, shaped as it is; None where there is no dependence."""

    log_prob: Float[Tensor, "n ..."] | None = None
    value: Float[Tensor, "n ..."] | None = None
    entropy: Float[Tensor, "n ..."] | None = None


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


def of_outputs(problem: Problem) -> list[Callable[[Outputs], Tensor]]:
    """Return the batch targets as functions of the outputs of all records."""

    def bound(target: BatchTarget) -> Callable[[Outputs], Tensor]:
        return lambda outputs: _scalar(target.from_outputs(outputs, problem.records), target)

    return [bound(target) for target in problem.targets if isinstance(target, BatchTarget)]


def target_gradients(problem: Problem) -> list[Gradient]:
    """Return the gradient of every target, chunk by chunk where the target reads the records' outputs alone."""
    return [_target_gradient(problem, target) for target in problem.targets]


def _target_gradient(problem: Problem, target: Target) -> Gradient:
    if not isinstance(target, BatchTarget):
        return plain_target_gradient(problem, target)
    with torch.no_grad():
        pieces = [part.outputs() for part in problem.parts()]
    log_probs, *others = zip(*pieces, strict=True)
    whole = Outputs(torch.cat(log_probs), *(None if column[0] is None else torch.cat(column) for column in others))
    (seed,) = seeds(of_outputs(replace(problem, targets=[target])), whole)
    splits = [[None] * len(pieces) if column is None else column.split(problem.chunk_size) for column in seed]
    total = Gradient()
    for part, of_part in zip(problem.parts(), zip(*splits, strict=True), strict=True):
        found = pullback(part.outputs(), Seeds(*of_part), list(problem.params.values()), retain=False)
        _add_to(total, problem, found)
    return completed(problem, total, target)


def plain_target_gradient(problem: Problem, target: Target) -> Gradient:
    """Return the gradient of `target(view, params, records)` by one backward pass, or one for each of its parts."""
    total = Gradient()
    for part in target.parts() if isinstance(target, SummedTarget) else [target]:
        value = _scalar(part(problem.view, problem.params, problem.records), target)
        if value.requires_grad:
            _add_to(total, problem, list(torch.autograd.grad(value, list(problem.params.values()), allow_unused=True)))
        del value  # its graph, before the next part makes one
    return completed(problem, total, target)


def _add_to(total: Gradient, problem: Problem, found: list[Tensor | None]) -> None:
    """Add a part's gradient to the sum, which is all that is held of it then."""
    for name in reversed(problem.params):
        part = found.pop()
        if part is not None and name in total:
            total[name] += part
        elif part is not None:
            total[name] = part.clone()  # autograd may have given several parameters the same memory


def _scalar(value: object, target: Target | BatchTarget) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise WhenceError(f"The target {target_name(target)} returned {got}; a scalar tensor is needed.")
    return value.reshape(())


def added(total: Gradient, part: dict[str, Tensor | None]) -> Gradient:
    """Add two gradients by parameter; a missing one counts as zero."""
    present = {name: tensor for name, tensor in part.items() if tensor is not None}
    return total | {name: total[name] + tensor if name in total else tensor for name, tensor in present.items()}


def completed(problem: Problem, gradient: Gradient, target: object) -> Gradient:
    """Return a target's gradient, summed over all processes.

    Raises:
        WhenceError: the target depends on no parameter.
    """
    # A process may have no part of a sum, and none of the gradient then.
    if not gradient and (problem.summed is None or not isinstance(target, SummedTarget)):
        raise WhenceError(
            f"The target {target_name(target)} depends on no trainable parameter of the policy, so no record can move "
            "it. Compute it from `view(params, inputs)`, not from the policy's own attributes, and without "
            "torch.no_grad() or .detach()."
        )
    if problem.summed is None:
        return gradient
    # Every process has to bring the same tensors, also where its own share does not reach them all.
    return problem.summed({name: gradient.get(name, torch.zeros_like(p)) for name, p in problem.params.items()})
