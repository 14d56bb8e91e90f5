"""Forward-mode differentiation: the objective's derivative along the target's gradient, all records at once."""

import warnings
from collections.abc import Callable, Collection

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Float
from torch import Tensor

from whence.engines.problem import Gradient, Problem, target_gradients
from whence.policies import Params


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
    chosen = {name: direction[name] for name in names}
    return along_direction(lambda params: problem.objective_values(problem.outputs(params)), problem.params, chosen)


def along_direction(
    function: Callable[[dict[str, Tensor]], Float[Tensor, " n"]], params: Params, direction: Params
) -> Float[Tensor, " n"]:
    """Return the derivative of a function of parameters along a direction; what is not in `direction` stays put."""
    with torch.no_grad(), fwAD.dual_level(), warnings.catch_warnings():
        # torch scripts decompositions of its own when forward mode is first used.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        duals = {
            name: fwAD.make_dual(p.detach(), direction[name]) if name in direction else p.detach()
            for name, p in params.items()
        }
        primal, tangent = fwAD.unpack_dual(function(duals))
        return torch.zeros_like(primal) if tangent is None else tangent.clone()
