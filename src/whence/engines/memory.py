"""The number of records that fit into one pass within a budget in bytes, measured on a few records."""

import math
import sys
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from whence.core import (
    BatchTarget,
    Outputs,
    RecordBatch,
    Target,
    WhenceError,
    named_leaves,
    notes_on,
    reads_scored_records,
)
from whence.engines.problem import Problem

_PROBES = (8, 16)
# The allocator keeps freed blocks that fit nothing later, and kernels take working memory: the process grew by up to
# 2.8 times what the tensors need.
_MARGIN = 3
# Bytes for each number of a record that stay for all records at once: outputs, their derivatives, products.
_BYTES_PER_NUMBER = 64


def choose_memory(device: torch.device) -> int:
    """Return the bytes that scoring may hold where nobody says.

    A quarter of a GPU, whatever else is on it, so that passes are of one size and scores of the same bits from run to
    run; half of what is free where that is less. A CPU has 2 GiB, on every machine.
    """
    if device.type != "cuda":
        return 2**31
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's cache of freed blocks
    return min(total // 4, free // 2)


def is_out_of_memory(failure: BaseException) -> bool:
    """Tell whether a pass failed for lack of memory; such a failure is raised, since another engine would hide it."""
    # On a CPU, torch raises a plain RuntimeError that its allocator names.
    return isinstance(failure, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(failure)


def check_memory(memory: object) -> None:
    """Refuse what is neither None nor a number of bytes."""
    if memory is None:
        return
    if not isinstance(memory, Real) or isinstance(memory, bool) or not float(memory) > 0:
        raise WhenceError(f"memory is {memory!r}; a number of bytes above 0 is needed, such as 2 * 2**30 for 2 GiB.")


class _Cost(NamedTuple):
    """Bytes held after each allocation and release of an engine's run: `fixed + each * records`.

    `lasting` are the bytes of each record that stay for all records, whatever the chunk size.
    """

    fixed: NDArray[np.float64]
    each: NDArray[np.float64]
    lasting: int

    def at(self, records: int) -> float:
        """Return the most bytes held at a time for this number of records."""
        return float((self.fixed + self.each * records).max())

    def count_records(self, memory: float) -> int:
        """Return the largest number of records that take no more than `memory` bytes."""
        growing = self.each > 0
        if self.at(1) > memory or not growing.any():
            return 0 if self.at(1) > memory else sys.maxsize
        return int(((memory - self.fixed[growing]) / self.each[growing]).min())


def fit_chunk_size(problem: Problem, engine: Callable[[Problem], object], memory: int) -> Problem:
    """Return the problem with the largest `chunk_size` for which the engine stays within `memory` bytes.

    The engine runs on 8 and on 16 of the records. Each tensor that it makes is assumed to grow linearly with their
    number, which gives the peak for any number. The records themselves and the targets' tensors are not counted. The
    cost is measured once per view and kind of problem, since a callback scores the same kind in every round.

    Raises:
        WhenceError: not even one record fits.
    """
    total = len(problem.records)
    if total <= _PROBES[-1]:
        return replace(problem, chunk_size=total)
    costs = notes_on(problem.view)
    key = (_Cost, engine, kind_of(problem))
    if key not in costs:
        with problem.restored():
            costs[key] = _measure_cost(problem, engine)
    cost: _Cost = costs[key]
    size = cost.count_records((memory - cost.lasting * total) / _MARGIN)
    if size < 1:
        least = math.ceil(cost.at(1) * _MARGIN + cost.lasting * total)
        raise WhenceError(
            f"memory is {memory:,} bytes, but scoring these {total} records one by one takes about {least:,} bytes "
            "with this policy and engine. Allow more, or try another engine: ghost and forward hold less than vmap."
        )
    return replace(problem, chunk_size=min(size, total))


def kind_of(problem: Problem) -> Hashable:
    """Return all that an engine's cost and its correctness depend on besides the view."""
    columns = (problem.records.observations, problem.records.actions, problem.records.action_masks)
    shapes = tuple((tuple(t.shape[1:]), t.dtype) for c in columns if c is not None for _, t in named_leaves(c))
    parameters = tuple((name, tuple(p.shape), p.dtype) for name, p in problem.params.items())
    targets = tuple(reads_scored_records(target) for target in problem.targets)
    return parameters, shapes, targets, problem.columns, _code_of(problem.objective)


def _code_of(objective: object) -> object:
    """Return what an objective computes by, the same for all objectives that compute alike."""
    # A plain function may be defined anew for each round; its code stays the same.
    function: Any = getattr(objective, "function", objective)
    return getattr(function, "__code__", None) or type(function)


def _measure_cost(problem: Problem, engine: Callable[[Problem], object]) -> _Cost:
    engine(_take_first(problem, _PROBES[0]))  # what an engine does once for a view
    runs = [partial(engine, _take_first(problem, size)) for size in _PROBES]
    few, more = (np.array(measure_bytes(run), dtype=np.float64) for run in runs)
    if len(few) != len(more):  # the two runs allocated differently, so only their peaks can be compared
        few, more = few.max(keepdims=True), more.max(keepdims=True)
    each = (more - few) / (_PROBES[1] - _PROBES[0])
    log_prob = problem.part(slice(0, 1)).outputs().log_prob
    return _Cost(few - each * _PROBES[0], each, _BYTES_PER_NUMBER * log_prob.numel())


def measure_bytes(run: Callable[[], object]) -> list[int]:
    """Return the bytes in tensors that `run` made, after each allocation and each release."""
    meter = _Meter()
    with meter:
        run()
    return meter.byte_counts


def _take_first(problem: Problem, size: int) -> Problem:
    """Return the problem of the first `size` records, with cheap targets."""
    targets = [replace_target(target) for target in problem.targets]
    return replace(problem.part(slice(0, size)), targets=targets, chunk_size=size, summed=None)


def replace_target(target: Target) -> Target:
    """Return a cheap target of the same kind; the user's may hold a tensor of all records, or run the policy."""
    if reads_scored_records(target):
        return _SumOfOutputs(target.reads)
    return _sum_parameters


def _sum_parameters(view: Any, params: Mapping[str, Tensor], records: RecordBatch) -> Tensor:
    return torch.stack([parameter.sum() for parameter in params.values()]).sum()


@dataclass(frozen=True)
class _SumOfOutputs(BatchTarget):
    columns: frozenset[str]

    @property
    def reads(self) -> frozenset[str]:
        return self.columns

    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Tensor:
        columns = (getattr(outputs, name) for name in self.columns)
        return torch.stack([column.mean() for column in columns if column is not None]).sum()


class _Meter(TorchDispatchMode):
    """Counts the bytes of live tensors that operations made: `byte_counts`, after each allocation and each release."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.byte_counts = [0]
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._seen.update(_storages((args, kwargs)))  # tensors from outside are no cost of the engine's
        output = func(*args, **kwargs)
        for storage in _storages(output):
            if storage not in self._seen:
                self._seen.add(storage)
                self._change(storage.nbytes())
                weakref.finalize(storage, self._change, -storage.nbytes()).atexit = False
        return output

    def _change(self, nbytes: int) -> None:
        self.byte_counts.append(self.byte_counts[-1] + nbytes)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in list_tensors(tree)]


def list_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors among the arguments or the results of an operation; torch's `tree_leaves` takes far longer."""
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for part in parts for tensor in list_tensors(part)]
