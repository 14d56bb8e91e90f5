"""Digests of observations, by which a run says whether the same was seen again."""

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray


def digest_observation(observation: Any, space: gym.Space[Any]) -> int:
    """Return 64 bits of a hash of an observation's bytes, cast to the dtypes of its space."""
    return int.from_bytes(blake2b(_to_bytes(observation, space), digest_size=8).digest(), "little")


def digest_rows(columns: Mapping[str, NDArray[Any]], space: gym.Space[Any]) -> list[int]:
    """Return the digests of n observations of a space, (n, ...) as `named_leaves` lists an "observation"."""
    if isinstance(space, gym.spaces.Dict):
        count = len(next(iter(columns.values())))
        return [digest_observation(_nest(columns, space, "observation", row), space) for row in range(count)]
    (column,) = columns.values()
    rows, begin = np.ascontiguousarray(column, dtype=space.dtype).reshape(len(column), -1), _write_shape(space.shape)
    return [int.from_bytes(blake2b(begin + row.tobytes(), digest_size=8).digest(), "little") for row in rows]


def _nest(columns: Mapping[str, NDArray[Any]], space: gym.Space[Any], name: str, row: int) -> Any:
    """Return one observation of a space, of columns."""
    if isinstance(space, gym.spaces.Dict):
        return {key: _nest(columns, part, f"{name}.{key}", row) for key, part in space.items()}
    return columns[name][row]


def _to_bytes(observation: Any, space: gym.Space[Any]) -> bytes:
    if isinstance(space, gym.spaces.Dict):
        parts = ((name, _to_bytes(observation[name], space[name])) for name in sorted(space.spaces))
        return b"".join(repr(name).encode() + part for name, part in parts)
    return _write_shape(space.shape) + np.asarray(observation, dtype=space.dtype).tobytes()


@lru_cache
def _write_shape(shape: tuple[int, ...] | None) -> bytes:
    # No number has no axis here; ascontiguousarray() gave it one, and older runs hold such digests.
    return repr(shape or (1,)).encode()
