"""Numbers in infos, as columns of a round's table: reward terms, distances, whatever comes with a step."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from numbers import Number
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from torch import Tensor

from whence.core import to_numpy
from whence.sb3.episodes.resets import DIGEST, STATE

log = logging.getLogger("whence")

MOST_INFOS = 32
"""How many numbers of the user's `infos` a round's table holds."""

_LEFT_OUT = (
    "The environments' infos hold numbers that this run does not store: %s. A round stores up to %d keys that are "
    "texts, with one number each."
)

_NUMBERS = bool, int, float, np.bool_, np.integer, np.floating
_SB3S = "TimeLimit.truncated", "episode", "terminal_observation"
_OTHERS = frozenset((*_SB3S, "final_observation", "final_obs", "final_info", DIGEST, STATE))
"""The keys of infos that are SB3's, Gymnasium's or whence's."""


class InfoNumbers:
    """The numbers in the infos of steps that were taken, each environment's own.

    `left_out` are the keys of infos that are no columns, though they hold numbers.
    """

    def __init__(self) -> None:
        self._steps: list[list[dict[str, Any]]] = []
        self.left_out: set[Any] = set()

    def add(self, infos: Sequence[Mapping[str, Any]]) -> None:
        """Read the infos of a step, one for each environment."""
        self._steps.append([{} if _OTHERS.issuperset(info) else self._select_numbers(info) for info in infos])

    def make_columns(self) -> list[pl.Series]:
        """Return a column `info.KEY` for each key, null where an info lacks it, environment by environment."""
        rows = [step[env] for env in range(len(self._steps[0])) for step in self._steps]
        keys = list(dict.fromkeys(key for row in rows for key in row))
        self.left_out.update(keys[MOST_INFOS:])
        return [_make_numbers(f"info.{key}", [row.get(key) for row in rows]) for key in keys[:MOST_INFOS]]

    def _select_numbers(self, info: Mapping[str, Any]) -> dict[str, Any]:
        numbers = {}
        for key, value in info.items():
            if key in _OTHERS:
                continue
            number = _read_number(value)
            if number is not None and _is_name(key):
                numbers[key] = number
            elif key not in self.left_out and (number is not None or _holds_numbers(value)):
                self.left_out.add(key)
        return numbers


def warn_of_infos(left_out: set[Any], logged: set[str]) -> None:
    """Log the keys of infos that no column holds, each once; those that were logged are added to `logged`."""
    if names := {f"info {key!r}" for key in left_out} - logged:
        logged |= names
        log.warning(_LEFT_OUT, ", ".join(name.removeprefix("info ") for name in sorted(names)), MOST_INFOS)


class InfoArrays:
    """The numbers in the infos of a batch of environments, as Isaac Lab's: arrays or tensors (n,), under any mapping.

    `left_out` are the keys that are no columns, though they hold numbers, such as those of means over environments.
    """

    def __init__(self, count: int) -> None:
        self._count, self._steps = count, list[dict[str, NDArray[Any]]]()
        self.left_out: set[Any] = set()

    def add(self, infos: Mapping[str, Any]) -> None:
        """Read the infos of a step."""
        self._steps.append(dict(self._select_arrays(infos)))

    def make_columns(self) -> list[pl.Series]:
        """Return a column `info.KEY` for each key, null where a step lacks it, environment by environment."""
        keys = list(dict.fromkeys(key for step in self._steps for key in step))
        self.left_out.update(keys[MOST_INFOS:])
        return [self._make_column(key) for key in keys[:MOST_INFOS]]

    def _make_column(self, key: str) -> pl.Series:
        missing = np.full(self._count, np.nan)
        steps = np.stack([step.get(key, missing) for step in self._steps], axis=1).ravel()
        lacks = pl.Series(np.tile([key not in step for step in self._steps], self._count))
        return pl.Series(f"info.{key}", steps).set(lacks, None)

    def _select_arrays(self, infos: Mapping[str, Any]) -> Iterator[tuple[str, NDArray[Any]]]:
        for key, value in infos.items():
            if key in _OTHERS or value is None:
                continue
            if isinstance(value, Mapping):
                yield from self._select_arrays(value)
            elif np.prod(getattr(value, "shape", ())) == self._count and _is_name(key) and _holds_numbers(value):
                yield key, np.asarray(to_numpy(value.detach()) if isinstance(value, Tensor) else value).flatten()
            elif key not in self.left_out and _holds_numbers(value):
                self.left_out.add(key)


def _read_number(value: Any) -> Any:
    """Return a number, or the only one of an array; None if it is none that a column of floats could hold."""
    with suppress(Exception):  # several numbers, one that is too large, or what only looks like a number
        number = value if isinstance(value, _NUMBERS) else value.item()
        float(number)
        return number if isinstance(number, _NUMBERS) else None
    return None


def _holds_numbers(value: Any) -> bool:
    """Return whether something that is no single number holds numbers, by the first that it holds."""
    with suppress(Exception):  # a user's object may raise anything, and a list hold itself
        if isinstance(value, Mapping | list | tuple):
            return _holds_numbers(next(iter(value.values() if isinstance(value, Mapping) else value), None))
        return isinstance(value, Number | Tensor) or value.dtype.kind in (*"biufc",)
    return False


@lru_cache(maxsize=1024)
def _is_name(key: object) -> bool:
    """Return whether a key can name a column, which surrogates cannot."""
    return isinstance(key, str) and key.encode(errors="ignore").decode() == key


def _make_numbers(name: str, values: list[Any]) -> pl.Series:
    """Return a column of numbers, with nulls where there is none."""
    present = [value for value in values if value is not None]
    kind: type = float
    if all(isinstance(value, bool | np.bool_) for value in present):
        kind = bool
    elif all(isinstance(value, int | np.integer) and -(2**63) <= value < 2**63 for value in present):
        kind = int
    return pl.Series(name, [None if value is None else kind(value) for value in values])
