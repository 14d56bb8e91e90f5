"""Context managers that restore generators, module modes and buffers on exit."""

import os
import random
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch (CPU, and CUDA) on exit."""
    state, seed = read_rng_state(), torch.initial_seed()
    try:
        yield
    finally:
        reseeded = torch.initial_seed() != seed
        load_rng_state(state)
        # Until CUDA is initialised, torch stores a seed for it.
        if not state["cuda"] and (reseeded or torch.cuda.is_initialized()):
            torch.cuda.manual_seed_all(seed)


_hiding = threading.RLock()  # else a thread might start a process after another one has put the environment back


@contextmanager
def hide_working_directory() -> Iterator[None]:
    """Let processes that start meanwhile import nothing from the working directory, where Python looks first.

    A process of `multiprocessing` gets the search path of this one afterwards, so that it finds what this one finds.
    """
    with _hiding:
        is_hidden = "PYTHONSAFEPATH" in os.environ
        os.environ.setdefault("PYTHONSAFEPATH", "1")
        try:
            yield
        finally:
            if not is_hidden:
                os.environ.pop("PYTHONSAFEPATH", None)


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
    """Put modules in eval mode, and restore each one's mode and buffers on exit. Submodules count only if listed."""
    modules = list(modules)
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        with preserve_buffers(modules):  # some layers write them in eval mode, too
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
def replace_attribute(thing: object, name: str, value: object) -> Iterator[None]:
    """Let an object have another attribute, or a method of its own, inside; replacements may be nested."""
    attributes = vars(thing)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        del attributes[name]  # so that the class's is in effect again, if there was no other
        attributes.update(before)


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
def preserve_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore modules' buffers on exit, such as running statistics, whether a pass fills them or puts others there.

    Submodules count only if listed.
    """
    places = [(module._buffers, dict(module._buffers)) for module in modules if module._buffers]
    buffers = [buffer for _, before in places for buffer in before.values() if buffer is not None]
    copies = [(buffer, buffer.clone()) for buffer in buffers if not buffer.is_meta]
    try:
        yield
    finally:
        for present, before in places:
            present.update(before)
        with torch.no_grad():
            for buffer, copy in copies:
                if not torch.equal(buffer, copy):  # a copy in place would invalidate graphs of the user's
                    buffer.copy_(copy)
