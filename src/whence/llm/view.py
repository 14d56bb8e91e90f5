"""How log-probs, values and entropies of response tokens are read from a causal language model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from whence.errors import Unsupported, WhenceError
from whence.llm.layer_rules import register_rules
from whence.llm.model import takes
from whence.policies import LazyOutputs, ModuleView
from whence.records import RecordBatch


def language_view(model: nn.Module, *, temperature: float = 1.0) -> ModuleView:
    """Return a view of a causal language model that reads the rows of `make_rows`.

    Its outputs are those of response tokens, (n, R): `log_prob`, 0 where there is no response token; `value`, where the
    model gives any; `entropy`. They are computed in single precision at least.

    Args:
        model: a causal language model of Transformers, whole or with a PEFT adapter, or a module that is called as
            `model(input_ids=..., attention_mask=..., position_ids=...)` and returns an object with `logits`
            (n, L, V) and, as `WithValueHead` does, `value` (n, L). Parameters with `requires_grad` are scored.
        temperature: responses were drawn at.

    Raises:
        WhenceError: a temperature that is not above 0.
        Unsupported: flex_attention, also where it is set later on.
    """
    _check_attention(model)
    register_rules(model)
    return unscored_view(model, temperature=temperature)


def unscored_view(model: nn.Module, *, temperature: float = 1.0) -> ModuleView:
    """Return the same view, without the rules that scoring needs, which are found by looking at weights.

    Raises:
        WhenceError: a temperature that is not above 0.
    """
    if not temperature > 0:
        raise WhenceError(f"temperature is {temperature}; a number above 0 is needed.")
    return ModuleView(model, _Reader(float(temperature)), _prepared)


@dataclass(frozen=True)
class _Reader:
    """What the view does with the model; equal to another of the same temperature."""

    temperature: float

    def __call__(self, module: nn.Module, inputs: dict[str, Tensor]) -> LazyOutputs:
        mask = inputs["response_mask"]
        width = mask.shape[1]
        _check_attention(module)
        found = _called(module, inputs, width)
        # What stands at a token says of the next one.
        logits = found.logits[:, -width - 1 : -1]
        log_probs = (_at_least_single(logits) / self.temperature).log_softmax(-1)
        drawn = log_probs.gather(-1, inputs["input_ids"][:, -width:, None]).squeeze(-1)

        def value() -> Tensor | None:
            values = getattr(found, "value", None)
            return None if values is None else torch.where(mask, _at_least_single(values[:, -width - 1 : -1]), 0.0)

        def entropy() -> Tensor:
            return torch.where(mask, -(log_probs.exp() * log_probs).sum(-1), 0.0)

        return LazyOutputs(torch.where(mask, drawn, 0.0), value, entropy)


def _at_least_single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _called(module: Any, inputs: dict[str, Tensor], width: int) -> Any:
    # Logits of prompt tokens, as wide as the vocabulary, are not needed where the model can leave them out.
    wished = {"use_cache": False, "logits_to_keep": width + 1}
    with _differentiable_attention():
        found = module(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            position_ids=inputs["position_ids"],
            **{name: value for name, value in wished.items() if takes(module, name)},
        )
    if not isinstance(getattr(found, "logits", None), Tensor):
        raise Unsupported(
            f"{type(module).__name__} returned a {type(found).__name__} without `logits`; a causal language model is "
            "needed, such as AutoModelForCausalLM loads, that returns an object (return_dict=True)."
        )
    return found


@contextmanager
def _differentiable_attention() -> Iterator[None]:
    """Take the plain kernel in forward mode, which the fused ones of scaled_dot_product_attention lack."""
    if fwAD._current_level < 0:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


def _prepared(records: RecordBatch) -> dict[str, Tensor]:
    """Return the inputs of rows: prompts padded on the left, and positions counted by the attention mask."""
    observations = records.observations
    if not isinstance(observations, dict) or not {"input_ids", "attention_mask", "response_mask"} <= set(observations):
        raise WhenceError("These records are no rows of a language model: make them with whence.llm.make_rows.")
    mask: Bool[Tensor, "n R"] = observations["response_mask"]
    ids: Int[Tensor, "n L"] = observations["input_ids"]
    attended: Float[Tensor, "n L"] = observations["attention_mask"].bool()
    # Padding of the prompt goes to the left, whichever side it was on, so that the response follows its last token.
    prompt = ids.shape[1] - mask.shape[1]
    order = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
    order[:, :prompt] = attended[:, :prompt].to(torch.int8).argsort(dim=1, stable=True)
    ids, attended = ids.gather(1, order), attended.gather(1, order)
    positions = (attended.long().cumsum(dim=1) - 1).clamp(min=0)
    return {
        "input_ids": ids,
        "attention_mask": attended.long(),
        "position_ids": positions,
        "response_mask": mask,
    }


def _check_attention(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if getattr(getattr(module, "config", None), "_attn_implementation", None) == "flex_attention":
            raise Unsupported(
                f"`{path or type(module).__name__}` uses flex_attention, whose derivatives in forward mode are wrong "
                "without a word. Load the model with attn_implementation='sdpa' (or 'eager'), or call "
                "model.set_attn_implementation('sdpa')."
            )
