"""Context managers that keep what is there: generators, module modes and buffers, files; also when something raises."""

import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn


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
        seeded = torch.initial_seed() != seed
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        elif seeded or torch.cuda.is_initialized():  # a seed waits for CUDA to begin, or has just begun it
            torch.cuda.manual_seed_all(seed)


@contextmanager
def eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules in eval mode, and each back in its own mode on exit. Submodules have to be listed too."""
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
    """Put a module in train mode as `train()` of its own does, and each of its submodules back on exit."""
    before = {own: own.training for own in module.modules()}
    try:
        module.train()
        yield
    finally:
        for own, training in before.items():
            own.training = training


@contextmanager
def preserve_buffers(module: nn.Module) -> Iterator[None]:
    """Restore a module's buffers, such as the running statistics that some layers take in train mode, on exit."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, own in before:
                buffer.copy_(own)


@contextmanager
def write_atomically(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; on a clean exit it takes the name, else it is removed.

    A reader sees the old file or the whole new one, whenever the process is killed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
