"""Forward-mode differentiation: the objective's derivative along the target's gradient, all records at once."""

from collections.abc import Collection
from dataclasses import replace

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Float
from torch import Tensor

from whence.engines.problem import Gradient, Problem, target_gradients


def forward(problem: Problem) -> Float[Tensor, "targets n"]:
    """Return `d/de objective_i(params + e grad target)`, which is the product sought, for any architecture.

    Needs kernels that know forward mode; torch raises NotImplementedError for those that do not. Memory of a
    forward pass.
    """
    gradients = target_gradients(problem)
    return torch.cat(
        [torch.stack([directional(problem, gradient, chunk) for gradient in gradients]) for chunk in problem.chunks()],
        dim=1,
    )


def directional(
    problem: Problem, direction: Gradient, chunk: slice, *, along: Collection[str] | None = None
) -> Float[Tensor, " chunk"]:
    """Return each record's derivative along `direction`, restricted to the parameters `along`, on one chunk."""
    names = direction.keys() if along is None else direction.keys() & along
    with torch.no_grad(), fwAD.dual_level():
        params = {
            name: fwAD.make_dual(p.detach(), direction[name]) if name in names else p.detach()
            for name, p in problem.params.items()
        }
        dual = replace(problem, params=params)
        values = dual.objective_values(dual.outputs(chunk), chunk)
        primal, tangent = fwAD.unpack_dual(values)
        return torch.zeros_like(primal) if tangent is None else tangent.clone()
