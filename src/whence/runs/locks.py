"""Locks of directories: one writer at a time, and none that outlives its process."""

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from filelock import BaseFileLock, FileLock, Timeout

from whence.core import RunDirectoryError, explain_write_errors

log = logging.getLogger("whence")

LOCK = ".lock"
"""The name of the file that the writer of a directory locks."""

_WITHOUT_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF
"""What file systems say that have no locks, such as those of clusters."""


class NoLock:
    """Stands in for a lock on a file system that has none: it tells writers of this process apart, and no others."""

    is_locked = True

    def release(self) -> None:
        """Let another writer of this process write."""
        self.is_locked = False


Lock: TypeAlias = BaseFileLock | NoLock

_WRITERS: dict[Path, Lock] = {}
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


def _acquire(directory: Path, *, wait: bool = False) -> Lock:
    with explain_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        # The lock is not the thread's: a training may go on in another one.
        lock = FileLock(directory / LOCK, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire(blocking=wait)
        except Timeout:
            raise RunDirectoryError(
                f"Another process is writing to {directory}. Wait until it has ended, or choose another directory."
            ) from None
        except OSError as failure:
            if failure.errno not in _WITHOUT_LOCKS:
                raise
            log.warning(
                "The file system of %s has no locks (%s), so whence cannot tell whether another process writes there. "
                "Let one process at a time write to it.",
                directory,
                failure.strerror,
            )
            return NoLock()
    return lock


def lock_run(directory: Path) -> Lock:
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
