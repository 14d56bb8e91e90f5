"""Attributes of wrappers: read in plain kinds, and set again."""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np

_PLAIN = bool, int, float, str, type(None)
_PACKAGES = "stable_baselines3.", "gymnasium.", "sb3_contrib."
_LEFT_ALONE = frozenset(
    (
        "env",
        "venv",
        "envs",
        "spec",
        "metadata",
        "render_mode",
        "results_writer",
        "t_start",
        "_saved_kwargs",
        "_cached_spec",
        "_metadata",
        "_action_space",
        "_observation_space",
    )
)


def read_attributes(thing: Any) -> dict[str, Any]:
    """Return a wrapper's attributes of plain kinds, for a checkpoint: numbers, texts, arrays, generators.

    Lists, tuples, dicts, counters and deques of these are read, too, and so are the attributes of small objects of SB3
    and Gymnasium, such as running statistics. What is wrapped, spaces and other objects are left out.
    """
    attributes = {name: _read(value) for name, value in vars(thing).items() if name not in _LEFT_ALONE}
    return {name: entry for name, entry in attributes.items() if entry is not None}


def load_attributes(thing: Any, attributes: Mapping[str, Any]) -> list[str]:
    """Set the attributes that `read_attributes` returned, as far as the wrapper has them.

    Returns:
        The names of those that could not be set: each holds something of another kind.
    """
    # VecNormalize declares its last observation, and sets it at the first reset only.
    names = {*vars(thing), *getattr(type(thing), "__annotations__", ())}
    return [name for name, entry in attributes.items() if name in names and not _load(thing, name, entry)]


def _read(value: Any) -> dict[str, Any] | None:
    """Return a value with its kind; None if it is of no plain kind."""
    if is_plain(value):
        return {"plain": value}
    if isinstance(value, deque):
        return {"deque": list(value), "maxlen": value.maxlen} if is_plain(list(value)) else None
    if isinstance(value, Counter | defaultdict):
        return {"counts": dict(value)} if is_plain(dict(value)) else None
    if isinstance(value, np.random.Generator):
        return {"generator": value.bit_generator.state}
    if _is_readable_object(value):
        return {"object": read_attributes(value)}
    if isinstance(value, Mapping) and value and all(map(_is_readable_object, value.values())):
        return {"objects": {key: read_attributes(part) for key, part in value.items()}}
    return None


def _load(thing: Any, name: str, entry: Mapping[str, Any]) -> bool:
    """Set an attribute; return whether it could be."""
    if "deque" in entry or "plain" in entry:
        setattr(thing, name, entry["plain"] if "plain" in entry else deque(entry["deque"], maxlen=entry["maxlen"]))
        return True
    # The others are loaded into what the wrapper holds.
    present = vars(thing).get(name)
    (kind,) = entry
    if kind not in (_read(present) or {}):
        return False
    if kind == "object":
        return not load_attributes(present, entry["object"])
    if kind == "objects":
        return all(key in present and not load_attributes(present[key], part) for key, part in entry["objects"].items())
    if kind == "generator":
        present.bit_generator.state = entry["generator"]
    else:
        present.clear()
        present.update(entry["counts"])
    return True


def is_plain(value: Any) -> bool:
    """Return whether a checkpoint holds a value and gives it back in the same type, which no subclass would be."""
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return value.dtype.kind in "biuf" and value.dtype.itemsize <= 8 and value.dtype.isnative
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(is_plain, value.values()))
    return type(value) in _PLAIN


def _is_readable_object(value: Any) -> bool:
    kind = type(value)
    is_small = kind.__module__.startswith(_PACKAGES) and not any(hasattr(kind, name) for name in ("step", "contains"))
    return is_small and hasattr(value, "__dict__")
