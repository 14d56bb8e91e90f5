"""Engines that make each record's own gradient: a plain loop, the reference for the others, and vectorised."""

import warnings
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad
from torch.func import vmap as over_records

from whence.core import Params, Tree, map_tree
from whence.engines.problem import Gradient, Problem, plain_target_gradient, target_gradients


def loop(problem: Problem) -> Float[Tensor, "targets n"]:
    """Return the products from each record's own gradient: n forward and backward passes of one record."""
    if len(problem.records) <= problem.chunk_size:
        gradients = [plain_target_gradient(problem, target) for target in problem.targets]
    else:
        gradients = target_gradients(problem)
    columns = []
    for part in problem.parts():
        part.inputs  # noqa: B018  # prepare once for the part, not record by record
        for position in range(len(part.records)):
            of_record = record_gradient(part, position)
            columns.append(torch.stack([multiply(gradient, of_record, problem) for gradient in gradients]))
    return torch.stack(columns, dim=1)


def record_gradient(problem: Problem, position: int) -> Gradient:
    """Return the gradient of one record's objective."""
    record = problem.part(slice(position, position + 1))
    return differentiate(record.objective_values(record.outputs()).sum(), problem.params)


def differentiate(value: Tensor, params: Params, *, retain: bool = False) -> Gradient:
    """Return the gradient of a scalar in the parameters that it depends on; its graph may be retained."""
    if not value.requires_grad:
        return {}
    derivatives = torch.autograd.grad(value, list(params.values()), allow_unused=True, retain_graph=retain)
    return {name: tensor for name, tensor in zip(params, derivatives, strict=True) if tensor is not None}


def multiply(one: Gradient, other: Gradient, problem: Problem) -> Tensor:
    """Return the product of two gradients in the parameters of a problem."""
    # In the order of one of them: that of a set differs from process to process, and with it the last bit.
    products = [(tensor * other[name]).sum() for name, tensor in one.items() if name in other]
    return torch.stack(products).sum() if products else next(iter(problem.params.values())).new_zeros(())


def vmap(problem: Problem) -> Float[Tensor, "targets n"]:
    """Return the products from per-record gradients, many a pass: fast, with much memory, by torch.func."""
    gradients = target_gradients(problem)
    return torch.cat([_compute_products(part, gradients) for part in problem.parts()], dim=1)


def _compute_products(problem: Problem, gradients: list[Gradient]) -> Tensor:
    def value(params: Params, inputs: Tree, columns: dict[str, Tree]) -> Tensor:
        columns, inputs = (map_tree(lambda tensor: tensor[None], tree) for tree in (columns, inputs))
        record = problem.prepared.with_columns(columns)
        alone = replace(problem, records=record, prepared=record, known_inputs=inputs)
        return alone.objective_values(alone.outputs(params)).sum()

    params = {name: parameter.detach() for name, parameter in problem.params.items()}
    with warnings.catch_warnings():
        # Kernels without a batching rule run record by record: slower, with the same result.
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
        by_record = over_records(grad(value), in_dims=(None, 0, 0))(params, problem.inputs, problem.prepared.columns)
    rows = {name: gradient.reshape(len(gradient), -1) for name, gradient in by_record.items()}
    with torch.no_grad():
        products = [[rows[name] @ part.flatten() for name, part in gradient.items()] for gradient in gradients]
        return torch.stack([torch.stack(each).sum(0) for each in products])
