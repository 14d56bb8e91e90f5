"""The problem that engines solve: a round to score, and the gradients of its targets."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from whence.core import (
    COLUMNS,
    BatchTarget,
    Objective,
    Outputs,
    Params,
    PolicyView,
    RecordBatch,
    SummedTarget,
    Target,
    Tree,
    WhenceError,
    map_tree,
    preserve_buffers,
    preserve_rng_state,
    reads_scored_records,
    take,
    target_name,
)

Gradient = dict[str, Tensor]
"""One tensor for each parameter that a quantity depends on, shaped like the parameter."""

Summed = Callable[[Gradient], Gradient]
"""Sums a gradient over processes."""

Engine = Callable[["Problem"], Float[Tensor, "targets n"]]
"""Computes all per-record products `<grad target, grad objective_i>`, one row per target."""


class Refused(WhenceError):
    """An engine does not cover this policy; the message names the layer or parameter and what to use instead."""


@dataclass(frozen=True, eq=False)
class Problem:
    """An engine's argument: a round's records, or a part of them, with policy, objective and targets.

    Attributes:
        view: the policy's view.
        modules: the policy's module and all submodules by name, each once.
        parameters: the policy's own parameters by name; they identify parameters, and enter no graph.
        params: fresh leaves that share the parameters' memory, by the same names.
        records: the user's records, on the parameters' device; targets read these.
        prepared: the records that `objective.prepare` returned (normalised advantages); the objective reads these.
        objective: the objective, one value per record.
        targets: one or more targets.
        chunk_size: the most records in one pass.
        known_inputs: the records' inputs, if they were computed already.
        summed: sums a gradient over the processes that share the records; None: one process has all records.
    """

    view: PolicyView
    modules: Mapping[str, nn.Module]
    parameters: dict[str, Tensor]
    params: dict[str, Tensor]
    records: RecordBatch
    prepared: RecordBatch
    objective: Objective
    targets: Sequence[Target]
    chunk_size: int
    known_inputs: Tree = None
    summed: Summed | None = None

    @cached_property
    def columns(self) -> frozenset[str]:
        """The outputs that the objective or a batch target reads."""
        of_targets = [target.reads for target in self.targets if reads_scored_records(target)]
        return frozenset(getattr(self.objective, "reads", COLUMNS)).union(*of_targets)

    @cached_property
    def inputs(self) -> Tree:
        """`view.prepare(records)`, computed at first use, so that only the present part takes memory."""
        if self.known_inputs is not None:
            return self.known_inputs
        return map_tree(lambda tensor: tensor.detach(), self.view.prepare(self.records))

    def read_by(self, target: object) -> RecordBatch:
        """Return the records as a target reads them: the user's own, or those that the objective prepared."""
        return self.prepared if isinstance(target, BatchTarget) and target.reads_prepared else self.records

    def part(self, index: slice | Tensor) -> "Problem":
        """Return the problem of the records at `index`, for the same targets."""
        known = take(self.inputs, index) if "inputs" in self.__dict__ else None
        records, prepared = self.records.take(index), self.prepared.take(index)
        return replace(self, records=records, prepared=prepared, known_inputs=known)

    def parts(self) -> "Iterator[Problem]":
        """Yield parts of at most `chunk_size` records; the problem itself if it has no more."""
        if len(self.records) <= self.chunk_size:
            yield self
            return
        for start in range(0, len(self.records), self.chunk_size):
            yield self.part(slice(start, start + self.chunk_size))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore buffers and generators on exit, so that scores are the same with a trial before them and without."""
        with preserve_rng_state(), preserve_buffers(self.modules.values()):
            yield

    def outputs(self, params: Params | None = None) -> Outputs:
        """Evaluate the policy on the records at `params`, by default the problem's own, with a graph."""
        params = self.params if params is None else params
        outputs = self.view.only(self.columns, params, self.inputs)
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


class Seeds(NamedTuple):
    """The derivatives of a quantity in each output, shaped like the output; None if it does not depend on it."""

    log_prob: Float[Tensor, "n ..."] | None = None
    value: Float[Tensor, "n ..."] | None = None
    entropy: Float[Tensor, "n ..."] | None = None


def map_outputs(function: Callable[[Tensor], Tensor], outputs: Outputs) -> Outputs:
    """Apply `function` to the columns that are not None."""
    log_prob, *rest = outputs
    return Outputs(function(log_prob), *(None if column is None else function(column) for column in rest))


def compute_seeds(functions: Sequence[Callable[[Outputs], Tensor]], outputs: Outputs) -> list[Seeds]:
    """Return, for each function, the derivative of `function(outputs).sum()` in each output."""
    # Each function has its own leaves, so that one backward pass serves all.
    leaves = [map_outputs(lambda column: column.detach().requires_grad_(), outputs) for _ in functions]
    sums = [function(columns).sum() for function, columns in zip(functions, leaves, strict=True)]
    wanted = [column for columns in leaves for column in columns if column is not None]
    dependent = [value for value in sums if value.requires_grad]
    if not dependent:
        return [Seeds() for _ in functions]
    derivatives = iter(torch.autograd.grad(dependent, wanted, allow_unused=True))
    return [Seeds(*(None if column is None else next(derivatives) for column in columns)) for columns in leaves]


def pullback(outputs: Outputs, seed: Seeds, wanted: Sequence[object], *, retain: bool) -> list[Tensor | None]:
    """Return the derivative of `sum(outputs * seed)` in each of `wanted` (tensors or gradient edges).

    The graph of the outputs can be passed again if it is to be retained.
    """
    pairs = [
        (column, weight)
        for column, weight in zip(outputs, seed, strict=True)
        if column is not None and weight is not None and column.requires_grad
    ]
    if not pairs or not wanted:
        return [None] * len(wanted)
    columns, weights = zip(*pairs, strict=True)
    return list(torch.autograd.grad(columns, wanted, weights, allow_unused=True, retain_graph=retain))  # type: ignore[arg-type]


