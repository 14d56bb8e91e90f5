"""Which records make a minibatch's gradient NaN or infinite, and in which parameter."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from whence.attribution import open_problem
from whence.engines import Gradient, Problem
from whence.objectives import Objective
from whence.policies import as_view
from whence.records import RecordBatch


@dataclass(frozen=True)
class Culprits:
    """Where a gradient that is not finite comes from.

    Attributes:
        positions: positions of the records whose own gradient is not finite; empty: only their sum is not.
        parameter: the first parameter whose gradient is not finite, or that is not finite itself; None: none is.
        layer: the first layer with an output that is not finite, or None.
        reason: a clause that says what is not finite, and where.
        is_policy: whether the policy itself has diverged: a parameter is not finite, or it has no valid distribution
            of actions.
    """

    positions: tuple[int, ...]
    parameter: str | None
    layer: str | None
    reason: str
    is_policy: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether the gradient is finite after all."""
        return not self.positions and self.parameter is None and not self.is_policy and self.layer is None


def find_culprits(policy: object, records: RecordBatch, objective: Objective) -> Culprits:
    """Return the records whose own gradient of the objective is not finite, found by the plain loop.

    A sum of gradients is finite only if each of them is. So the loop skips halves of the minibatch whose sum is finite.
    Modules are in eval mode meanwhile; policy and generators are unchanged.

    Args:
        policy: see `whence.attribute`.
        records: the minibatch, b records; `objective` reads them as they are.
        objective: the loss of a record, to be raised.
    """
    with open_problem(policy, records, targets=[], objective=objective) as problem:
        # The loss may read what no record batch may hold, such as advantages normalised to NaN.
        problem = replace(problem, prepared=records.to(problem.records.ids.device))
        broken = [name for name, tensor in problem.parameters.items() if not torch.isfinite(tensor).all()]
        if broken:
            return Culprits((), broken[0], None, f"the parameter `{broken[0]}` is not finite itself", True)
        positions = tuple(_search(problem, 0, len(records)))
        one = problem.part(slice(positions[0], positions[0] + 1)) if positions else problem
        gradient = _try(lambda: _sum_gradient(one))
        names = [] if gradient is None else _list_not_finite(gradient)
        in_parameters = [name for name in names if name != _LOSS]
        layer = _find_layer(one)
    if layer is not None:
        weight = next((name for name in problem.parameters if name.startswith(f"{layer}.")), None)
        parameter = in_parameters[0] if in_parameters else weight
        where = f"the output of the layer `{layer}` is not finite"
        if in_parameters:
            where += f", nor is its gradient in the parameter `{in_parameters[0]}`"
        return Culprits(positions, parameter, layer, where, gradient is None)
    if gradient is None:
        return Culprits(positions, None, None, "the policy's distribution of actions is not valid", True)
    if not names:
        return Culprits(positions, None, None, "no record is to blame, since in eval mode the gradient is finite")
    if names == [_LOSS]:
        what = "its loss overflows" if positions else "the sum of the losses overflows"
        return Culprits(positions, None, None, what)
    what = "its gradient is" if positions else "no record's own gradient, but their sum is"
    return Culprits(positions, names[0], None, f"{what} not finite in the parameter `{names[0]}`")


def _search(problem: Problem, first: int, last: int) -> list[int]:
    """Return the positions from `first` up to `last` whose gradient is not finite."""
    part = problem.part(slice(first, last))
    gradient = _try(lambda: _sum_gradient(part))
    if gradient is not None and not _list_not_finite(gradient):
        return []
    if last - first == 1:
        return [first]
    middle = (first + last) // 2
    return [*_search(problem, first, middle), *_search(problem, middle, last)]


def _sum_gradient(problem: Problem) -> Gradient:
    """Return the gradient of the sum of the records' objectives, and their sum under the name of no parameter."""
    value = problem.objective_values(problem.outputs()).sum()
    derivatives = torch.autograd.grad(value, list(problem.params.values()), allow_unused=True)
    gradient = {name: tensor for name, tensor in zip(problem.params, derivatives, strict=True) if tensor is not None}
    return {**gradient, _LOSS: value.detach()}


_LOSS = ""


def _try(compute: Callable[[], Gradient]) -> Gradient | None:
    """Return a gradient; None if torch's distributions refuse the policy's outputs."""
    try:
        return compute()
    except ValueError:
        return None


def _list_not_finite(gradient: Gradient) -> list[str]:
    names = [name for name, tensor in gradient.items() if not torch.isfinite(tensor).all()]
    return [name for name in names if name != _LOSS] or names


def _find_layer(problem: Problem) -> str | None:
    """Return the first layer, in the order of the forward pass, with an output that is not finite."""
    names: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and not torch.isfinite(output).all():
                names.append(name)

        return hook

    leaves = [(name, module) for name, module in problem.modules.items() if not list(module.children())]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    try:
        with torch.no_grad():
            _try(lambda: {"": problem.outputs().log_prob})
    finally:
        for handle in handles:
            handle.remove()
    return names[0] if names else None


def first_broken_layer(policy: object, records: RecordBatch) -> str | None:
    """Return the first layer of a policy whose output for some records is not finite, or None.

    Args:
        policy: see `whence.attribute`.
        records: the records.
    """
    view = as_view(policy)
    with open_problem(view, records, targets=[]) as problem:
        return _find_layer(problem)
