"""Rules of the ghost engine for layers of Transformers: GPT-2's Conv1D, norms that scale, scaled embeddings."""

from typing import Any

import torch
from torch import Tensor, nn

from whence.core import Unsupported
from whence.engines import LayerRule, LayerTensors, dot, linear_product, register_rule, rule_for, weigh, whole_shape


def register_rules(model: nn.Module) -> None:
    """Let the ghost engine cover a model's `Conv1D` (GPT-2), scaled embeddings (Gemma), and norms that are scales."""
    for layer in {type(layer): layer for layer in model.modules() if "weight" in layer._parameters}.values():
        if rule_for(layer) is not None:
            continue
        if type(layer).__name__.endswith(("RMSNorm", "LayerNorm")) and is_scale(layer):
            register_rmsnorm(type(layer))
        elif isinstance(layer, nn.Embedding) and _read_scale(layer) is not None:
            register_rule(type(layer), _make_scaled_embedding_rule())
        elif type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils":
            register_rule(type(layer), LayerRule(_conv1d_product, _conv1d_gradient, parameters=_CONV1D_PARAMETERS))


_CONV1D_PARAMETERS = frozenset(["weight", "bias"])


def register_rmsnorm(layer_type: type[nn.Module]) -> None:
    """Let the ghost engine cover a norm that scales its normalised input, entry by entry, by a single `weight`.

    `language_view` registers the types whose name ends in RMSNorm or LayerNorm. Each layer is checked before its rule
    is used; a layer that uses its weight in another way is refused.

    Args:
        layer_type: a module type; its output may also be `(1 + weight)` times the normalised input, as Gemma's.

    Raises:
        Unsupported: `layer_type` is not a module type.
    """
    if not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise Unsupported(f"register_rmsnorm() got {layer_type!r}; pass the layer's type: type(layer).")
    register_rule(layer_type, LayerRule(_scale_product, _scale_gradient, is_scale, frozenset(["weight"])))


def is_scale(layer: Any) -> bool:
    """Tell whether a layer's output has the form `weight * f(input) + g(input)`, entry by entry."""
    weight = layer._parameters.get("weight")
    if weight is None or len(shape := whole_shape(weight)) != 1 or len(layer._parameters) != 1:
        return False
    x = torch.linspace(-1, 2, 2 * shape[0], device=weight.device, dtype=weight.dtype).reshape(2, -1)
    other = torch.linspace(0.5, -2, shape[0], device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        try:
            difference = _run_with_weight(layer, other, x) - _run_with_weight(layer, torch.zeros_like(other), x)
            expected = other * _normalise(layer, x)
        except (RuntimeError, TypeError, AttributeError):
            return False
    tolerance = 8 * torch.finfo(weight.dtype).eps * float(expected.abs().max())
    return difference.shape == x.shape and bool(((difference - expected).abs() <= tolerance).all())


def _normalise(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the normalised input that a norm multiplies by its weight: the change in output per unit of weight."""
    weight: Any = layer.weight
    # Not `ones_like`: of a weight in shards that would be in shards, too.
    one, zero = (torch.full(whole_shape(weight), value, dtype=weight.dtype, device=x.device) for value in (1.0, 0.0))
    return _run_with_weight(layer, one, x) - _run_with_weight(layer, zero, x)


def _run_with_weight(layer: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    """Return the layer's output for another weight, without running hooks."""
    other: Any = object.__new__(type(layer))  # copy.copy() of a layer that FSDP2 wraps makes one of another class
    other.__dict__.update(vars(layer), _parameters={"weight": weight})
    output: Tensor = other.forward(x)
    return output


def _scale_product(layer: nn.Module, direction: LayerTensors, x: Tensor, g: Tensor) -> Tensor:
    return dot(g.flatten(1), (_normalise(layer, x) * direction["weight"]).flatten(1))


def _scale_gradient(layer: nn.Module, x: Tensor, g: Tensor, weights: Tensor | None) -> LayerTensors:
    return {"weight": (weigh(g, weights) * _normalise(layer, x)).flatten(0, -2).sum(0)}


def _make_scaled_embedding_rule() -> LayerRule:
    plain: Any = rule_for(nn.Embedding(1, 1, _weight=torch.zeros(1, 1)))  # with a weight of its own it would draw one
    return LayerRule(
        lambda layer, direction, x, g: plain.product(layer, direction, x, g * _read_scale(layer)),
        lambda layer, x, g, weights: plain.gradient(layer, x, g * _read_scale(layer), weights),
        lambda layer: plain.covers(layer) and _read_scale(layer) is not None,
        frozenset(["weight"]),
    )


def _read_scale(layer: nn.Module) -> Any:
    """Return the number by which an embedding multiplies its rows, as Gemma's, a scalar; None: it does otherwise."""
    weight: Any = layer.weight
    count, width = whole_shape(weight)
    rows = torch.arange(1, count + 1, device=weight.device).to(weight.dtype)[:, None].expand(count, width)
    ids = torch.tensor([[0, count - 1]], device=weight.device)
    with torch.no_grad():
        try:
            output = _run_with_weight(layer, rows, ids)
        except (RuntimeError, TypeError, AttributeError, IndexError):
            return None
        is_scaled = output.shape == (1, 2, width) and torch.allclose(output, output[0, 0, 0] * rows[ids], rtol=1e-2)
    return output[0, 0, 0] if is_scaled else None


def _conv1d_product(layer: Any, direction: LayerTensors, x: Tensor, g: Tensor) -> Tensor:
    # A linear layer with its weight transposed.
    transposed = {name: tensor.t() if name == "weight" else tensor for name, tensor in direction.items()}
    return linear_product(layer, transposed, x, g)


def _conv1d_gradient(layer: Any, x: Tensor, g: Tensor, weights: Tensor | None) -> LayerTensors:
    g = weigh(g, weights).flatten(0, -2)
    return {"weight": x.flatten(0, -2).mT @ g, "bias": g.sum(0)}
