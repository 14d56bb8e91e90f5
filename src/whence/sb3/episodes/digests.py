"""Digests of observations, by which a run says whether the same was seen again."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from math import prod
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray


def digest_observation(observation: Any, space: gym.Space[Any]) -> int:
    """Return 64 bits of a hash of an observation's bytes, cast to the dtypes of its space."""
    return int.from_bytes(blake2b(_to_bytes(observation, space), digest_size=8).digest(), "little")


def digest_rows(columns: Mapping[str, NDArray[Any]], space: gym.Space[Any]) -> list[int]:
    """Return the digests of n observations of a space, (n, ...) as `named_leaves` lists an "observation"."""
    # A row of this matrix holds the bytes that `_to_bytes` returns; all observations of a space have equally many.
    rows = np.hstack([*_list_bytes(columns, space, "observation")])
    digests = b"".join(blake2b(row, digest_size=8).digest() for row in rows)
    return np.frombuffer(digests, "<u8").tolist()  # type: ignore[no-any-return]


def _list_bytes(columns: Mapping[str, NDArray[Any]], space: gym.Space[Any], name: str) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of n observations, (n, bytes), part by part; see `_to_bytes`."""
    if isinstance(space, gym.spaces.Dict):
        count = len(next(iter(columns.values())))
        for key in sorted(space.spaces):
            yield _repeat(repr(key).encode(), count)
            yield from _list_bytes(columns, space[key], f"{name}.{key}")
    else:
        column = np.ascontiguousarray(columns[name], dtype=space.dtype)
        yield _repeat(_write_shape(space.shape), len(column))
        yield column.reshape(len(column), prod(column.shape[1:])).view(np.uint8)


def _repeat(text: bytes, count: int) -> NDArray[np.uint8]:
    return np.broadcast_to(np.frombuffer(text, np.uint8), (count, len(text)))


def _to_bytes(observation: Any, space: gym.Space[Any]) -> bytes:
    if isinstance(space, gym.spaces.Dict):
        parts = ((name, _to_bytes(observation[name], space[name])) for name in sorted(space.spaces))
        return b"".join(repr(name).encode() + part for name, part in parts)
    return _write_shape(space.shape) + np.asarray(observation, dtype=space.dtype).tobytes()


@lru_cache
def _write_shape(shape: tuple[int, ...] | None) -> bytes:
    # No number has no axis here; ascontiguousarray() gave it one, and older runs hold such digests.
    return repr(shape or (1,)).encode()
