"""Probes of a policy and an engine on a few records, once per view and kind of problem.

An engine may be wrong without an error: a network may sort its rows, detach a part of itself, or scale gradients by a
hook. The plain loop is right for all of these, so each engine is held against it. The loop itself is wrong if the
outputs for a record depend on the records next to it, so that is looked at first.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from whence.core import Outputs, Unsupported, first_line, notes_on, reads_scored_records
from whence.engines.memory import kind_of, list_tensors, replace_target
from whence.engines.per_record import differentiate, loop, multiply, record_gradient
from whence.engines.problem import Engine, Gradient, Problem, Refused

_RECORDS = 3
# A parameter's share of the direction grows as its gradient shrinks, down to this part of the largest one.
_SMALLEST_SHARE = 1e-3


def check_mixing(problem: Problem) -> None:
    """Refuse, as `Unsupported`, a policy whose outputs for a record depend on the records evaluated with it."""
    modes = tuple(module.training for module in problem.modules.values())
    notes, key = notes_on(problem.view), (check_mixing, modes, kind_of(problem))
    if len(problem.records) == 1 or key in notes:
        return
    if scaled := [path for path, module in problem.modules.items() if getattr(module, "scale_grad_by_freq", False)]:
        raise _refuse_mixing(f"`{scaled[0]}` scales a record's gradient by all records' (scale_grad_by_freq=True)")
    probe = _take_probe(problem)
    with problem.restored():
        together, again = probe.outputs(), probe.outputs()
        try:
            apart = [probe.part(slice(i, i + 1)).outputs() for i in range(len(probe.records))]
        except Exception as failure:  # such as a variance of one record, which is NaN
            raise _refuse_mixing(f"The policy fails on a record alone ({first_line(failure)})") from failure
    for name, column, other, *parts in zip(Outputs._fields, together, again, *apart, strict=True):
        if column is None or not torch.equal(column, other):  # a random output says nothing
            continue
        column, others = column.detach(), torch.cat(parts).detach()
        difference, largest = float((column - others).abs().max()), max(1.0, float(column.abs().max()))
        if not (difference <= 1e-4 * largest or difference <= _measure_precision(probe).tolerance(1e-4) * largest):
            raise _refuse_mixing(
                f"The policy's {name} of a record changes by up to {difference:.2g} with the other records in its pass"
            )
    notes[key] = True


def _refuse_mixing(what: str) -> Unsupported:
    return Unsupported(
        f"{what}, so no record has an objective of its own. Look for a layer that mixes records: BatchNorm or another "
        "normalisation over the minibatch, a recurrent layer over the first axis, a mean over it. Use LayerNorm or "
        "GroupNorm, put BatchNorm in eval mode if training does so, and keep records apart."
    )


def check_against_loop(problem: Problem, engine: Engine) -> None:
    """Refuse an engine whose products for a few records are not those of the plain loop.

    The probe's target is a direction in which every parameter counts alike; and, if a target of the problem reads the
    records' outputs, the mean of the outputs. The engine runs on the records in two orders.

    Raises:
        Refused: products differ; the message says by how much.
    """
    notes, key = notes_on(problem.view), (check_against_loop, engine, kind_of(problem))
    if key in notes or len(problem.records) == 1 or engine is loop:
        return
    probe = _take_probe(problem)
    with problem.restored():
        try:
            direction = spread_evenly(record_gradient(probe, 0))
        except Exception:  # the loop fails on this policy, so there is nothing to compare with
            return

        def tolerance() -> float:
            return max(_measure_precision(probe).tolerance(1e-3), 10 * _measure_noise(probe, direction))

        targets: list[Any] = [Along(direction)]
        targets += [replace_target(target) for target in problem.targets if reads_scored_records(target)][:1]
        compared = [_compare(engine, replace(probe, targets=[target]), tolerance) for target in targets]
    if all(compared):
        notes[key] = True


def _compare(engine: Engine, probe: Problem, tolerance: Callable[[], float]) -> bool:
    """Hold an engine's products against the loop's, in two orders of the records; False if they confirm nothing."""
    truth = loop(probe)[0]
    largest = float(truth.abs().max())
    if not math.isfinite(largest):  # the scores are refused by the name of the record
        return False
    backwards = torch.arange(len(truth) - 1, -1, -1, device=truth.device)
    for records, expected in ((probe, truth), (_reorder(probe, backwards), truth.flip(0))):
        difference = float((engine(records)[0] - expected).abs().max())
        if not (difference <= 1e-3 * largest or difference <= tolerance() * largest):
            raise Refused(
                f"On {len(truth)} records its products differ from the plain loop's by "
                f"{difference / (largest or 1.0):.2g} of the largest: the policy does something that this engine "
                "cannot see, such as a reordering of the records, a detach, or a hook that changes gradients. Use "
                "engine='loop' (or 'auto')."
            )
    return largest > 0  # records that say nothing, as where all of them are clipped, confirm nothing


def _take_probe(problem: Problem) -> Problem:
    """Return the problem of the records with the largest advantages, which have gradients if any have."""
    advantages = problem.prepared.advantages.abs()
    sizes = advantages.reshape(len(advantages), -1).amax(1)
    index = sizes.topk(min(_RECORDS, len(sizes))).indices
    return replace(_reorder(problem, index), chunk_size=_RECORDS, summed=None)


def _reorder(problem: Problem, index: Tensor) -> Problem:
    records, prepared = problem.records.take(index), problem.prepared.take(index)
    return replace(problem, records=records, prepared=prepared, known_inputs=None)


def spread_evenly(gradient: Gradient) -> Gradient:
    """Return the gradient with every parameter's part scaled so that its product with the gradient is 1."""
    sizes = {name: tensor.norm() for name, tensor in gradient.items()}
    if not sizes:
        return gradient
    largest = torch.stack([*sizes.values()]).max()
    return {
        name: tensor / (sizes[name] * torch.maximum(sizes[name], _SMALLEST_SHARE * largest)).clamp(min=1e-30)
        for name, tensor in gradient.items()
    }


