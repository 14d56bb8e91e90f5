"""Per-record gradients by vectorised reverse mode, then their products: many records a pass, much memory."""

import warnings
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad
from torch.func import vmap as over_records

from whence.engines.problem import Gradient, Problem, target_gradients
from whence.policies import Params
from whence.records import Tree, map_tree


def vmap(problem: Problem) -> Float[Tensor, "targets n"]:
    """Return the products from per-record gradients, materialised for as many records as a part holds.

    Needs kernels that torch.func can batch; it raises RuntimeError for those it cannot.
    """
    gradients = target_gradients(problem)
    return torch.cat([_products(part, gradients) for part in problem.parts()], dim=1)


def _products(problem: Problem, gradients: list[Gradient]) -> Tensor:
    def value(params: Params, inputs: Tree, columns: dict[str, Tree]) -> Tensor:
        record = problem.prepared.with_columns(map_tree(_alone, columns))
        one = replace(problem, records=record, prepared=record, known_inputs=map_tree(_alone, inputs))
        return one.objective_values(one.outputs(params)).sum()

    params = {name: parameter.detach() for name, parameter in problem.params.items()}
    with warnings.catch_warnings():
        # Kernels without a batching rule run record by record: slower, and still what was asked for.
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
        own = over_records(grad(value), in_dims=(None, 0, 0))(params, problem.inputs, problem.prepared.columns)
    with torch.no_grad():
        return torch.stack([_product(gradient, own) for gradient in gradients])


def _alone(tensor: Tensor) -> Tensor:
    return tensor[None]


def _product(gradient: Gradient, own: dict[str, Tensor]) -> Tensor:
    products = [own[name].reshape(len(own[name]), -1) @ direction.flatten() for name, direction in gradient.items()]
    return torch.stack(products).sum(0)
