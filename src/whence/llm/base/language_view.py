"""The view of a causal language model: outputs at response tokens, and rules of the ghost engine for its layers.

The rules are for GPT-2's Conv1D, norms that scale, and scaled embeddings.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from whence.core import LazyOutputs, ModuleView, RecordBatch, Unsupported, WhenceError
from whence.engines import (
    LayerRule,
    LayerTensors,
    dot,
    is_in_shards,
    linear_product,
    register_rule,
    rule_for,
    weigh,
    whole_shape,
)
from whence.llm.base.models import accepts_argument

EXTRA_PADDING = "extra_padding"
"""The column of rows, (n,), of those that a trainer trains on without telling the model its positions.

The number of columns before a row that the trainer's own batch did not have. Where it is 0 for all rows, the model is
told no positions, either. Models that count positions by columns, such as GPT-2, count padding, too, from the first
column of that batch on.
"""

_COLUMN_POSITIONS = "column_positions"
"""Of the model's inputs: positions for models that count them by columns."""

_COUNTS_TOKENS: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Of each model that is told no positions, whether it counts them by the attention mask."""


def language_view(model: nn.Module, *, temperature: float = 1.0) -> ModuleView:
    """Return a view of a causal language model that reads the rows of `make_rows`.

    Its outputs are columns of response tokens, (n, R): `log_prob`, 0 where there is no response token; `value`, None if
    the model gives none; `entropy`. They are computed in single precision at least.

    Args:
        model: a causal language model of Transformers, whole or with a PEFT adapter, or a module that is called as
            `model(input_ids=..., attention_mask=..., position_ids=...)` and returns an object with `logits`
            (n, L, V) and, as `WithValueHead` does, `value` (n, L). Parameters with `requires_grad` are scored.
        temperature: the sampling temperature of the responses.

    Raises:
        WhenceError: the temperature is not above 0.
        Unsupported: the model uses flex_attention, even if it is set later.
    """
    _check_attention(model)
    register_rules(model)
    if not temperature > 0:
        raise WhenceError(f"temperature is {temperature}; a number above 0 is needed.")
    return ModuleView(model, _Reader(float(temperature)), _prepare_rows)


@dataclass(frozen=True)
class _Reader:
    """Calls the model and reads its outputs; two readers with the same fields are equal."""

    temperature: float

    def __call__(self, module: nn.Module, inputs: dict[str, Tensor]) -> LazyOutputs:
        mask = inputs["response_mask"]
        width = mask.shape[1]
        _check_attention(module)
        outputs = _call_model(module, inputs, width)
        # The logits at a token predict the next one.
        logits = outputs.logits[:, -width - 1 : -1]
        log_probs = (_to_single(logits) / self.temperature).log_softmax(-1)
        token_log_probs = log_probs.gather(-1, inputs["input_ids"][:, -width:, None]).squeeze(-1)

        def value() -> Tensor | None:
            values = getattr(outputs, "value", None)
            return None if values is None else torch.where(mask, _to_single(values[:, -width - 1 : -1]), 0.0)

        def entropy() -> Tensor:
            return torch.where(mask, -(log_probs.exp() * log_probs).sum(-1), 0.0)

        return LazyOutputs(torch.where(mask, token_log_probs, 0.0), value, entropy)


def _to_single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _call_model(module: Any, inputs: dict[str, Tensor], width: int) -> Any:
    # Logits of prompt tokens, each as wide as the vocabulary, are left out if the model can do so.
    options = {"use_cache": False, "logits_to_keep": width + 1}
    options = {name: value for name, value in options.items() if accepts_argument(module, name)}
    columns = {name: inputs[name] for name in ("input_ids", "attention_mask", "position_ids") if name in inputs}
    if _COLUMN_POSITIONS in inputs and not _counts_tokens(module, inputs["input_ids"][:1]):
        columns["position_ids"] = inputs[_COLUMN_POSITIONS]
    with _differentiable_kernels(module):
        outputs = module(**columns, **options)
    if not isinstance(getattr(outputs, "logits", None), Tensor):
        raise Unsupported(
            f"{type(module).__name__} returned a {type(outputs).__name__} without `logits`; a causal language model is "
            "needed, such as AutoModelForCausalLM loads, that returns an object (return_dict=True)."
        )
    return outputs


def _counts_tokens(module: Any, ids: Int[Tensor, "1 L"]) -> bool:
    """Return whether a model that is told no positions counts them by the attention mask, as OPT does."""
    if is_in_shards(module.parameters()):  # a pass needs all processes
        embeddings = [child for child in module.modules() if isinstance(child, nn.Embedding)]
        return any("attention_mask" in inspect.signature(child.forward).parameters for child in embeddings)
    if module not in _COUNTS_TOKENS:
        columns = torch.arange(ids.shape[1], device=ids.device)[None]
        mask = (columns > 0).long()
        ways = (None, (mask.cumsum(1) - 1).clamp(min=0), columns)
        with torch.no_grad():
            bare, *others = (module(input_ids=ids, attention_mask=mask, position_ids=way).logits[0, -1] for way in ways)
        by_tokens, by_columns = ((bare - other).abs().max() for other in others)
        _COUNTS_TOKENS[module] = bool(by_tokens < by_columns)
    return _COUNTS_TOKENS[module]


@contextmanager
def _differentiable_kernels(module: nn.Module) -> Iterator[None]:
    """Use the plain kernels of attention and of experts in forward mode, which the fused ones lack."""
    if fwAD._current_level < 0:
        yield
        return
    configs = [getattr(child, "config", None) for child in module.modules()]
    fused = [(config, kind) for config in configs if (kind := getattr(config, "_experts_implementation", None))]
    try:
        for config, _ in fused:
            config._experts_implementation = "eager"  # type: ignore[union-attr]
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for config, kind in fused:
            config._experts_implementation = kind  # type: ignore[union-attr]


def _prepare_rows(records: RecordBatch) -> dict[str, Tensor]:
    """Return the model's inputs: prompts padded on the left, and positions from the attention mask."""
    observations = records.observations
    if not isinstance(observations, dict) or not {"input_ids", "attention_mask", "response_mask"} <= set(observations):
        raise WhenceError("These records are no rows of a language model: make them with whence.llm.make_rows.")
    mask: Bool[Tensor, "n R"] = observations["response_mask"]
    ids: Int[Tensor, "n L"] = observations["input_ids"]
    attended: Float[Tensor, "n L"] = observations["attention_mask"].bool()
    # Padding of the prompt moves to the left, so that the response follows the prompt's last token.
    prompt = ids.shape[1] - mask.shape[1]
    order = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
    order[:, :prompt] = attended[:, :prompt].to(torch.int8).argsort(dim=1, stable=True)
    ids, attended = ids.gather(1, order), attended.gather(1, order)
    positions = (attended.long().cumsum(dim=1) - 1).clamp(min=0)
    inputs = {
        "input_ids": ids,
        "attention_mask": attended.long(),
        "position_ids": positions,
        "response_mask": mask,
    }
    if EXTRA_PADDING in observations:
        extra = observations[EXTRA_PADDING]
        if not extra.any():
            del inputs["position_ids"]
        else:
            columns = torch.arange(ids.shape[1], device=ids.device) - extra[:, None]
            inputs[_COLUMN_POSITIONS] = columns.clamp(min=0)
    return inputs


def _check_attention(model: nn.Module) -> None:
    """Refuse a model that uses flex_attention."""
    for path, module in model.named_modules():
        if getattr(getattr(module, "config", None), "_attn_implementation", None) == "flex_attention":
            raise Unsupported(
                f"`{path or type(module).__name__}` uses flex_attention, whose derivatives in forward mode are wrong "
                "without any error. Load the model with attn_implementation='sdpa' (or 'eager'), or call "
                "model.set_attn_implementation('sdpa')."
            )


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
            rule = LayerRule(_conv1d_product, _conv1d_gradient, parameters=frozenset(["weight", "bias"]))
            register_rule(type(layer), rule)


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
