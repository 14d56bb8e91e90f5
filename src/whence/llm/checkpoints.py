"""Checkpoints of a training, each one file: parameters that train, optimiser, counters, generators."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from whence.errors import RunDirectoryError
from whence.guards import write_atomically
from whence.tensorfiles import parse_document, read_tensor_file

FORMAT, VERSION = "whence-llm-checkpoint", "1"


def checkpoint_path(folder: str | Path, number: int) -> Path:
    """Return the path of the checkpoint after a round."""
    return Path(folder) / "checkpoints" / f"round_{number:05d}.safetensors"


def find_latest(folder: str | Path) -> Path | None:
    """Return the checkpoint of the latest round in a run directory; None if there is none."""
    return max((Path(folder) / "checkpoints").glob("round_*.safetensors"), default=None)


def save(
    path: Path, model: nn.Module, optimizer: Any, about: Mapping[str, Any], generators: Mapping[str, Tensor]
) -> None:
    """Write a checkpoint; a reader sees the old file or the whole new one.

    Args:
        path: the file.
        model: the model; its parameters that train are saved.
        optimizer: the optimiser of these parameters.
        about: further content, in JSON types.
        generators: states of random generators, uint8.
    """
    tensors: dict[str, Tensor] = {f"model/{name}": parameter for name, parameter in _trained_parameters(model)}
    names = {id(parameter): name for name, parameter in _trained_parameters(model)}
    for parameter, state in optimizer.state.items():
        tensors |= {f"optimizer/{names[id(parameter)]}/{key}": torch.as_tensor(value) for key, value in state.items()}
    tensors |= {f"generators/{name}": state for name, state in generators.items()}
    with write_atomically(path) as temporary:
        save_file(
            {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
            temporary,
            {"format": FORMAT, "version": VERSION, "about": json.dumps(about)},
        )


def load(path: Path, model: nn.Module, optimizer: Any) -> tuple[Any, dict[str, Tensor]]:
    """Read a checkpoint into model and optimiser, and return its further content: `about`, `generators`.

    Raises:
        RunDirectoryError: see `load_parameters`.
    """
    about, tensors = load_parameters(path, model)
    parameters = dict(_trained_parameters(model))
    optimizer.state.clear()
    for name, tensor in tensors.items():
        if name.startswith("optimizer/"):
            parameter_name, _, key = name.removeprefix("optimizer/").rpartition("/")
            parameter = parameters.get(parameter_name)
            if parameter is None or (tensor.numel() > 1 and tensor.shape != parameter.shape):
                raise RunDirectoryError(
                    f"{path} holds {name} of shape {tuple(tensor.shape)}, which belongs to no parameter that trains. "
                    "Restore the checkpoint, or choose another output_dir."
                )
            value = tensor if key == "step" else tensor.to(parameter.device)
            optimizer.state.setdefault(parameter, {})[key] = value
    generators = {name.removeprefix("generators/"): t for name, t in tensors.items() if name.startswith("generators/")}
    return about, generators


def load_parameters(path: Path, model: nn.Module) -> tuple[Any, dict[str, Tensor]]:
    """Read a checkpoint's parameters into a model, and return its further content: `about`, and all tensors by name.

    Raises:
        RunDirectoryError: the file is not a checkpoint of this version, or belongs to another model.
    """
    metadata, tensors = read_tensor_file(path, RunDirectoryError)
    if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION) or "about" not in metadata:
        raise RunDirectoryError(f"{path} is no checkpoint of this version ({FORMAT}, version {VERSION}).")
    about = parse_document(path, metadata["about"], RunDirectoryError)
    parameters = dict(_trained_parameters(model))
    saved = {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}
    if _list_shapes(parameters) != _list_shapes(saved):
        raise RunDirectoryError(
            f"{path} belongs to another model: its parameters that train differ from this one's. Build the model as it "
            "was, with the same adapter, or choose another output_dir."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
    return about, tensors


def _list_shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
