"""Per-layer rules of the ghost engine: products and gradients from a layer's input and output gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.linalg import vecdot
from torch.nn.grad import conv1d_weight, conv2d_weight
from torch.nn.modules.batchnorm import _BatchNorm

from whence.engines.parameters import whole_shape

LayerTensors: TypeAlias = dict[str, Tensor]
"""Tensors by the layer's names of its parameters ("weight", "bias")."""

_Norm: TypeAlias = nn.LayerNorm | nn.GroupNorm | _BatchNorm


@dataclass(frozen=True)
class LayerRule:
    """How to compute per-record products for a layer that is linear in its parameters.

    `x` is the layer's input and `g` the gradient of a quantity in the layer's output; the first axis of both is the
    records', of length n.

    Attributes:
        product: `product(layer, direction, x, g)` returns, for each record, the product of its gradient in the layer's
            parameters with `direction`, (n,): the record's `g` times the change of its output along `direction`. A
            parameter that `direction` lacks counts as zero.
        gradient: `gradient(layer, x, g, weights)` returns the sum of the records' gradients in the layer's parameters,
            each multiplied by its weight; weights are (n,), or None: all 1.
        covers: `covers(layer)` returns whether the rule holds for this layer.
        parameters: names of the parameters that the rule knows; None: all. A layer with others, such as weight
            normalisation and pruning leave behind, is not covered.
    """

    product: Callable[[Any, LayerTensors, Tensor, Tensor], Tensor]
    gradient: Callable[[Any, Tensor, Tensor, Tensor | None], LayerTensors]
    covers: Callable[[Any], bool] = lambda layer: True
    parameters: frozenset[str] | None = None


_RULES: dict[type[nn.Module], LayerRule] = {}


def register_rule(layer_type: type[nn.Module], rule: LayerRule) -> None:
    """Add a rule for layers of this type, and of subclasses that keep its `forward`."""
    _RULES[layer_type] = rule


def rule_for(layer: nn.Module) -> LayerRule | None:
    """Return the rule for a layer, or None. A subclass that overrides `forward` needs a rule registered for it."""
    for base in type(layer).__mro__:
        if base in _RULES:
            rule = _RULES[base]
            overridden = type(layer).forward is not base.forward or "forward" in vars(layer)
            known = rule.parameters is None or layer._parameters.keys() <= rule.parameters
            return rule if known and not overridden and rule.covers(layer) else None
    return None


def ruled_types() -> list[str]:
    """Return the names of the layer types that have a rule, sorted."""
    return sorted(layer_type.__name__.lstrip("_") for layer_type in _RULES)


def linear_product(layer: nn.Module, direction: LayerTensors, x: Tensor, g: Tensor) -> Tensor:
    """Return the products of a linear layer, (n,); the direction's weight has shape (out, in)."""
    weight, bias = direction.get("weight"), direction.get("bias")
    # Multiply on the side that gives the smaller matrix.
    if weight is not None and weight.shape[0] <= weight.shape[1]:
        product = dot(g, nn.functional.linear(x, weight, bias))
    else:
        product = g.new_zeros(g.shape[:-1]) if bias is None else g @ bias
        if weight is not None:
            product = product + dot(g @ weight, x)
    total: Tensor = product.reshape(len(g), -1).sum(1) if product.ndim > 1 else product
    return total


def linear_gradient(layer: nn.Module, x: Tensor, g: Tensor, weights: Tensor | None) -> LayerTensors:
    """Return the weighted gradient of a linear layer; the weight's has shape (out, in)."""
    if weights is not None and x.shape[-1] < g.shape[-1]:
        weight = _as_rows(g).mT @ _as_rows(weigh(x, weights))
        bias = _as_rows(g).mT @ weights.reshape(-1, *[1] * (g.ndim - 1)).expand(*g.shape[:-1], 1).reshape(-1)
    else:
        weighted = _as_rows(weigh(g, weights))
        weight, bias = weighted.mT @ _as_rows(x), weighted.sum(0)
    return {"weight": weight} if layer.bias is None else {"weight": weight, "bias": bias}


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the products over the last axis, summed in single precision at least."""
    if a.dtype in (torch.bfloat16, torch.float16):
        a, b = a.float(), b.float()
    product: Tensor = vecdot(a, b)
    return product


def weigh(g: Tensor, weights: Tensor | None) -> Tensor:
    """Return records' tensors, each multiplied by its weight; None: all 1."""
    return g if weights is None else g * weights.reshape(-1, *[1] * (g.ndim - 1))


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _conv_product(layer: nn.Conv1d | nn.Conv2d, direction: LayerTensors, x: Tensor, g: Tensor) -> Tensor:
    weight = direction.get("weight")
    if weight is None:
        weight = torch.zeros_like(layer.weight)
    # The layer's own arithmetic (padding modes, stride, dilation, groups), with the direction as parameters.
    change = layer._conv_forward(x, weight, direction.get("bias"))
    return dot(g.flatten(1), change.flatten(1))


