"""Per-layer rules of the ghost engine: what a layer's parameters do to its output, and back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.linalg import vecdot
from torch.nn.grad import conv1d_weight, conv2d_weight
from torch.nn.modules.batchnorm import _BatchNorm

Own: TypeAlias = dict[str, Tensor]
"""Tensors by a layer's own parameter names ("weight", "bias")."""

_Norm: TypeAlias = nn.LayerNorm | nn.GroupNorm | _BatchNorm


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
        covers: whether the rule holds for this very layer.
        parameters: the layer's own parameters that the rule knows, None: all it has. A layer that holds others, as
            weight normalisation and pruning leave them, is not covered.
    """

    product: Callable[[Any, Own, Tensor, Tensor], Tensor]
    gradient: Callable[[Any, Tensor, Tensor, Tensor], Own]
    covers: Callable[[Any], bool] = lambda layer: True
    parameters: frozenset[str] | None = None


_RULES: dict[type[nn.Module], LayerRule] = {}


def register_rule(layer_type: type[nn.Module], rule: LayerRule) -> None:
    """Let the ghost engine cover layers of this type (and subclasses that keep its `forward`)."""
    _RULES[layer_type] = rule


def rule_for(layer: nn.Module) -> LayerRule | None:
    """Return the rule that holds for a layer; a subclass with a `forward` of its own has none until registered."""
    for base in type(layer).__mro__:
        if base in _RULES:
            rule = _RULES[base]
            own_forward = type(layer).forward is not base.forward or "forward" in vars(layer)
            known = rule.parameters is None or layer._parameters.keys() <= rule.parameters
            return rule if known and not own_forward and rule.covers(layer) else None
    return None


def ruled_types() -> list[str]:
    """Name the layer types that have a rule."""
    return sorted(layer_type.__name__.lstrip("_") for layer_type in _RULES)


def linear_product(layer: nn.Module, direction: Own, x: Tensor, g: Tensor) -> Tensor:
    """Return the products of a linear layer, whose direction's weight is (out, in)."""
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


def linear_gradient(layer: nn.Module, x: Tensor, g: Tensor, weights: Tensor) -> Own:
    """Return the weighted gradient of a linear layer, its weight as (out, in)."""
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


def _conv_product(layer: nn.Conv1d | nn.Conv2d, direction: Own, x: Tensor, g: Tensor) -> Tensor:
    weight = direction.get("weight")
    if weight is None:
        weight = torch.zeros_like(layer.weight)
    # The layer's own arithmetic (padding modes, stride, dilation, groups) with other parameters in their place.
    change = layer._conv_forward(x, weight, direction.get("bias"))
    product: Tensor = vecdot(g.flatten(1), change.flatten(1))
    return product


def _conv_gradient(layer: nn.Conv1d | nn.Conv2d, x: Tensor, g: Tensor, weights: Tensor) -> Own:
    padding: Any = layer.padding
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x, padding = nn.functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode), 0
    by_record = weights.reshape(-1, *[1] * (g.ndim - 1))
    if x[0].numel() < g[0].numel():
        x, bias = x * by_record, weights @ g.flatten(2).sum(2)
    else:
        g = g * by_record
        bias = g.flatten(2).sum((0, 2))
    of_weight: Any = conv1d_weight if isinstance(layer, nn.Conv1d) else conv2d_weight
    weight = of_weight(x, list(layer.weight.shape), g, layer.stride, padding, layer.dilation, layer.groups)
    return {"weight": weight} if layer.bias is None else {"weight": weight, "bias": bias}


def _embedding_product(layer: nn.Embedding, direction: Own, x: Tensor, g: Tensor) -> Tensor:
    product: Tensor = vecdot(_without_padding(layer, x, g).flatten(1), direction["weight"][x].flatten(1))
    return product


def _embedding_gradient(layer: nn.Embedding, x: Tensor, g: Tensor, weights: Tensor) -> Own:
    g = _without_padding(layer, x, g) * weights.reshape(-1, *[1] * (g.ndim - 1))
    return {"weight": g.new_zeros(layer.weight.shape).index_add_(0, x.reshape(-1), _rows(g))}


def _without_padding(layer: nn.Embedding, x: Tensor, g: Tensor) -> Tensor:
    # The padding entry takes no gradient.
    return g if layer.padding_idx is None else g * (x != layer.padding_idx)[..., None]


def _plain_embedding(layer: nn.Embedding) -> bool:
    # max_norm rewrites the weight while it runs, scale_grad_by_freq mixes records, sparse gradients do not add up here.
    return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse


def _norm_product(layer: _Norm, direction: Own, x: Tensor, g: Tensor) -> Tensor:
    normalised, lead = _normalised(layer, x)
    total = g.new_zeros(len(g))
    if "weight" in direction:
        total = total + vecdot((g * normalised).flatten(1), _spread(direction["weight"], g, lead))
    if "bias" in direction:
        total = total + vecdot(g.flatten(1), _spread(direction["bias"], g, lead))
    return total


def _norm_gradient(layer: _Norm, x: Tensor, g: Tensor, weights: Tensor) -> Own:
    normalised, lead = _normalised(layer, x)
    g = g * weights.reshape(-1, *[1] * (g.ndim - 1))
    axes = [axis for axis in range(g.ndim) if not lead <= axis < lead + layer.weight.ndim]
    return {"weight": (g * normalised).sum(axes), "bias": g.sum(axes)}


def _normalised(layer: _Norm, x: Tensor) -> tuple[Tensor, int]:
    """Return the input before scale and shift, and the axis at which these begin."""
    if isinstance(layer, _BatchNorm):
        return nn.functional.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps), 1
    if isinstance(layer, nn.GroupNorm):
        return nn.functional.group_norm(x, layer.num_groups, eps=layer.eps), 1
    return nn.functional.layer_norm(x, layer.normalized_shape, eps=layer.eps), x.ndim - layer.weight.ndim


def _constant_statistics(layer: _BatchNorm) -> bool:
    return not layer.training and layer.running_mean is not None


def _spread(parameter: Tensor, g: Tensor, lead: int) -> Tensor:
    """Expand a scale or shift to the records, flattened as `g.flatten(1)` is."""
    trailing = [1] * (g.ndim - lead - parameter.ndim)
    return parameter.reshape(*parameter.shape, *trailing).expand(g.shape).flatten(1)


_OWN = frozenset(["weight", "bias"])
register_rule(nn.Linear, LayerRule(linear_product, linear_gradient, parameters=_OWN))
register_rule(nn.Conv1d, LayerRule(_conv_product, _conv_gradient, parameters=_OWN))
register_rule(nn.Conv2d, LayerRule(_conv_product, _conv_gradient, parameters=_OWN))
register_rule(nn.Embedding, LayerRule(_embedding_product, _embedding_gradient, _plain_embedding, _OWN))
register_rule(nn.LayerNorm, LayerRule(_norm_product, _norm_gradient, parameters=_OWN))
register_rule(nn.GroupNorm, LayerRule(_norm_product, _norm_gradient, parameters=_OWN))
register_rule(_BatchNorm, LayerRule(_norm_product, _norm_gradient, _constant_statistics, _OWN))
