"""The files of run directories: nothing written through links, no leftovers, and tensors read."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from whence.core import RunDirectoryError, WhenceError, explain_write_errors, first_line
from whence.runs.locks import LOCK


def check_links(path: Path) -> None:
    """Refuse to write into a run directory of which a folder is a link that leads elsewhere.

    whence deletes and replaces files in a run's folders; those of another directory are not a run's.

    Raises:
        RunDirectoryError: names the link and where it leads.
    """
    for folder in path.iterdir():
        if folder.is_symlink() and folder.is_dir() and not folder.resolve().is_relative_to(path.resolve()):
            raise RunDirectoryError(
                f"{folder} is a link to {folder.resolve()}, outside of the run, and whence would write and delete "
                "files there. Put the folder itself in its place; the run directory as a whole may be a link."
            )


def is_empty(folder: Path) -> bool:
    """Return whether a directory holds nothing but leftovers."""
    return all(file.match(".*.tmp") or file.name == LOCK for file in folder.iterdir())


def remove_leftovers(path: Path) -> None:
    """Delete what processes left that were killed while they wrote."""
    with explain_write_errors(path):
        for file in (*path.glob(".*.tmp"), *path.glob("*/.*.tmp")):
            file.unlink()


CHANGED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What the contents of a file raise, where they are used, that are not those that whence wrote."""


def read_tensor_file(path: str | Path, error: type[WhenceError]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the texts of a file's header and its tensors, by name.

    Raises:
        WhenceError: the file is not there, is damaged, or holds tensors that torch does not have; of the class `error`.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (*CHANGED, OSError, SafetensorError) as broken:
        raise error(f"{path} cannot be read as safetensors: {first_line(broken)}") from None


def parse_document(path: str | Path, text: str, error: type[WhenceError]) -> dict[str, Any]:
    """Return the JSON object in a file's header; the text of no object is an error of the class `error`."""
    try:
        document = json.loads(text)
    except (RecursionError, ValueError) as broken:
        raise error(f"The header of {path} is not readable as JSON: {broken}. Restore the file.") from None
    if not isinstance(document, dict):
        raise error(f"The header of {path} holds {type(document).__name__}, and an object is needed. Restore the file.")
    return document
