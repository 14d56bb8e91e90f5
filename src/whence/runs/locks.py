"""Locks of directories: one writer at a time, and none that outlives its process."""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from filelock import BaseFileLock, FileLock, Timeout

from whence.core import RunDirectoryError, explain_write_errors

log = logging.getLogger("whence")

LOCK = ".lock"
"""The name of the file that the writer of a directory locks."""

_LOOK = 0.2  # seconds that a writer waits for a lock

_WITHOUT_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF
"""What file systems say that have no locks, such as those of clusters."""


class NoLock:
    """Stands in for a lock on a file system that has none: it tells writers of this process apart, and no others."""

    is_locked = True

    def release(self) -> None:
        """Let another writer of this process write."""
        self.is_locked = False


Lock: TypeAlias = BaseFileLock | NoLock

_WRITERS: dict[Path, tuple[Lock, tuple[int, int] | None]] = {}
"""The latest lock that this process took of each run directory, and which file it is."""


_PROCESSES: set[int] = set()
"""Processes in which Polars was used, by their ids: a process that was forked from one of them has the set, too."""


def check_fork() -> None:
    """Refuse to use Polars in a process that was forked after it was used: it would wait for threads for ever."""
    if _PROCESSES and os.getpid() not in _PROCESSES:
        raise RunDirectoryError(
            "This process was forked from one that had read or written a run, and Polars' threads do not survive a "
            'fork. Start it by multiprocessing.get_context("spawn"), SubprocVecEnv(..., start_method="spawn") or '
            'DataLoader(..., multiprocessing_context="spawn").'
        )
    _PROCESSES.add(os.getpid())


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, which is made if missing; a `RunDirectoryError` if another process holds it."""
    lock = _acquire(directory)
    try:
        yield
    finally:
        lock.release()


def _acquire(directory: Path) -> Lock:
    with explain_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if (file := directory / LOCK).is_symlink():
            raise RunDirectoryError(f"{file} is a link to another file. Delete the link, and start again.")
        # The lock is not the thread's: a training may continue in another one.
        lock = FileLock(file, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire(timeout=_LOOK)  # a reader that looks whether a writer is there holds it for a moment
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

    A cell of a notebook that was broken off does not stand in the way of its next execution. See `lock_directory`.
    """
    check_fork()
    key = Path(os.path.realpath(directory))  # unlike resolve(), it leaves loops of links to what is refused below
    if key in _WRITERS:
        _WRITERS[key][0].release()
    lock = _acquire(directory)
    _WRITERS[key] = lock, _identify(directory)
    return lock


def is_written(directory: Path) -> bool | None:
    """Return whether a writer holds a directory's lock, of this process or another; None if that cannot be known."""
    file = directory / LOCK
    if file.is_symlink() or not file.is_file():
        return False
    lock = FileLock(file, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    except OSError:  # another user's directory, or a file system without locks
        return None
    lock.release()
    return False


def _identify(directory: Path) -> tuple[int, int] | None:
    """Return what tells the present lock file from others; it is open while it is locked, so no other one gets that."""
    try:
        status = (directory / LOCK).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check_writer(directory: Path, lock: Lock | None) -> None:
    """Refuse a writer of a run directory that another one has taken over, or that was deleted since it was locked.

    Without a lock it takes part in the writing of another one of this process, if there is one.
    """
    if lock is not None and not lock.is_locked:
        raise RunDirectoryError(
            f"{directory} is written by a later run of this process, which has taken it over. Start this one again."
        )
    latest, identity = _WRITERS.get(Path(os.path.realpath(directory)), (None, None))
    if latest is not None and latest.is_locked and _identify(directory) != identity:
        raise RunDirectoryError(
            f"{directory} was deleted, moved or replaced while this process wrote to it, so it writes no more. Start "
            "this training again, in a directory of its own."
        )
