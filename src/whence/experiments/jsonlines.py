"""Files of JSON Lines: an object a line, in order of its keys."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whence.errors import RunDirectoryError
from whence.guards import write_atomically


def read_lines(path: Path, keys: Sequence[str]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the objects of a file by the values of some of their keys; none if there is no such file.

    Args:
        path: the file.
        keys: names whose values are texts or whole numbers, and together belong to one line alone.

    Raises:
        RunDirectoryError: the file cannot be read, or a line of it is damaged or there twice; the line is named.
    """
    try:
        texts = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as failure:
        raise RunDirectoryError(f"{path} cannot be read ({failure}). Restore it.") from None
    objects: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, text in enumerate(texts[:-1] if texts[-1] == "" else texts, start=1):
        values = _parse_line(path, number, text)
        key = tuple(values.get(name) for name in keys)
        if not all(type(value) in (str, int) for value in key):
            raise RunDirectoryError(f"{path}, line {number}, lacks {' or '.join(keys)}. Delete the line or restore it.")
        if key in objects:
            raise RunDirectoryError(
                f"{path}, line {number}, has the {' and '.join(keys)} of a line above it. Delete one of the two."
            )
        objects[key] = values
    return objects


def _parse_line(path: Path, number: int, text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (RecursionError, ValueError) as failure:
        raise RunDirectoryError(
            f"{path}, line {number}, is not readable as JSON ({failure}). Delete the line or restore it."
        ) from None
    if not isinstance(values, dict):
        raise RunDirectoryError(f"{path}, line {number}, holds no JSON object. Delete the line or restore it.")
    return values


def put_line(path: Path, values: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Put an object into a file: in place of the line with the same keys, else where the order of keys has it.

    The file is replaced whole, so that a reader sees all of the old one or all of the new one. Whoever writes holds
    the lock of the directory, since the last of two writers would undo what the first has put.

    Args:
        path: the file, which need not be there.
        values: the object; its numbers are finite.
        keys: see `read_lines`.

    Raises:
        RunDirectoryError: see `read_lines`.
    """
    objects: dict[tuple[Any, ...], Mapping[str, Any]] = {**read_lines(path, keys)}
    objects[tuple(values[name] for name in keys)] = values
    lines = [json.dumps(objects[key], allow_nan=False) for key in sorted(objects)]
    with write_atomically(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
