"""Forward-mode differentiation: the objective's derivative along the target's gradient, all records at once."""

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Float
from torch import Tensor

from whence.core import Outputs, Params
from whence.engines.problem import Gradient, Problem, map_outputs, target_gradients


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
    with _dual_params(params, direction) as duals:
        return _tangent(function(duals))


def outputs_along(problem: Problem, direction: Gradient) -> tuple[Outputs, Outputs]:
    """Return the policy's outputs for the records, and their derivatives along `direction`, shaped alike."""
    with _dual_params(problem.params, direction) as duals:
        outputs = problem.outputs(duals)
        return map_outputs(lambda column: fwAD.unpack_dual(column).primal, outputs), map_outputs(_tangent, outputs)


@contextmanager
def _dual_params(params: Params, direction: Params) -> Iterator[dict[str, Tensor]]:
    """Yield parameters that carry `direction`; derivatives have to be read inside."""
    with torch.no_grad(), fwAD.dual_level(), warnings.catch_warnings():
        # torch scripts some decompositions when forward mode is first used.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        yield {
            name: fwAD.make_dual(p.detach(), direction[name]) if name in direction else p.detach()
            for name, p in params.items()
        }


def _tangent(value: Tensor) -> Tensor:
    primal, tangent = fwAD.unpack_dual(value)
    return torch.zeros_like(primal) if tangent is None else tangent.clone()
