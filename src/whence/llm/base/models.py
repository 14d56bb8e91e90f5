"""Causal language models as whence trains them: with PEFT's adapters, with a value head, and as they began."""

import copy
import inspect
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils import find_adapter_config_file

from whence.core import RunDirectoryError, WhenceError
from whence.runs import read_tensor_file, write_tensor_file


def has_adapter(model: Any) -> bool:
    """Tell whether a language model trains an adapter."""
    return hasattr(model, "disable_adapter")


def get_base_model(model: Any) -> Any:
    """Return the model inside a model with an adapter; another model is its own."""
    return model.get_base_model() if has_adapter(model) else model


def accepts_argument(model: Any, name: str) -> bool:
    """Tell whether a model's forward pass has a parameter of this name."""
    return name in inspect.signature(get_base_model(model).forward).parameters  # PEFT's forward takes anything


@contextmanager
def ignore_old_names() -> Iterator[None]:
    """Hide Transformers' warning of names that PEFT and TRL still use; whence has no part in it, and no cure."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing.*is deprecated", FutureWarning)
        yield


def add_adapter(model: Any, rank: int) -> Any:
    """Return a causal language model with an adapter of a rank on all its linear layers, which alone trains."""
    from peft import LoraConfig, TaskType, get_peft_model

    settings = {"r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0, "target_modules": "all-linear"}
    with ignore_old_names():
        return get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, **settings))


def load_adapter(model: Any, folder: Path) -> None:
    """Read the adapter in a folder into a model that has one of the same shape."""
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(model, read_tensor_file(folder / "adapter_model.safetensors", RunDirectoryError)[1])


def choose_loader(name: str) -> tuple[Any, dict[str, Any]]:
    """Return the class that loads a checkpoint, PEFT's where a folder holds an adapter, and its further arguments."""
    if not (Path(name) / "adapter_config.json").exists():
        return AutoModelForCausalLM, {}
    from peft import AutoPeftModelForCausalLM

    return AutoPeftModelForCausalLM, {"is_trainable": True}


def check_kernels(name: str) -> None:
    """Refuse a stored model, or an adapter, if the configuration of the model names a kernel of the hub: it is code.

    The argument `attn_implementation` of `from_pretrained` does not prevail over all spellings of that in config.json.
    """
    if (adapter := find_adapter_config_file(name)) is not None:
        name = json.loads(Path(adapter).read_text(encoding="utf-8"))["base_model_name_or_path"]
    settings: list[tuple[str, Any]] = [("", PretrainedConfig.get_config_dict(name)[0])]
    for key, value in settings:
        is_choice = "implementation" in key
        if isinstance(value, dict):
            settings += [(key if is_choice else inner, entry) for inner, entry in value.items()]
        elif is_choice and "/" in str(value):
            raise WhenceError(f"the configuration of {name} names {value!r} as {key}, which is code of the hub.")


class Reference:
    """The start model: the model before training, from which the policy's divergence is measured.

    With a PEFT adapter it is the model with the adapter as it was at the start, which may have been trained before;
    otherwise it is a frozen copy, which doubles the memory.

    Args:
        model: the language model, before it is trained.
    """

    def __init__(self, model: Any) -> None:
        self._copy: Any = None
        self._adapter: dict[str, Tensor] = {}
        if has_adapter(model):
            self._adapter = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        else:
            self._copy = copy.deepcopy(model).eval().requires_grad_(False)

    @contextmanager
    def activate(self, model: Any) -> Iterator[Any]:
        """Yield the start model; until the end, the language model `model` has the adapter of the start."""
        parameters = dict(model.named_parameters())
        present = {name: parameters[name].data for name in self._adapter}
        try:
            for name, tensor in self._adapter.items():
                parameters[name].data = tensor
            yield model if self._copy is None else self._copy
        finally:
            for name, tensor in present.items():
                parameters[name].data = tensor


VALUE_HEAD = "value_head.safetensors"


class LanguageOutputs(NamedTuple):
    """Outputs for n sequences: `logits` (n, L, vocabulary) and `value` (n, L) at the requested positions."""

    logits: Float[Tensor, "n L V"]
    value: Float[Tensor, "n L"]


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
