"""The files of run directories: one writer at a time, nothing written through links, and tensors read."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout
from safetensors import SafetensorError, safe_open
from torch import Tensor

from whence.core import RunDirectoryError, WhenceError, explain_write_errors, first_line

LOCK = ".lock"
"""The name of the file that the writer of a directory locks."""

_WRITERS: dict[Path, BaseFileLock] = {}
"""The latest lock that this process took of each run directory."""


@contextmanager
def lock_directory(directory: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a directory, which is made if it is missing; a process that is killed loses it.

    Raises:
        RunDirectoryError: the lock is held already, unless it is to be waited for; or the directory cannot be written.
    """
    lock = _acquire(directory, wait=wait)
    try:
        yield
    finally:
        lock.release()


def _acquire(directory: Path, *, wait: bool = False) -> BaseFileLock:
    with explain_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        # The lock is not the thread's: a training may go on in another one.
        lock = FileLock(directory / LOCK, thread_local=False)
        try:
            lock.acquire(blocking=wait)
        except Timeout:
            raise RunDirectoryError(
                f"Another process is writing to {directory}. Wait until it has ended, or choose another directory."
            ) from None
    return lock


def lock_run(directory: Path) -> BaseFileLock:
    """Lock a run directory for its writer, which takes it over from an earlier writer of this process.

    A cell of a notebook that was broken off does not stand in the way of its next execution.

    Raises:
        RunDirectoryError: see `lock_directory`.
    """
    key = directory.resolve()
    if (older := _WRITERS.get(key)) is not None:
        older.release()
    _WRITERS[key] = _acquire(directory)
    return _WRITERS[key]


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
