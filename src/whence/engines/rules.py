"""Per-layer rules of the ghost engine: what a layer's parameters do to its output, and back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.linalg import vecdot
from torch.nn.grad import conv2d_weight

Own: TypeAlias = dict[str, Tensor]
"""Tensors by a layer's own parameter names ("weight", "bias")."""


@dataclass(frozen=True)
class LayerRule:
    """How a layer that is linear in its parameters takes part in per-record products.

    `x` is the layer's input and `g` the gradient of something in its output, both with n records first.

    Attributes:
        product: `product(layer, direction, x, g)` is, for each record, the product of its gradient in the layer's
            parameters with `direction`, (n,): the record's `g` times the change of its output when the parameters
            move along `direction`. `direction` may lack a parameter, which then counts as zero.
        gradient: `gradient(layer, x, g, weights)` is the sum of the records' gradients in the layer's parameters,
            each times its weight, (n,).
    """

    product: Callable[[Any, Own, Tensor, Tensor], Tensor]
    gradient: Callable[[Any, Tensor, Tensor, Tensor], Own]


_RULES: dict[type[nn.Module], LayerRule] = {}


def register_rule(layer_type: type[nn.Module], rule: LayerRule) -> None:
    """Let the ghost engine cover layers of this type (and subclasses that keep its `forward`)."""
    _RULES[layer_type] = rule


def rule_for(layer: nn.Module) -> LayerRule | None:
    """Return the rule of a layer; a subclass with a `forward` of its own has none until it is registered."""
    for base in type(layer).__mro__:
        if base in _RULES:
            return _RULES[base] if type(layer).forward is base.forward else None
    return None


def ruled_types() -> list[str]:
    """Name the layer types that have a rule."""
    return sorted(layer_type.__name__ for layer_type in _RULES)


def _linear_product(layer: nn.Linear, direction: Own, x: Tensor, g: Tensor) -> Tensor:
    weight, bias = direction.get("weight"), direction.get("bias")
    # Whichever side leaves the smaller matrix.
    if weight is not None and weight.shape[0] <= weight.shape[1]:
        product = vecdot(g, nn.functional.linear(x, weight, bias))
    else:
        product = g.new_zeros(g.shape[:-1]) if bias is None else g @ bias
        if weight is not None:
            product += vecdot(g @ weight, x)
    total: Tensor = product.reshape(len(g), -1).sum(1) if product.ndim > 1 else product
    return total


def _linear_gradient(layer: nn.Linear, x: Tensor, g: Tensor, weights: Tensor) -> Own:
    by_row = weights.reshape(-1, *[1] * (g.ndim - 1))
    if x.shape[-1] < g.shape[-1]:
        weight = _rows(g).mT @ _rows(x * by_row)
        bias = _rows(g).mT @ by_row.expand(*g.shape[:-1], 1).reshape(-1)
    else:
        weighted = _rows(g * by_row)
        weight, bias = weighted.mT @ _rows(x), weighted.sum(0)
    return {"weight": weight} if layer.bias is None else {"weight": weight, "bias": bias}


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _conv2d_product(layer: nn.Conv2d, direction: Own, x: Tensor, g: Tensor) -> Tensor:
    weight = direction.get("weight")
    if weight is None:
        weight = torch.zeros_like(layer.weight)
    # The layer's own arithmetic (padding modes, stride, dilation, groups) with other parameters in their place.
    change = layer._conv_forward(x, weight, direction.get("bias"))
    product: Tensor = vecdot(g.flatten(1), change.flatten(1))
    return product


def _conv2d_gradient(layer: nn.Conv2d, x: Tensor, g: Tensor, weights: Tensor) -> Own:
    padding: Any = layer.padding
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x, padding = nn.functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode), 0
    if x[0].numel() < g[0].numel():
        x, bias = x * weights[:, None, None, None], weights @ g.sum((2, 3))
    else:
        g = g * weights[:, None, None, None]
        bias = g.sum((0, 2, 3))
    weight = conv2d_weight(x, list(layer.weight.shape), g, layer.stride, padding, layer.dilation, layer.groups)
    return {"weight": weight} if layer.bias is None else {"weight": weight, "bias": bias}


register_rule(nn.Linear, LayerRule(_linear_product, _linear_gradient))
register_rule(nn.Conv2d, LayerRule(_conv2d_product, _conv2d_gradient))
