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
    """Return the products as `d/de objective_i(params + e grad target)`, for any architecture.

    It takes the memory of a forward pass.

    Raises:
        NotImplementedError: torch has no forward mode for a kernel.
    """
    gradients = target_gradients(problem)
    return torch.cat(
        [torch.stack([derive_along(part, gradient) for gradient in gradients]) for part in problem.parts()], dim=1
    )


def derive_along(problem: Problem, direction: Gradient, *, only: Collection[str] | None = None) -> Float[Tensor, " n"]:
    """Return the derivative of each record's objective along `direction`, restricted to the parameters in `only`."""
    names = direction.keys() if only is None else direction.keys() & only
    restricted = {name: direction[name] for name in names}
    return along_direction(lambda params: problem.objective_values(problem.outputs(params)), problem.params, restricted)


def along_direction(
    function: Callable[[dict[str, Tensor]], Float[Tensor, " n"]], params: Params, direction: Params
) -> Float[Tensor, " n"]:
    """Return the derivative of a function of parameters along `direction`; parameters not in it stay constant."""
    with torch.no_grad(), fwAD.dual_level(), warnings.catch_warnings():
        # torch scripts some decompositions when forward mode is first used.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        duals = {
            name: fwAD.make_dual(p.detach(), direction[name]) if name in direction else p.detach()
            for name, p in params.items()
        }
        primal, tangent = fwAD.unpack_dual(function(duals))
        return torch.zeros_like(primal) if tangent is None else tangent.clone()
