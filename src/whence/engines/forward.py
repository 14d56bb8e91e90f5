"""Forward-mode differentiation: the objective's derivative along the target's gradient, all records at once."""

import warnings
from collections.abc import Collection

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
        [torch.stack([directional(part, gradient) for gradient in gradients]) for part in problem.parts()], dim=1
    )


def directional(problem: Problem, direction: Gradient, *, along: Collection[str] | None = None) -> Float[Tensor, " n"]:
    """Return each record's derivative along `direction`, restricted to the parameters `along`."""
    names = direction.keys() if along is None else direction.keys() & along
    with torch.no_grad(), fwAD.dual_level(), warnings.catch_warnings():
        # torch scripts decompositions of its own when forward mode is first used.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        params = {
            name: fwAD.make_dual(p.detach(), direction[name]) if name in names else p.detach()
            for name, p in problem.params.items()
        }
        values = problem.objective_values(problem.outputs(params))
        primal, tangent = fwAD.unpack_dual(values)
        return torch.zeros_like(primal) if tangent is None else tangent.clone()
