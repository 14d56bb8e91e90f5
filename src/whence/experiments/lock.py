"""The lock of a directory: one writer at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whence.errors import RunDirectoryError


@contextmanager
def lock_directory(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a directory, which is made if it is not there; the system releases it after a kill, too.

    Args:
        path: the directory; its lock is the file `.lock`.
        wait: wait until another process has released it.

    Raises:
        RunDirectoryError: another process holds the lock, or nothing can be written to the directory.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("w")
    except OSError as failure:
        raise RunDirectoryError(
            f"{path} cannot be written to ({failure.strerror}: {failure.filename}). Choose another directory."
        ) from None
    with lock:
        if os.name == "posix":
            import fcntl

            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise RunDirectoryError(
                    f"Another sweep is writing to {path}. Wait until it has ended, or choose another directory."
                ) from None
        yield
