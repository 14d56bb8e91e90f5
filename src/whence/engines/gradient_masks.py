"""Masks that hooks on parameters lay over gradients: the parts that training does not move."""

from collections.abc import Mapping

import torch
from torch import Tensor

from whence.core import Unsupported
from whence.engines.problem import Gradient, Summed
from whence.engines.shards import is_in_shards


def add_masks(parameters: Mapping[str, Tensor], summed: Summed | None) -> Summed | None:
    """Return `summed` followed by the masks that hooks on parameters lay over gradients; None if there is neither.

    A mask may as well be laid over the target's gradient: it takes the same part out of every product.

    Raises:
        Unsupported: a hook changes gradients in another way.
    """
    masks = {name: mask for name, each in parameters.items() if (mask := _read_mask(name, each)) is not None}
    if not masks:
        return summed

    def apply(gradient: Gradient) -> Gradient:
        whole = gradient if summed is None else summed(gradient)
        return {name: tensor * masks[name] if name in masks else tensor for name, tensor in whole.items()}

    return apply


def _read_mask(name: str, parameter: Tensor) -> Tensor | None:
    """Return what hooks on a parameter make of a gradient of ones; None if they leave gradients as they are."""
    hooks = list((parameter._backward_hooks or {}).values())
    if not hooks or is_in_shards([parameter]):
        return None

    def run(gradient: Tensor) -> Tensor:
        for hook in hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    mask = run(torch.ones_like(parameter))
    if torch.equal(mask, torch.ones_like(parameter)):
        return None
    other = torch.linspace(-1, 2, parameter.numel(), dtype=parameter.dtype, device=parameter.device).view_as(parameter)
    if not torch.allclose(run(other.clone()), other * mask, rtol=1e-4, atol=1e-6):
        raise Unsupported(
            f"A hook on the parameter `{name}` changes its gradient, and not by a factor for each number. So the "
            "gradient of a minibatch is no sum over its records. Remove the hook while records are scored."
        )
    return mask