def _measure_precision(probe: Problem) -> "Precision":
    precision = Precision()
    with precision:
        probe.outputs()
    return precision


def _measure_noise(probe: Problem, direction: Gradient) -> float:
    """Return how far rounding moves the products of records in one pass from those of single records, relatively."""
    values = probe.objective_values(probe.outputs())
    apart, together = [], []
    for position in range(len(values)):
        apart.append(multiply(record_gradient(probe, position), direction, probe))
        together.append(multiply(differentiate(values[position], probe.params, retain=True), direction, probe))
    truth = torch.stack(apart)
    largest = float(truth.abs().max())
    return float((torch.stack(together) - truth).abs().max()) / largest if largest else 0.0


@dataclass(frozen=True, eq=False, repr=False)
class Along:
    """The target whose gradient is the given one: a tensor for each parameter that it depends on."""

    gradient: Gradient

    def __call__(self, view: Any, params: Mapping[str, Tensor], records: Any) -> Tensor:
        """Return the target, a scalar."""
        return torch.stack([(params[name] * one).sum() for name, one in self.gradient.items()]).sum()


class Precision(TorchDispatchMode):
    """Notes the least precise floating type that operations returned, whatever the parameters' type."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.epsilon = 0.0
        self.on_cuda = False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in list_tensors(output):
            if tensor.is_floating_point():
                self.epsilon = max(self.epsilon, torch.finfo(tensor.dtype).eps)
                self.on_cuda |= tensor.is_cuda
        return output

    def tolerance(self, least: float) -> float:
        """Return the relative difference that rounding explains; `least` is for float32 and float64 on a CPU."""
        return max(least * (10 if self.on_cuda else 1), 16 * self.epsilon)  # CUDA's TF32 has 10 bits
