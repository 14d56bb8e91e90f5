"""Plain JSON: values exactly and back, settings as data that is stored and compared, and both as words for people."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from hashlib import blake2b
from os import PathLike, fspath
from typing import Any, TypeAlias

import numpy as np

from whence.core.errors import WhenceError

Special: TypeAlias = Callable[[Any], Any]
"""Encodes a value of a kind that JSON lacks, or decodes what it was encoded as; None: it is of no such kind."""


def encode(value: Any, special: Special | None = None) -> Any:
    """Return a value in JSON types, from which `decode` makes it again, in the same type.

    Numbers that are not finite, tuples, dicts and NumPy's arrays and numbers become dicts with a key of their kind.

    Raises:
        TypeError: it holds something else, which `special` does not encode either.
    """
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if special is not None and (encoded := special(value)) is not None:
        return encoded
    inner = partial(encode, special=special)
    match value:
        case bool() | int() | str():
            return value
        case float():
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        case list():
            return [*map(inner, value)]
        case tuple():
            return {"tuple": [*map(inner, value)]}
        case Mapping() if all(type(key) is str for key in value):
            return {"dict": {key: inner(entry) for key, entry in value.items()}}
        case np.ndarray() | np.generic() if value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
            return {"array": inner(value.tolist()), "dtype": str(value.dtype)}
    raise TypeError(f"JSON holds plain values, arrays, and dicts with text as keys, and no {type(value)}: {value!r}.")


def decode(value: Any, special: Special | None = None) -> Any:
    """Return the value that `encode` put into JSON types; what `special` does not know either stays as it is."""
    inner = partial(decode, special=special)
    match value:
        case list():
            return [*map(inner, value)]
        case {"float": number}:
            return float(number)
        case {"tuple": entries}:
            return tuple(map(inner, entries))
        case {"dict": entries}:
            return {key: inner(entry) for key, entry in entries.items()}
        case {"array": entries, "dtype": dtype}:
            return np.array(inner(entries), dtype=dtype)[()]
        case dict() if special is not None and (decoded := special(value)) is not None:
            return decoded
    return value


def parse_document(source: str | PathLike[str], text: str, error: type[WhenceError]) -> dict[str, Any]:
    """Return the JSON object that a file, or another `source`, holds; other text is an error of the class `error`."""
    try:
        document = json.loads(text)
    except (RecursionError, ValueError) as broken:
        raise error(f"{source} cannot be read as JSON: {broken}. Restore the file.") from None
    if not isinstance(document, dict):
        raise error(f"{source} holds {type(document).__name__} as JSON, and an object is needed. Restore the file.")
    return document


def describe(value: Any) -> Any:
    """Return a setting as data in JSON types, equal whenever the setting is the same.

    Tuples are lists, and numbers that are not finite are texts, which `read_numbers` reads. Enums are their values.
    Functions and classes are their names. Other objects are their texts without memory addresses.
    """
    if isinstance(value, Enum):
        return describe(value.value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | str):  # or of a subclass, which JSON has none of
        return int(value) if isinstance(value, int) else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): describe(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [*map(describe, value)]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, partial):
        return {"call": describe(value.func), "args": describe(value.args), "kwargs": describe(value.keywords)}
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    is_wide = isinstance(value, np.longdouble | np.clongdouble)
    if hasattr(value, "tolist") and not is_wide:  # arrays, tensors, and their numbers
        return describe(value.tolist())
    if is_dataclass(value):
        return {one.name: describe(getattr(value, one.name)) for one in fields(value)}
    return strip_addresses(repr(value))


_LONGEST = 200  # characters of a part's setting that its description holds in full


def describe_part(kind: str, part: Any) -> dict[str, Any]:
    """Return a rule, a target or an objective as data: {"rule": "IIF", "drop": 0.125, ...}.

    A part's `describe()` gives its settings; otherwise they are a dataclass's fields. A long setting is a digest. What
    is not whence's has its module's name, too.
    """
    named = part if hasattr(part, "__qualname__") else type(part)
    is_whences = named.__module__.startswith("whence.")
    name = named.__qualname__ if is_whences else f"{named.__module__}.{named.__qualname__}"
    if hasattr(part, "describe") and named is not part:
        settings = part.describe()
    elif is_dataclass(part) and named is not part:
        settings = {one.name: getattr(part, one.name) for one in fields(part) if one.repr}
    else:
        settings = {} if named is part or is_whences else {"text": repr(part)}
    return {kind: name, **{key: _describe_setting(kind, value) for key, value in settings.items()}}


def describe_scoring(rule: Any, target: Any, objective: Any) -> dict[str, Any]:
    """Return how records are scored and selected as data; an objective that is None is the model's own."""
    parts = {"rule": rule, "target": target, "objective": objective}
    return {kind: None if part is None else describe_part(kind, part) for kind, part in parts.items()}


def _describe_setting(kind: str, value: Any) -> Any:
    if hasattr(value, "needs_influence"):  # the rule that another is like
        return describe_part(kind, value)
    if kind == "rule" and callable(value):
        return {"schedule": "function", "name": describe(value)}
    if len(text := json.dumps(described := describe(value))) <= _LONGEST:
        return strip_addresses(described) if isinstance(described, str) else described
    return {"digest": blake2b(text.encode(), digest_size=6).hexdigest()}


def read_numbers(value: Any) -> Any:
    """Return data of `describe` with the numbers that are not finite, which JSON holds as text."""
    if isinstance(value, Mapping):
        return {key: read_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [*map(read_numbers, value)]
    return float(value) if value in ("inf", "-inf", "nan") else value


_KINDS = "rule", "target", "objective"
_USUAL = {"unit": "record"}
"""Settings of rules and targets that people are not shown."""


def show(value: Any) -> Any:
    """Return a part, a schedule or a wrapper of a run's configuration as people read it; other values as they are."""
    if isinstance(value, list):
        return [*map(show, value)]
    kind = next(iter(value), None) if isinstance(value, Mapping) else None
    if kind in _KINDS:
        return str(value[kind]) + _show_settings(value)
    if kind == "digest":
        return f"<digest {value[kind]}>"
    if kind == "schedule":
        what = value.get("name", f"{value[kind]}{_show_settings(value)}")
        return f"a schedule of the code {value['code']}" if "code" in value else f"a schedule: {what}"
    if kind == "class" and "kwargs" not in value:
        arguments = ", ".join(str(entry) for key, entry in value.items() if key != kind)
        return str(value[kind]) + (f"({arguments})" if arguments else "")
    return value


def _show_settings(part: Mapping[str, Any]) -> str:
    settings = list(part.items())[1:]
    shown = [(name, value) for name, value in settings if value is not None and _USUAL.get(name) != value]
    texts = [f"{name}={show(value) if isinstance(value, Mapping) else repr(value)}" for name, value in shown]
    return f"({', '.join(texts)})"


def strip_addresses(text: str) -> str:
    """Return an object's text without memory addresses, which differ from run to run."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)
