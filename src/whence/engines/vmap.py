"""Products from per-record gradients by vectorised reverse mode: many records a pass, much memory."""

import warnings
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad
from torch.func import vmap as over_records

from whence.engines.problem import Gradient, Problem, target_gradients
from whence.policies import Params
from whence.trees import Tree, map_tree


def vmap(problem: Problem) -> Float[Tensor, "targets n"]:
    """Return the products from per-record gradients, which are materialised for a part of the records at a time.

    Raises:
        RuntimeError: torch.func cannot batch a kernel.
    """
    gradients = target_gradients(problem)
    return torch.cat([_compute_products(part, gradients) for part in problem.parts()], dim=1)


def _compute_products(problem: Problem, gradients: list[Gradient]) -> Tensor:
    def value(params: Params, inputs: Tree, columns: dict[str, Tree]) -> Tensor:
        record = problem.prepared.with_columns(map_tree(_add_record_axis, columns))
        alone = replace(problem, records=record, prepared=record, known_inputs=map_tree(_add_record_axis, inputs))
        return alone.objective_values(alone.outputs(params)).sum()

    params = {name: parameter.detach() for name, parameter in problem.params.items()}
    with warnings.catch_warnings():
        # Kernels without a batching rule run record by record: slower, with the same result.
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
        by_record = over_records(grad(value), in_dims=(None, 0, 0))(params, problem.inputs, problem.prepared.columns)
    with torch.no_grad():
        return torch.stack([_multiply(by_record, gradient) for gradient in gradients])


def _add_record_axis(tensor: Tensor) -> Tensor:
    return tensor[None]


def _multiply(by_record: dict[str, Tensor], gradient: Gradient) -> Tensor:
    """Return the products of per-record gradients, each (n, ...), with one gradient, (n,)."""
    products = [
        by_record[name].reshape(len(by_record[name]), -1) @ direction.flatten() for name, direction in gradient.items()
    ]
    return torch.stack(products).sum(0)
