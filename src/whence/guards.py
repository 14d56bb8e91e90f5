"""Context managers that restore generators, module modes and buffers on exit, and write files whole or not at all."""

import json
import os
import random
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn

from whence.errors import RunDirectoryError


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch (CPU, and CUDA) on exit."""
    python, array, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    seed = torch.initial_seed()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)  # noqa: NPY002
        reseeded = torch.initial_seed() != seed
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        elif reseeded or torch.cuda.is_initialized():  # torch stores a seed for CUDA until CUDA is initialised
            torch.cuda.manual_seed_all(seed)


def read_rng_state() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch (CPU, and CUDA once it is initialised)."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def load_rng_state(state: Mapping[str, Any]) -> None:
    """Put the global generators into the states that `read_rng_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules in eval mode, and restore each one's mode on exit. Submodules count only if listed."""
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def train_mode(module: nn.Module) -> Iterator[None]:
    """Put a module in train mode by its own `train()`, and restore the mode of each submodule on exit."""
    modes = {submodule: submodule.training for submodule in module.modules()}
    try:
        module.train()
        yield
    finally:
        for submodule, training in modes.items():
            submodule.training = training


@contextmanager
def preserve_attributes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore modules' attributes on exit, such as a distribution that a forward pass stores.

    Submodules count only if listed.
    """
    attributes = [(vars(module), dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for present, before in attributes:
            for name in present.keys() - before.keys():
                del present[name]
            present.update(before)


@contextmanager
def preserve_buffers(module: nn.Module) -> Iterator[None]:
    """Restore a module's buffers on exit, such as the running statistics that some layers update in train mode."""
    copies = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in copies:
                buffer.copy_(copy)


@contextmanager
def write_atomically(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it to `path` on a clean exit, remove it if something raises.

    A reader sees the old file or the whole new one, whenever the process is killed. The new file has the mode that the
    process's umask gives, whichever mode its writer chose.

    Raises:
        RunDirectoryError: the system refuses to write; the message says why and what to do.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.unlink(missing_ok=True)
            temporary.touch(exist_ok=False)  # a link of this name, which someone put there, is not followed
            mode = stat.S_IMODE(temporary.stat().st_mode)
            yield temporary
            temporary.chmod(mode)  # safetensors makes its files readable by their owner only
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write a file of JSON as `write_atomically` does."""
    with write_atomically(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Raise what the system refuses while something is written to `path` as a `RunDirectoryError`."""
    try:
        yield
    except (OSError, SafetensorError) as refusal:
        reason = getattr(refusal, "strerror", None) or str(refusal)
        raise RunDirectoryError(
            f"{path} cannot be written: {reason}. Free space on that disk, or choose a directory that you may write to."
        ) from refusal
