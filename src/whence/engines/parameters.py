"""Parameters that need care: processes hold them in shards, or hooks mask their gradients.

FSDP2 turns a parameter into a `DTensor`, and a pass runs on other, whole tensors. DeepSpeed's ZeRO stage 3 keeps the
parameter, empties its data, and fills it while the layer runs; its shape is in `ds_shape`. FSDP's classes are looked
up, not imported: an import takes half a second, and before it no object of theirs exists.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from whence.core import Unsupported, register_placement
from whence.engines.problem import Gradient, Summed


def is_in_shards(parameters: Iterable[Tensor]) -> bool:
    """Tell whether processes hold any of the parameters in shards; a detached copy does not tell it of ZeRO-3."""
    sharded = _find_class("torch.distributed.tensor", "DTensor")
    return any(isinstance(parameter, sharded) or _is_zero(parameter) for parameter in parameters)


# A pass on shards puts a layer's whole parameters in place itself, as leaves of their own.
register_placement(is_in_shards)


def _find_class(module: str, name: str) -> type | tuple[()]:
    """Return a class; where its module was not imported, an empty tuple, of which nothing is an instance."""
    return getattr(sys.modules.get(module), name, ())


def _is_zero(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_status")


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of a whole parameter, of which this process may hold a shard."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def release_whole(modules: Iterable[nn.Module]) -> None:
    """Free whole parameters that modules keep after a pass, so that they hold their shards again.

    FSDP2 keeps those of the outermost module. ZeRO-3 keeps those of layers whose inputs need no gradient, such as
    embeddings; every process has to call this after the same passes.
    """
    whole: list[Any] = []
    wrapped = _find_class("torch.distributed.fsdp", "FSDPModule")
    for module in modules:
        if isinstance(module, wrapped):
            cast(Any, module).reshard()
        parameters: list[Any] = [p for p in module._parameters.values() if p is not None and _is_zero(p)]
        sharded = [p for p in parameters if not getattr(p, "ds_persist", False)]
        whole += [p for p in sharded if p.ds_status.name == "AVAILABLE"]
    if whole:
        for parameter in whole:
            parameter.ds_active_sub_modules.clear()  # the layers whose passes have not ended, as ZeRO sees it
        whole[0].partition(param_list=whole)


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