def _conv_gradient(layer: nn.Conv1d | nn.Conv2d, x: Tensor, g: Tensor, weights: Tensor | None) -> LayerTensors:
    padding: Any = layer.padding
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x, padding = nn.functional.pad(x, layer._reversed_padding_repeated_twice, mode=mode), 0
    if weights is not None and x[0].numel() < g[0].numel():
        x, bias = weigh(x, weights), weights @ g.flatten(2).sum(2)
    else:
        g = weigh(g, weights)
        bias = g.flatten(2).sum((0, 2))
    conv_weight: Any = conv1d_weight if isinstance(layer, nn.Conv1d) else conv2d_weight
    weight = conv_weight(x, list(whole_shape(layer.weight)), g, layer.stride, padding, layer.dilation, layer.groups)
    return {"weight": weight} if layer.bias is None else {"weight": weight, "bias": bias}


def _embedding_product(layer: nn.Embedding, direction: LayerTensors, x: Tensor, g: Tensor) -> Tensor:
    return dot(_mask_padding(layer, x, g).flatten(1), direction["weight"][x].flatten(1))


def _embedding_gradient(layer: nn.Embedding, x: Tensor, g: Tensor, weights: Tensor | None) -> LayerTensors:
    g = weigh(_mask_padding(layer, x, g), weights)
    return {"weight": g.new_zeros(whole_shape(layer.weight)).index_add_(0, x.reshape(-1), _as_rows(g))}


def _mask_padding(layer: nn.Embedding, x: Tensor, g: Tensor) -> Tensor:
    # The padding entry has no gradient.
    return g if layer.padding_idx is None else g * (x != layer.padding_idx)[..., None]


def _is_plain_embedding(layer: nn.Embedding) -> bool:
    return layer.max_norm is None and not layer.sparse  # the call rewrites the weight; such gradients cannot be added


def _norm_product(layer: _Norm, direction: LayerTensors, x: Tensor, g: Tensor) -> Tensor:
    normalised, lead = _normalise(layer, x)
    total = g.new_zeros(len(g))
    if "weight" in direction:
        total = total + dot((g * normalised).flatten(1), _spread(direction["weight"], g, lead))
    if "bias" in direction:
        total = total + dot(g.flatten(1), _spread(direction["bias"], g, lead))
    return total


def _norm_gradient(layer: _Norm, x: Tensor, g: Tensor, weights: Tensor | None) -> LayerTensors:
    g = weigh(g, weights)
    (normalised, lead), shape = _normalise(layer, x), whole_shape(layer.weight)
    axes = [axis for axis in range(1, g.ndim) if not lead <= axis < lead + len(shape)]
    by_record = (tensor.sum(axes) if axes else tensor for tensor in (g * normalised, g))
    weight, bias = (tensor.flatten(1).sum(0).reshape(shape) for tensor in by_record)
    return {"weight": weight, "bias": bias}


def _normalise(layer: _Norm, x: Tensor) -> tuple[Tensor, int]:
    """Return the normalised input before scale and shift, and the first axis of scale and shift."""
    if isinstance(layer, _BatchNorm):
        return nn.functional.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps), 1
    if isinstance(layer, nn.GroupNorm):
        return nn.functional.group_norm(x, layer.num_groups, eps=layer.eps), 1
    return nn.functional.layer_norm(x, layer.normalized_shape, eps=layer.eps), x.ndim - len(whole_shape(layer.weight))


def _has_constant_statistics(layer: _BatchNorm) -> bool:
    return not layer.training and layer.running_mean is not None


def _spread(parameter: Tensor, g: Tensor, lead: int) -> Tensor:
    """Expand a scale or shift to all records, flattened like `g.flatten(1)`."""
    trailing = [1] * (g.ndim - lead - parameter.ndim)
    return parameter.reshape(*parameter.shape, *trailing).expand(g.shape).flatten(1)


_WEIGHT_AND_BIAS = frozenset(["weight", "bias"])
_rule = partial(LayerRule, parameters=_WEIGHT_AND_BIAS)
_norm = partial(_rule, _norm_product, _norm_gradient)
register_rule(nn.Linear, _rule(linear_product, linear_gradient))
register_rule(nn.Conv1d, _rule(_conv_product, _conv_gradient))
register_rule(nn.Conv2d, _rule(_conv_product, _conv_gradient))
register_rule(nn.Embedding, _rule(_embedding_product, _embedding_gradient, _is_plain_embedding))
register_rule(nn.LayerNorm, _norm())
register_rule(nn.GroupNorm, _norm())
register_rule(_BatchNorm, _norm(covers=_has_constant_statistics))
