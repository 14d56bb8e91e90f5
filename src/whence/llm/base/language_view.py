"""The view of a causal language model: log-probs, values and entropies of response tokens."""

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
from whence.engines import is_in_shards
from whence.llm.base.layer_rules import register_rules
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