def bind_batch_targets(problem: Problem) -> list[Callable[[Outputs], Tensor]]:
    """Return the batch targets as functions of the outputs of all records."""

    def bind(target: BatchTarget) -> Callable[[Outputs], Tensor]:
        return lambda outputs: check_scalar(target.from_outputs(outputs, problem.read_by(target)), target)

    return [bind(target) for target in problem.targets if reads_scored_records(target)]


def target_gradients(problem: Problem) -> list[Gradient]:
    """Return the gradient of every target; chunk by chunk for targets that read the records' outputs alone."""
    return [_target_gradient(problem, target) for target in problem.targets]


def _target_gradient(problem: Problem, target: Target) -> Gradient:
    if not reads_scored_records(target):
        return plain_target_gradient(problem, target)
    like = compute_like(problem, target, problem.parts())
    (seed,) = compute_seeds(bind_batch_targets(replace(problem, targets=[target])), like)
    problem, seed = _take_weighted(problem, seed)
    splits = [itertools.repeat(None) if column is None else column.split(problem.chunk_size) for column in seed]
    total = Gradient()
    for part, *seeds in zip(problem.parts(), *splits, strict=False):
        derivatives = pullback(part.outputs(), Seeds(*seeds), list(problem.params.values()), retain=False)
        _move_into(total, problem, derivatives)
    return complete_gradient(problem, total, target)


def _take_weighted(problem: Problem, seed: Seeds) -> tuple[Problem, Seeds]:
    """Leave out the records that a target does not read: targets on folds of a rollout take one pass together."""
    columns = [column.flatten(1).any(1) if column.ndim > 1 else column != 0 for column in seed if column is not None]
    # Processes that share the records have to make the same passes.
    if problem.summed is not None or not columns or (weighted := torch.stack(columns).any(0)).all():
        return problem, seed
    index = weighted.nonzero().flatten() if weighted.any() else slice(0, 1)
    return problem.part(index), Seeds(*(None if column is None else column[index] for column in seed))


def compute_like(problem: Problem, target: BatchTarget, parts: Iterable[Problem]) -> Outputs:
    """Return outputs of all records, in `parts`, without a graph, at which a target's derivatives in them are its own.

    Of a linear target any will do: zeros of their shapes, from a pass over the first record.
    """
    with torch.no_grad():
        if target.linear:
            n, one = len(problem.records), problem.part(slice(0, 1)).outputs()
            return map_outputs(lambda column: column.new_zeros(n, *column.shape[1:]), one)
        by_part = [part.outputs() for part in parts]
    log_probs, *others = zip(*by_part, strict=True)
    whole = Outputs(torch.cat(log_probs), *(None if column[0] is None else torch.cat(column) for column in others))
    return map_outputs(lambda column: column[: len(problem.records)], whole)


def plain_target_gradient(problem: Problem, target: Target) -> Gradient:
    """Return the gradient of `target(view, params, records)` by one backward pass; a `SummedTarget`'s part by part."""
    total = Gradient()
    for part in target.parts() if isinstance(target, SummedTarget) else [target]:
        value = check_scalar(part(problem.view, problem.params, problem.read_by(part)), target)
        if value.requires_grad:
            derivatives: list[Tensor | None] = list(
                torch.autograd.grad(value, list(problem.params.values()), allow_unused=True)
            )
            _move_into(total, problem, derivatives)
        del value  # free its graph before the next part builds one
    return complete_gradient(problem, total, target)


def _move_into(total: Gradient, problem: Problem, derivatives: list[Tensor | None]) -> None:
    """Add derivatives, one per parameter, to the sum; the list is emptied on the way, to free their memory."""
    for name in reversed(problem.params):
        derivative = derivatives.pop()
        if derivative is not None and name in total:
            total[name] += derivative
        elif derivative is not None:
            total[name] = derivative.clone()  # autograd may return the same memory for several parameters


def check_scalar(value: object, target: Target | BatchTarget) -> Tensor:
    """Return what a target returned, as a scalar; refuse anything else."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise WhenceError(f"The target {target_name(target)} returned {shown}; a scalar tensor is needed.")
    return value.reshape(())


def add_gradients(total: Gradient, part: dict[str, Tensor | None]) -> Gradient:
    """Return the sum of two gradients by parameter; None and a missing parameter count as zero."""
    present = {name: tensor for name, tensor in part.items() if tensor is not None}
    return total | {name: total[name] + tensor if name in total else tensor for name, tensor in present.items()}


def complete_gradient(problem: Problem, gradient: Gradient, target: object) -> Gradient:
    """Return a target's gradient, summed over all processes; a `WhenceError` if it depends on no parameter."""
    # A process may have no part of a summed target; its gradient is empty then.
    if not gradient and (problem.summed is None or not isinstance(target, SummedTarget)):
        raise WhenceError(
            f"The target {target_name(target)} depends on no trainable parameter of the policy, so no record can move "
            "it. Compute it from `view(params, inputs)`, not from the policy's own attributes, and without "
            "torch.no_grad() or .detach()."
        )
    if problem.summed is None:
        return gradient
    # Every process has to sum the same tensors, even those that its own part does not depend on.
    return problem.summed({name: gradient.get(name, torch.zeros_like(p)) for name, p in problem.params.items()})
