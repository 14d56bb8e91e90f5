"""Files that are written whole or not at all, and read only if they are files."""

import errno
import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from whence.core.errors import RunDirectoryError


def require_file(path: Path) -> Path:
    """Return the path of a file to read; raise an `OSError` if it is no regular one: a pipe's reader waits for ever."""
    if not stat.S_ISREG(mode := path.stat().st_mode):
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "it is no regular file", str(path))
    return path


@contextmanager
def write_atomically(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it to `path` on a clean exit, remove it if something raises.

    A reader sees the old file or the whole new one, whenever the process is killed or the power is cut; after a cut the
    old one, until the folder was flushed. The new file has the mode that the process's umask gives, whichever mode its
    writer chose.

    Raises:
        RunDirectoryError: the system refuses to write; the message says why and what to do.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.unlink(missing_ok=True)
            temporary.touch(exist_ok=False)  # a link of this name, which someone put there, is not followed
            mode = stat.S_IMODE(temporary.stat().st_mode)
            yield temporary
            temporary.chmod(mode)  # safetensors makes its files readable by their owner only
            _flush(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def flush_to_disk(*paths: Path) -> None:
    """Wait until files' contents and folders' names are on disk; together they take little longer than one of them."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(_flush, paths))


def _flush(path: Path) -> None:
    with suppress(PermissionError):  # Windows opens no folders, and flushes what it may write
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """Write a file of JSON as `write_atomically` does."""
    with write_atomically(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Raise what the system refuses while something is written to `path` as a `RunDirectoryError`."""
    try:
        yield
    except (OSError, SafetensorError) as refusal:
        reason = getattr(refusal, "strerror", None) or str(refusal)
        remedy = "Free space on that disk, or choose a directory that you may write to."
        if getattr(refusal, "errno", None) in (errno.EMFILE, errno.ENFILE):
            remedy = "Raise the limit of open files (ulimit -n 8192), or run fewer environments or trainings at a time."
        raise RunDirectoryError(f"{path} cannot be written: {reason}. {remedy}") from refusal
