"""Checkpoints: trees of plain values, arrays and tensors, each in one checked safetensors file."""

import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from whence.core import RunDirectoryError, WhenceError, decode, encode, first_line, flush_to_disk, parse_document
from whence.runs.files import CHANGED, list_numbered, read_tensor_file, write_tensor_file

FORMAT, VERSION = "whence-checkpoint", "2"

_HIGH = 2 / 3  # returns above this share of the way from the first to the best have not fallen

log = logging.getLogger("whence")


class Checkpoint(NamedTuple):
    """A checkpoint that was read: the round after which it was written, what was saved, and its file."""

    round: int
    content: Mapping[str, Any]
    path: Path


class CheckpointClock:
    """When checkpoints are written.

    Args:
        save_every: rounds from one checkpoint to the next; 0: none. None: after every round, or after fewer of them, so
            that checkpoints take at most 2% of the time.

    Attributes:
        last_round: the round after which the last checkpoint was written, by this process or before; 0: none.
    """

    def __init__(self, save_every: int | None) -> None:
        if save_every is not None and (type(save_every) is not int or save_every < 0):
            raise WhenceError(
                f"save_every is {save_every!r}; give the rounds between checkpoints, 0 for none, or None for as many "
                "as take 2% of the time."
            )
        self.save_every = 1 if save_every is None else save_every
        self._share = 0.02 if save_every is None else None
        self.last_round, self._last_end, self._last_seconds = 0, -math.inf, 0.0

    def is_due(self, number: int) -> bool:
        """Return whether a checkpoint is to be written after a round."""
        if not self.save_every or number % self.save_every:
            return False
        return self._share is None or time.perf_counter() - self._last_end >= self._last_seconds / self._share

    def is_behind(self, number: int) -> bool:
        """Return whether the last round of a training has no checkpoint yet, and is to have one."""
        return self.save_every > 0 and number > self.last_round

    @contextmanager
    def time_checkpoint(self, number: int) -> Iterator[None]:
        """Measure how long the checkpoint after a round takes."""
        start = time.perf_counter()
        yield
        self.last_round, self._last_end = number, time.perf_counter()
        self._last_seconds = self._last_end - start


def checkpoint_path(folder: str | Path, number: int) -> Path:
    """Return the path of the checkpoint after a round."""
    return Path(folder) / "checkpoints" / f"round_{number:05d}.safetensors"


def list_checkpoints(folder: str | Path) -> list[int]:
    """List the rounds after which a run directory has a checkpoint."""
    return sorted(number for _, number in list_numbered(Path(folder) / "checkpoints"))


def read_latest(folder: str | Path) -> Checkpoint | None:
    """Read the latest checkpoint of a run directory that is whole; damaged ones are named in the log and passed over.

    It is None if there is none; if none of several can be read, that is a `RunDirectoryError`.
    """
    failure = None
    for number in reversed(list_checkpoints(folder)):
        path = checkpoint_path(folder, number)
        try:
            return Checkpoint(number, load_tree(path), path)
        except RunDirectoryError as damage:
            log.warning("%s The checkpoint before it is taken, if there is one.", damage)
            failure = failure or damage
    if failure is not None:
        raise failure
    return None


def save_checkpoint(
    folder: str | Path, number: int, content: Mapping[str, Any], *, keep: int, returns: Mapping[int, float] = {}
) -> None:
    """Write the checkpoint after a round, then delete the others but those of `choose_checkpoints`.

    Before it, the rounds are on disk.
    """
    flush_to_disk(Path(folder), *(each for each in Path(folder).iterdir() if each.is_dir()))
    save_tree(checkpoint_path(folder, number), content)
    numbers = list_checkpoints(folder)
    for old in {*numbers} - choose_checkpoints(numbers, returns, keep):
        checkpoint_path(folder, old).unlink(missing_ok=True)


