"""Safetensors files that whence wrote: their tensors, and the JSON document in their header."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from whence.errors import WhenceError, first_line

CHANGED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What the contents of a file raise, where they are used, that are not those that whence wrote."""


def read_tensor_file(path: str | Path, error: type[WhenceError]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the texts of a file's header and its tensors, by name.

    Args:
        path: the file.
        error: the class of the error.

    Raises:
        WhenceError: the file is not there, is damaged, or holds tensors that torch does not have; of the class `error`.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (*CHANGED, OSError, SafetensorError) as broken:
        raise error(f"{path} cannot be read as safetensors: {first_line(broken)}") from None


def parse_document(path: str | Path, text: str, error: type[WhenceError]) -> dict[str, Any]:
    """Return the JSON object in a file's header.

    Args:
        path: the file, for the message.
        text: the object's text.
        error: the class of the error.

    Raises:
        WhenceError: the text is no JSON object; of the class `error`.
    """
    try:
        document = json.loads(text)
    except (RecursionError, ValueError) as broken:
        raise error(f"The header of {path} is not readable as JSON: {broken}. Restore the file.") from None
    if not isinstance(document, dict):
        raise error(f"The header of {path} holds {type(document).__name__}, and an object is needed. Restore the file.")
    return document
