"""A causal language model with a value head, and the model that it began as."""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from whence.errors import WhenceError
from whence.guards import write_atomically

VALUE_HEAD = "value_head.safetensors"


class LanguageOutputs(NamedTuple):
    """What a model says of n sequences: `logits` (n, L, vocabulary) and `value` (n, L) of the positions asked for."""

    logits: Float[Tensor, "n L V"]
    value: Float[Tensor, "n L"]


def takes(model: Any, name: str) -> bool:
    """Tell whether a model's forward pass has a parameter of this name."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's forward takes anything
    return name in inspect.signature(inner.forward).parameters


class WithValueHead(nn.Module):
    """A causal language model of Transformers, or one with a PEFT adapter, with a linear value head on its last layer.

    Args:
        language_model: with `get_input_embeddings` and hidden states, as Transformers' causal models have.
    """

    def __init__(self, language_model: Any) -> None:
        super().__init__()
        self.language_model = language_model
        width = language_model.get_input_embeddings().embedding_dim
        like = next(language_model.parameters())
        # In single precision: values are regressed to, and their errors would vanish in the model's own.
        self.value_head = nn.Linear(width, 1, device=like.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def has_adapter(self) -> bool:
        """Whether the language model trains a PEFT adapter."""
        return hasattr(self.language_model, "disable_adapter")

    @property
    def _keeps_logits(self) -> bool:
        return takes(self.language_model, "logits_to_keep")

    def forward(
        self,
        input_ids: Int[Tensor, "n L"],
        attention_mask: Int[Tensor, "n L"],
        position_ids: Int[Tensor, "n L"] | None = None,
        logits_to_keep: int = 0,
    ) -> LanguageOutputs:
        """Return logits and values of the last `logits_to_keep` positions; 0: of all."""
        found = self.language_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            output_hidden_states=True,
            use_cache=False,
            **({"logits_to_keep": logits_to_keep} if self._keeps_logits else {}),
        )
        hidden = found.hidden_states[-1][:, -logits_to_keep:]
        logits = found.logits[:, -logits_to_keep:]
        return LanguageOutputs(logits, self.value_head(hidden.to(self.value_head.weight.dtype)).squeeze(-1))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the language model (or its adapter) as Transformers does, and the value head beside it."""
        self.language_model.save_pretrained(folder)
        with write_atomically(Path(folder) / VALUE_HEAD) as temporary:
            save_file(self.value_head.state_dict(), temporary)

    def load_value_head(self, folder: str | Path) -> None:
        """Read the value head that `save_pretrained` wrote.

        Raises:
            WhenceError: there is none, or it is of a model of another width.
        """
        path = Path(folder) / VALUE_HEAD
        if not path.exists():
            raise WhenceError(f"{folder} holds no {VALUE_HEAD}; WithValueHead.save_pretrained writes one.")
        state = load_file(path)
        if state["weight"].shape != self.value_head.weight.shape:
            raise WhenceError(
                f"The value head in {folder} reads {state['weight'].shape[1]} numbers, and this model's last layer has "
                f"{self.value_head.weight.shape[1]}: it is of another model."
            )
        self.value_head.load_state_dict(state)


class Reference:
    """The model that training began with, whose log-probs hold the policy back.

    With a PEFT adapter it is the model with the adapter off; otherwise a frozen copy, which doubles the memory.

    Args:
        model: before it is trained.
    """

    def __init__(self, model: WithValueHead) -> None:
        self._copy: Any = None
        if not model.has_adapter:
            self._copy = copy.deepcopy(model.language_model).eval().requires_grad_(False)

    @contextmanager
    def of(self, model: WithValueHead) -> Iterator[Any]:
        """Give the reference as a causal language model."""
        off = model.language_model.disable_adapter() if self._copy is None else nullcontext()
        with off:
            yield model.language_model if self._copy is None else self._copy
