"""Forward-mode differentiation: the objective's derivative along the target's gradient, all records at once."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from whence.core import Outputs, Params
from whence.engines.problem import Gradient, Problem, map_outputs, target_gradients


def forward(problem: Problem) -> Float[Tensor, "targets n"]:
    """Return the products as `d/de objective_i(params + e grad target)`, for any architecture.

    It takes the memory of a forward pass.
    """
    gradients = target_gradients(problem)
    return torch.cat(
        [torch.stack([derive_along(part, gradient) for gradient in gradients]) for part in problem.parts()], dim=1
    )


def derive_along(problem: Problem, direction: Gradient) -> Float[Tensor, " n"]:
    """Return the derivative of each record's objective along `direction`, 0 in parameters that it lacks."""
    with _dual_params(problem.params, direction) as duals:
        return _tangent(problem.objective_values(problem.outputs(duals)))


def outputs_along(problem: Problem, direction: Gradient) -> tuple[Outputs, Outputs]:
    """Return the policy's outputs for the records, and their derivatives along `direction`, shaped alike."""
    with _dual_params(problem.params, direction) as duals:
        outputs = problem.outputs(duals)
        return map_outputs(lambda column: fwAD.unpack_dual(column).primal, outputs), map_outputs(_tangent, outputs)


@contextmanager
def _dual_params(params: Params, direction: Params) -> Iterator[dict[str, Tensor]]:
    """Yield parameters that carry `direction`; derivatives have to be read inside."""
    with torch.enable_grad(), fwAD.dual_level(), _AsBackward(), warnings.catch_warnings():
        # torch scripts some decompositions when forward mode is first used.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        yield {
            name: fwAD.make_dual(p.detach(), direction[name]) if name in direction else p.detach()
            for name, p in params.items()
        }


def _tangent(value: Tensor) -> Tensor:
    primal, tangent = fwAD.unpack_dual(value)
    return torch.zeros_like(primal) if tangent is None else tangent.detach().clone()


class _AsBackward(TorchFunctionMode):
    """Leaves out of forward mode what a backward pass leaves out: all under `torch.no_grad()`, and padding tokens."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if not torch.is_grad_enabled():
            return tree_map_only(Tensor, _drop_tangent, output)
        return _leave_out_padding(output, *args, **(kwargs or {})) if func is F.embedding else output


def _leave_out_padding(
    output: Tensor, input: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any
) -> Tensor:
    if padding_idx is None:
        return output
    return torch.where((input == padding_idx % len(weight))[..., None], _drop_tangent(output), output)


def _drop_tangent(tensor: Tensor) -> Tensor:
    primal, tangent = fwAD.unpack_dual(tensor)
    return tensor if tangent is None else primal
