"""Square roots and divisions that stay differentiable, under `vmap` too, where their argument is 0."""

import torch
from torch import Tensor


def safe_sqrt(squares: Tensor) -> Tensor:
    """Return the root of numbers that are not negative; its derivative at 0 is 0, where that of `sqrt` is infinite."""
    positive = squares > 0
    return torch.where(positive, torch.where(positive, squares, 1.0).sqrt(), 0.0)


def safe_divisor(total: Tensor) -> Tensor:
    """Return a total to divide by: 1 instead of 0."""
    return torch.where(total > 0, total, 1.0)
