"""The plain loop over records: the truth that the other engines are held against."""

import torch
from jaxtyping import Float
from torch import Tensor

from whence.engines.problem import Gradient, Problem, plain_target_gradient, target_gradients


def loop(problem: Problem) -> Float[Tensor, "targets n"]:
    """Differentiate every record on its own and multiply: n forward and backward passes of one record."""
    if len(problem.records) <= problem.chunk_size:
        gradients = [plain_target_gradient(problem, target) for target in problem.targets]
    else:
        gradients = target_gradients(problem)
    columns = []
    for part in problem.parts():
        part.inputs  # noqa: B018  # prepared once for the part, not record by record
        for position in range(len(part.records)):
            own = record_gradient(part, position)
            columns.append(torch.stack([_product(gradient, own, problem) for gradient in gradients]))
    return torch.stack(columns, dim=1)


def record_gradient(problem: Problem, position: int) -> Gradient:
    """Return the gradient of one record's objective."""
    one = problem.part(slice(position, position + 1))
    value = one.objective_values(one.outputs()).sum()
    if not value.requires_grad:
        return {}
    found = torch.autograd.grad(value, list(problem.params.values()), allow_unused=True)
    return {name: tensor for name, tensor in zip(problem.params, found, strict=True) if tensor is not None}


def _product(one: Gradient, other: Gradient, problem: Problem) -> Tensor:
    dtype = next(iter(problem.params.values()))
    shared = [(one[name] * other[name]).sum() for name in one.keys() & other.keys()]
    return torch.stack(shared).sum() if shared else dtype.new_zeros(())
