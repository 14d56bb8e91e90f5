"""The plain loop over records: the reference for the other engines."""

import torch
from jaxtyping import Float
from torch import Tensor

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
            columns.append(torch.stack([_multiply(gradient, of_record, problem) for gradient in gradients]))
    return torch.stack(columns, dim=1)


def record_gradient(problem: Problem, position: int) -> Gradient:
    """Return the gradient of one record's objective."""
    record = problem.part(slice(position, position + 1))
    value = record.objective_values(record.outputs()).sum()
    if not value.requires_grad:
        return {}
    derivatives = torch.autograd.grad(value, list(problem.params.values()), allow_unused=True)
    return {name: tensor for name, tensor in zip(problem.params, derivatives, strict=True) if tensor is not None}


def _multiply(one: Gradient, other: Gradient, problem: Problem) -> Tensor:
    like = next(iter(problem.params.values()))
    products = [(one[name] * other[name]).sum() for name in one.keys() & other.keys()]
    return torch.stack(products).sum() if products else like.new_zeros(())
