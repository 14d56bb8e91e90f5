"""How many records fit into one pass: measured on a few of them, for a budget in bytes."""

import math
import sys
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whence.engines.problem import Problem
from whence.errors import WhenceError
from whence.objectives import FunctionObjective, Objective
from whence.policies import COLUMNS, Outputs, notes_on
from whence.records import RecordBatch, named_leaves
from whence.targets import BatchTarget

_PROBES = (8, 16)
# The allocator keeps freed blocks that fit nothing later, and kernels take working memory of their own: the process
# was seen to grow by up to 2.8 times what the tensors need.
_MARGIN = 3
# What is kept for all records at once: outputs, their derivatives, products; bytes for each number of a record.
_KEPT = 64


class _Cost(NamedTuple):
    """Bytes held after each allocation and release of an engine's run: `fixed + each * records`.

    `kept` are the bytes of each record that stay however the records are cut.
    """

    fixed: NDArray[np.float64]
    each: NDArray[np.float64]
    kept: int

    def at(self, records: int) -> float:
        """Return the most bytes held at a time."""
        return float((self.fixed + self.each * records).max())

    def records(self, memory: float) -> int:
        """Return the most records that take no more than `memory` bytes."""
        growing = self.each > 0
        if self.at(1) > memory or not growing.any():
            return 0 if self.at(1) > memory else sys.maxsize
        return int(((memory - self.fixed[growing]) / self.each[growing]).min())


def fitted(problem: Problem, engine: Callable[[Problem], object], memory: int) -> Problem:
    """Return the problem with the largest `chunk_size` for which the engine stays within `memory` bytes.

    The engine runs on 8 and on 16 of the records. Each tensor it makes is taken to grow in proportion, so the most
    that is held at a time is known for any number. The records themselves are not counted, nor what targets make. This
    is done once per view and kind of question: the callback asks the same one in every round.

    Args:
        problem: what to score.
        engine: whose memory grows with the chunk.
        memory: bytes.

    Raises:
        WhenceError: not even one record fits.
    """
    total = len(problem.records)
    if total <= _PROBES[-1]:
        return replace(problem, chunk_size=total)
    known = notes_on(problem.view)
    key = _kind(problem, engine)
    if key not in known:
        known[key] = _measured(problem, engine)
    cost: _Cost = known[key]
    size = cost.records((memory - cost.kept * total) / _MARGIN)
    if size < 1:
        least = math.ceil(cost.at(1) * _MARGIN + cost.kept * total)
        raise WhenceError(
            f"memory is {memory:,} bytes, but scoring these {total} records one by one takes about {least:,} bytes "
            "with this policy and engine. Allow more, or use engine='forward', which holds least."
        )
    return replace(problem, chunk_size=min(size, total))


def _kind(problem: Problem, engine: Callable[[Problem], object]) -> Hashable:
    """What the cost depends on, for one and the same view."""
    columns = (problem.records.observations, problem.records.actions, problem.records.action_masks)
    shapes = tuple((tuple(t.shape[1:]), t.dtype) for c in columns if c is not None for _, t in named_leaves(c))
    parameters = tuple((name, tuple(p.shape), p.dtype) for name, p in problem.params.items())
    targets = tuple(isinstance(target, BatchTarget) for target in problem.targets)
    return _Cost, engine, parameters, shapes, targets, problem.columns, _made_of(problem.objective)


def _made_of(objective: Objective) -> object:
    # The code of a plain function, which may be made anew for each round.
    function: Any = objective.function if isinstance(objective, FunctionObjective) else objective
    return getattr(function, "__code__", None) or type(function)


def _measured(problem: Problem, engine: Callable[[Problem], object]) -> _Cost:
    few, more = (_probed(problem, engine, size) for size in _PROBES)
    if len(few) != len(more):  # the two runs took different ways; what they held at most is all there is to compare
        few, more = few.max(keepdims=True), more.max(keepdims=True)
    each = (more - few) / (_PROBES[1] - _PROBES[0])
    with torch.no_grad():
        log_prob = problem.part(slice(0, 1)).outputs().log_prob
    return _Cost(few - each * _PROBES[0], each, _KEPT * log_prob.numel())


def measure_bytes(run: Callable[[], object]) -> list[int]:
    """Return the bytes in tensors made by `run`, after each allocation and each release."""
    meter = _Meter()
    with meter:
        run()
    return meter.held


def _probed(problem: Problem, engine: Callable[[Problem], object], size: int) -> NDArray[np.float64]:
    targets = [_of_outputs(target) if isinstance(target, BatchTarget) else _of_parameters for target in problem.targets]
    probe = replace(problem.part(slice(0, size)), targets=targets, chunk_size=size, summed=None)
    return np.array(measure_bytes(lambda: engine(probe)), dtype=np.float64)


# Stand-ins for the user's targets, which may hold something for each record of the round, or run the policy on what
# they like.


def _of_parameters(view: Any, params: Mapping[str, Tensor], records: RecordBatch) -> Tensor:
    return torch.stack([parameter.sum() for parameter in params.values()]).sum()


@dataclass(frozen=True)
class _OfOutputs:
    reads: frozenset[str]

    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Tensor:
        columns = (getattr(outputs, name) for name in self.reads)
        return torch.stack([column.mean() for column in columns if column is not None]).sum()

    def __call__(self, view: Any, params: Mapping[str, Tensor], records: RecordBatch) -> Tensor:
        return self.from_outputs(view(params, view.prepare(records)), records)


def _of_outputs(target: BatchTarget) -> _OfOutputs:
    return _OfOutputs(frozenset(getattr(target, "reads", COLUMNS)))


class _Meter(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, while they live.

    Attributes:
        held: the bytes after each allocation and each release.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = [0]
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._seen.update(_storages((args, kwargs)))  # what was there before is no cost of the engine's
        made = func(*args, **kwargs)
        for storage in _storages(made):
            if storage not in self._seen:
                self._seen.add(storage)
                self._change(storage.nbytes())
                weakref.finalize(storage, self._change, -storage.nbytes()).atexit = False
        return made

    def _change(self, nbytes: int) -> None:
        self.held.append(self.held[-1] + nbytes)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tree_leaves(tree) if isinstance(tensor, Tensor)]
