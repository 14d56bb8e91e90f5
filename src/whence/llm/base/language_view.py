"""The view of a causal language model: log-probs, values and entropies of response tokens."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from whence.core import LazyOutputs, ModuleView, RecordBatch, Unsupported, WhenceError, eval_mode
from whence.llm.base.layer_rules import register_rules
from whence.llm.base.value_head import WithValueHead, accepts_argument

EXTRA_PADDING = "extra_padding"
"""The column of rows, (n,), of those that a trainer trains on without telling the model its positions.

The number of columns before a row that the trainer's own batch did not have. Models that count positions by columns,
such as GPT-2, count padding, too, from the first column of that batch on.
"""

_COLUMN_POSITIONS = "column_positions"
"""Of the model's inputs: positions for models that count them by columns."""


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
    counts_tokens = _COLUMN_POSITIONS not in inputs or _counts_tokens(module)
    with _differentiable_attention():
        outputs = module(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            position_ids=inputs["position_ids" if counts_tokens else _COLUMN_POSITIONS],
            **{name: value for name, value in options.items() if accepts_argument(module, name)},
        )
    if not isinstance(getattr(outputs, "logits", None), Tensor):
        raise Unsupported(
            f"{type(module).__name__} returned a {type(outputs).__name__} without `logits`; a causal language model is "
            "needed, such as AutoModelForCausalLM loads, that returns an object (return_dict=True)."
        )
    return outputs


def _counts_tokens(module: nn.Module) -> bool:
    """Tell whether a model that is given no positions counts them by the attention mask, as OPT's embedding does."""
    return any(
        isinstance(child, nn.Embedding) and "attention_mask" in inspect.signature(child.forward).parameters
        for child in module.modules()
    )


@contextmanager
def _differentiable_attention() -> Iterator[None]:
    """Use the plain attention kernel in forward mode, which the fused kernels lack."""
    if fwAD._current_level < 0:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


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
        columns = torch.arange(ids.shape[1], device=ids.device) - observations[EXTRA_PADDING][:, None]
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


def embed_rows(model: Any, rows: RecordBatch, *, batch_size: int = 16) -> Float[Tensor, "n d"]:
    """Return the mean of the last hidden states over the tokens of each row, of prompt and response.

    Args:
        model: a causal language model of Transformers, or a `WithValueHead`; it is read in eval mode.
        rows: the rows of `make_rows`.
        batch_size: the most rows in one pass.

    Returns:
        (n, d) in single precision, on the CPU.
    """
    view = language_view(model)
    language_model = model.language_model if isinstance(model, WithValueHead) else model
    parts = []
    with torch.no_grad(), eval_mode(model.modules()):
        for first in range(0, len(rows), batch_size):
            inputs: Any = view.prepare(rows.take(slice(first, first + batch_size)))
            names = ("input_ids", "attention_mask", "position_ids")
            columns = {name: inputs[name] for name in names}
            hidden = language_model(**columns, output_hidden_states=True, use_cache=False).hidden_states[-1].float()
            mask = inputs["attention_mask"][:, :, None].float()
            parts.append(((hidden * mask).sum(dim=1) / mask.sum(dim=1)).cpu())
    return torch.cat(parts)
