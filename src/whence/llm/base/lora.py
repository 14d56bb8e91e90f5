"""LoRA: PEFT's adapters, which train in a model's place: made, loaded, and put back to where training began."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM

from whence.core import RunDirectoryError
from whence.runs import read_tensor_file


def has_adapter(model: Any) -> bool:
    """Tell whether a language model trains an adapter."""
    return hasattr(model, "disable_adapter")


def get_base_model(model: Any) -> Any:
    """Return the model inside a model with an adapter; another model is its own."""
    return model.get_base_model() if has_adapter(model) else model


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
