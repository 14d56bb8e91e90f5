"""Where a training stands, in one file: parameters that train, optimiser, counters, generators."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from whence.errors import RunDirectoryError
from whence.guards import write_atomically

FORMAT, VERSION = "whence-llm-checkpoint", "1"


def checkpoint_path(folder: str | Path, number: int) -> Path:
    """Return the file of the checkpoint after a round."""
    return Path(folder) / "checkpoints" / f"round_{number:05d}.safetensors"


def latest(folder: str | Path) -> Path | None:
    """Return the checkpoint of the most rounds below a training's directory; None where there is none."""
    return max((Path(folder) / "checkpoints").glob("round_*.safetensors"), default=None)


def save(
    path: Path, model: nn.Module, optimizer: Any, about: Mapping[str, Any], generators: Mapping[str, Tensor]
) -> None:
    """Write a checkpoint; a reader finds the old file or the whole new one.

    Args:
        path: the file.
        model: of which the parameters that train are kept.
        optimizer: of torch, over these parameters.
        about: anything else, in JSON types.
        generators: states of random generators, uint8.
    """
    tensors: dict[str, Tensor] = {f"model/{name}": parameter for name, parameter in _trained(model)}
    names = {id(parameter): name for name, parameter in _trained(model)}
    for parameter, own in optimizer.state.items():
        tensors |= {f"optimizer/{names[id(parameter)]}/{key}": torch.as_tensor(value) for key, value in own.items()}
    tensors |= {f"generators/{name}": state for name, state in generators.items()}
    with write_atomically(path) as temporary:
        save_file(
            {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
            temporary,
            {"format": FORMAT, "version": VERSION, "about": json.dumps(about)},
        )


def load(path: Path, model: nn.Module, optimizer: Any) -> tuple[Any, dict[str, Tensor]]:
    """Read a checkpoint into model and optimiser, and return what else it holds: `about`, `generators`.

    Raises:
        RunDirectoryError: the file is none of this version's, or is of another model.
    """
    try:
        opened = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as broken:
        raise RunDirectoryError(f"{path} cannot be read as safetensors: {broken}") from None
    with opened as file:
        metadata = file.metadata() or {}
        if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
            raise RunDirectoryError(f"{path} is no checkpoint of this version ({FORMAT}, version {VERSION}).")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    own = dict(_trained(model))
    saved = {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}
    shapes = ({name: tuple(tensor.shape) for name, tensor in one.items()} for one in (own, saved))
    if next(shapes) != next(shapes):
        raise RunDirectoryError(
            f"{path} is of another model: its parameters that train are not this one's. Build the model as it was, "
            "with the same adapter, or choose another output_dir."
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])
    optimizer.state.clear()
    for name, tensor in tensors.items():
        if name.startswith("optimizer/"):
            parameter_name, _, key = name.removeprefix("optimizer/").rpartition("/")
            parameter = own[parameter_name]
            placed = tensor if key == "step" else tensor.to(parameter.device)
            optimizer.state.setdefault(parameter, {})[key] = placed
    generators = {name.removeprefix("generators/"): t for name, t in tensors.items() if name.startswith("generators/")}
    return json.loads(metadata["about"]), generators


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
