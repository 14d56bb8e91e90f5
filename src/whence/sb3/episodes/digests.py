"""Digests of observations, by which a run says whether the same was seen again."""

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
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
    content, begin = np.ascontiguousarray(column, dtype=space.dtype).tobytes(), _write_shape(space.shape)
    cuts = range(0, len(content) + 1, len(content) // len(column))
    digests = [blake2b(begin + content[at:end], digest_size=8).digest() for at, end in pairwise(cuts)]
    return np.frombuffer(b"".join(digests), "<u8").tolist()  # type: ignore[no-any-return]


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
