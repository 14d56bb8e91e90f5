"""A causal language model with a value head."""

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from whence.core import WhenceError
from whence.llm.base.lora import get_base_model
from whence.runs import read_tensor_file, write_tensor_file

VALUE_HEAD = "value_head.safetensors"


class LanguageOutputs(NamedTuple):
    """Outputs for n sequences: `logits` (n, L, vocabulary) and `value` (n, L) at the requested positions."""

    logits: Float[Tensor, "n L V"]
    value: Float[Tensor, "n L"]


def accepts_argument(model: Any, name: str) -> bool:
    """Tell whether a model's forward pass has a parameter of this name."""
    return name in inspect.signature(get_base_model(model).forward).parameters  # PEFT's forward takes anything


class WithValueHead(nn.Module):
    """A causal language model of Transformers, or one with a PEFT adapter, with a linear value head on its last layer.

    Args:
        language_model: a model with `get_input_embeddings` and hidden states, as Transformers' causal models have.
    """

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.language_model = language_model
        width = language_model.get_input_embeddings().embedding_dim
        # In single precision: the errors of a regression would vanish in half precision.
        self.value_head = nn.Linear(width, 1, device=next(language_model.parameters()).device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(
        self,
        input_ids: Int[Tensor, "n L"],
        attention_mask: Int[Tensor, "n L"],
        position_ids: Int[Tensor, "n L"] | None = None,
        logits_to_keep: int = 0,
    ) -> LanguageOutputs:
        """Return logits and values of the last `logits_to_keep` positions; 0: of all positions."""
        limits_logits = accepts_argument(self.language_model, "logits_to_keep")
        outputs = self.language_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            output_hidden_states=True,
            use_cache=False,
            **({"logits_to_keep": logits_to_keep} if limits_logits else {}),
        )
        hidden = outputs.hidden_states[-1][:, -logits_to_keep:]
        logits = outputs.logits[:, -logits_to_keep:]
        return LanguageOutputs(logits, self.value_head(hidden.to(self.value_head.weight.dtype)).squeeze(-1))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the language model (or its adapter) as Transformers does, and the value head next to it."""
        self.language_model.save_pretrained(folder)
        write_tensor_file(Path(folder) / VALUE_HEAD, self.value_head.state_dict(), {})

    def load_value_head(self, folder: str | Path) -> None:
        """Read the value head that `save_pretrained` wrote.

        Raises:
            WhenceError: the folder has no value head.
        """
        self.value_head.load_state_dict(read_tensor_file(Path(folder) / VALUE_HEAD, WhenceError)[1])


def disable_dropout(model: nn.Module) -> None:
    """Set every probability of dropout to 0: of layers, and of modules that hold it as a number, as OPT's do."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):  # dropout, attention_dropout, resid_pdrop, layerdrop, ...
                setattr(module, name, 0.0)
