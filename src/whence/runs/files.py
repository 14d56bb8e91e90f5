"""The files of run directories: written whole, refusals of the system explained, one writer at a time."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
from filelock import BaseFileLock, FileLock, Timeout
from safetensors import SafetensorError

from whence.errors import RunDirectoryError, first_line
from whence.guards import write_atomically

LOCK = ".lock"
"""The name of the file that the writer of a directory locks."""


@contextmanager
def write_run_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which becomes the run's file `path` on a clean exit; see `write_atomically`.

    Raises:
        RunDirectoryError: the system refuses to write; the message says why and what to do.
    """
    with explain_write_errors(path), write_atomically(path) as temporary:
        yield temporary


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Raise what the system refuses while something is written to `path` as a `RunDirectoryError`."""
    try:
        yield
    except (OSError, SafetensorError, pl.exceptions.PolarsError) as refusal:
        number = _system_error_number(refusal)
        if number is None and not isinstance(refusal, OSError):
            raise
        remedy = (
            "Free space on that disk, or choose a directory on another one."
            if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            else "Choose a directory that you may write to, or change the permissions of this one."
        )
        raise RunDirectoryError(f"{path} cannot be written: {system_reason(refusal)}. {remedy}") from refusal


def _system_error_number(error: Exception) -> int | None:
    """Return the system's number of an error; safetensors and Polars mention it in the text of their own errors."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = re.search(r"\(os error (\d+)\)|Os \{ code: (\d+)", str(error))
    return int(match[1] or match[2]) if match else None


def system_reason(error: Exception) -> str:
    """Return why the system refused, for people."""
    number = _system_error_number(error)
    if number is None:
        return first_line(error)
    kind = type(OSError(number, ""))  # such as PermissionError
    return f"{os.strerror(number)} ({errno.errorcode.get(number, number) if kind is OSError else kind.__name__})"


@contextmanager
def lock_directory(directory: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a directory, which is made if it is missing; a process that is killed loses it.

    Args:
        directory: the directory; the file `.lock` in it is locked.
        wait: wait until it has been released.

    Raises:
        RunDirectoryError: the lock is held already, or the directory cannot be written.
    """
    lock = _acquire(directory, wait=wait)
    try:
        yield
    finally:
        lock.release()


def _acquire(directory: Path, *, wait: bool) -> BaseFileLock:
    with explain_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        # Not of this thread only: a training may be taken up again in another one.
        lock = FileLock(directory / LOCK, thread_local=False)
        try:
            lock.acquire(blocking=wait)
        except Timeout:
            raise RunDirectoryError(
                f"Another process is writing to {directory}. Wait until it has ended, or choose another directory."
            ) from None
    return lock


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
    return all(_is_leftover(file) or file.name == LOCK for file in folder.iterdir())


def remove_leftovers(path: Path) -> None:
    """Delete what processes left that were killed while they wrote."""
    with explain_write_errors(path):
        for file in (*path.glob(".*.tmp"), *path.glob("*/.*.tmp")):
            if file.is_file():
                file.unlink()


def _is_leftover(file: Path) -> bool:
    """Return whether a file was left by a process that was killed inside `write_atomically`."""
    return file.name.startswith(".") and file.name.endswith(".tmp")


class WriterLock:
    """The right to write a run directory, which one process has at a time; a process that is killed loses it.

    Inside a process the latest lock of a directory holds: a cell of a notebook that was broken off does not stand in
    the way of its next execution.

    Args:
        directory: the directory; made if it is missing.

    Raises:
        RunDirectoryError: another process holds the lock, or the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._key = directory.resolve()
        if (older := _HELD.get(self._key)) is not None:
            older.release()
        self._lock = _acquire(directory, wait=False)
        _HELD[self._key] = self

    @property
    def held(self) -> bool:
        """Whether this lock still holds: it was not released, and no later one of this process took its place."""
        return _HELD.get(self._key) is self

    def release(self) -> None:
        """Let others write; a lock that no longer holds is left alone."""
        if self.held:
            del _HELD[self._key]
            self._lock.release()


_HELD: dict[Path, WriterLock] = {}
