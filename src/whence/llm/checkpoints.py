"""The model and the optimiser in checkpoints: parameters that train, and the optimiser's state of each."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence.errors import RunDirectoryError
from whence.runs.checkpoints import load_tree


def read_model(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the parameters that train and the optimiser's state of each, by name, for `save_tree`."""
    names = {id(parameter): name for name, parameter in _trained_parameters(model)}
    return {
        "model": dict(_trained_parameters(model)),
        "optimizer": {names[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()},
    }


def load_model(model: nn.Module, optimizer: Any, content: Mapping[str, Any]) -> None:
    """Put a model and its optimiser into the state that `read_model` returned; see `check_model`."""
    _copy_parameters(model, content)
    parameters = dict(_trained_parameters(model))
    optimizer.state.clear()
    for name, state in content["optimizer"].items():
        device = parameters[name].device
        # Adam counts its steps on the CPU.
        optimizer.state[parameters[name]] = {
            key: value.to(device) if isinstance(value, Tensor) and key != "step" else value
            for key, value in state.items()
        }


def load_parameters(path: Path, model: nn.Module) -> None:
    """Read the parameters of a checkpoint file into a model.

    Raises:
        RunDirectoryError: the file cannot be read as a checkpoint, or belongs to another model.
    """
    content = load_tree(path)
    check_model(model, content, path)
    _copy_parameters(model, content)


def check_model(model: nn.Module, content: Mapping[str, Any], path: Path) -> None:
    """Refuse the content of a checkpoint whose parameters are not those of a model that train.

    Raises:
        RunDirectoryError: see above.
    """
    parameters = dict(_trained_parameters(model))
    if _list_shapes(parameters) != _list_shapes(content.get("model", {})):
        raise RunDirectoryError(
            f"{path} belongs to another model: its parameters that train differ from this one's. Build the model as it "
            "was, with the same adapter, or choose another output_dir."
        )
    states = content.get("optimizer", {})
    for name, state in states.items() if isinstance(states, Mapping) else [("", states)]:
        values = state.values() if isinstance(state, Mapping) else [state]
        shapes = [value.shape for value in values if isinstance(value, Tensor) and value.numel() > 1]
        if name not in parameters or not isinstance(state, Mapping) or any(s != parameters[name].shape for s in shapes):
            raise RunDirectoryError(
                f"{path} holds an optimiser's state of {name!r}, which belongs to no parameter that trains. Restore "
                "the checkpoint, or choose another output_dir."
            )


def _copy_parameters(model: nn.Module, content: Mapping[str, Any]) -> None:
    with torch.no_grad():
        for name, parameter in _trained_parameters(model):
            parameter.copy_(content["model"][name])


def _list_shapes(tensors: Any) -> dict[str, tuple[int, ...] | None]:
    """Return the shape of each tensor by its name; None for what a damaged checkpoint holds in place of one."""
    if not isinstance(tensors, Mapping):
        return {}
    return {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in tensors.items()}


def _trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