def choose_checkpoints(numbers: Sequence[int], returns: Mapping[int, float], keep: int) -> set[int]:
    """Return the checkpoints that stay: the last `keep`, the best one, and the two around a fall of the return.

    The policy of a checkpoint collects the round after it, whose return tells how good it is; `returns` are those that
    are known, by round. The return falls after the last checkpoint that is above two thirds of the way from the run's
    first return to the best.
    """
    chosen, returns = {*numbers[-keep:]}, {number: each for number, each in returns.items() if math.isfinite(each)}
    qualities = {number: returns[number + 1] for number in numbers if number + 1 in returns}
    if qualities:
        best = max(reversed(qualities), key=qualities.__getitem__)
        first, highest = returns[min(returns)], qualities[best]
        high = min(highest, first + _HIGH * (highest - first))
        fall = numbers.index(max(number for number, each in qualities.items() if each >= high))
        chosen |= {best, *numbers[fall : fall + 2]}
    return chosen


def read_states(parts: Iterable[Any]) -> list[Any]:
    """Return the states of those of a user's parts, such as a rule and rewards, that have one to keep."""
    return [part.state_dict() for part in parts if hasattr(part, "load_state_dict")]


def load_states(parts: Iterable[Any], states: Iterable[Any]) -> None:
    """Put parts into the states that `read_states` returned."""
    for part, state in zip([part for part in parts if hasattr(part, "load_state_dict")], states, strict=True):
        part.load_state_dict(state)


def save_tree(path: Path, tree: Mapping[str, Any]) -> None:
    """Write a tree to one safetensors file, atomically, with a checksum; what it cannot hold is a `TypeError`.

    It holds dicts with text as keys, lists and tuples of None, truth values, numbers, text, NumPy arrays and numbers,
    and tensors.
    """
    tensors: dict[str, Tensor] = {}
    about = json.dumps({name: _encode(value, tensors) for name, value in tree.items()})
    write_tensor_file(path, tensors, {"format": FORMAT, "version": VERSION, "about": about})


def load_tree(path: Path) -> dict[str, Any]:
    """Read what `save_tree` wrote; a `RunDirectoryError` says if it is missing, damaged, or of another version."""
    metadata, tensors = read_tensor_file(path, RunDirectoryError)
    marks = metadata.get("format"), metadata.get("version")
    if marks != (FORMAT, VERSION):
        raise RunDirectoryError(
            f"{path} is marked {marks[0]!r}, version {marks[1]!r}; this version of whence reads {FORMAT!r}, version "
            f"{VERSION!r}. Finish the run with the version that wrote it, or start it over (overwrite=True, "
            "--overwrite)."
        )
    try:
        about = parse_document(f"The header of {path}", metadata.get("about", ""), RunDirectoryError)
        return {name: _decode(value, tensors) for name, value in about.items()}
    except CHANGED as crafted:
        raise RunDirectoryError(f"{path} holds what whence does not write ({first_line(crafted)}).") from None


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value in JSON types; arrays and tensors are put into `tensors`, and referred to by name."""

    def store(value: Any) -> dict[str, Any] | None:
        if isinstance(value, Tensor):
            return {"tensor": _add(value, tensors)}
        if isinstance(value, np.ndarray | np.generic):
            # The layout in memory comes back, too: on images, convolutions round otherwise if channels lie otherwise.
            array = np.asarray(value)
            axes = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
            stored = np.array(array.transpose(axes), order="C")
            if array.dtype.kind == "u" and array.dtype.itemsize > 1:  # which older versions of safetensors lack
                stored = stored.view(f"i{array.dtype.itemsize}")
            entry = _add(torch.from_numpy(stored), tensors)
            number = {} if isinstance(value, np.ndarray) else {"number": True}
            return {"entry": entry, "axes": axes, "dtype": array.dtype.name, **number}
        if isinstance(value, bool | int | float | str) and type(value) is not float:
            raise TypeError(f"A checkpoint would not give back {value!r} as a {type(value).__name__}.")
        return None

    return encode(value, store)


def _add(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    name = str(len(tensors))
    tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return name


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `_encode` was given; tensors are on the CPU."""

    def load(value: Mapping[str, Any]) -> Any:
        # A copy in memory of its own: in the file's, entries begin anywhere, and matrix products round otherwise there.
        tensor = tensors[value.get("tensor", value.get("entry"))].clone()
        if "tensor" in value:
            return tensor
        array = np.array(tensor.numpy()).view(np.dtype(value["dtype"]))
        return array[()] if "number" in value else array.transpose(np.argsort(value["axes"]))

    return decode(value, load)
