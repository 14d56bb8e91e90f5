"""Files that are written whole or not at all, with a checksum where their format has a place for one."""

import errno
import hashlib
import json
import mmap
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from whence.core.errors import RunDirectoryError


@contextmanager
def write_atomically(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; rename it to `path` on a clean exit, remove it if something raises.

    A reader sees the old file or the whole new one, whenever the process is killed. The new file has the mode that the
    process's umask gives, whichever mode its writer chose. If its metadata hold `CHECKSUM`, they get its checksum.

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
            _write_checksum(temporary)
            temporary.chmod(mode)  # safetensors makes its files readable by their owner only
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


CHECKSUM = {"checksum": f"blake2b:{'0' * 32}"}
"""Metadata of a safetensors or Parquet file, in whose place `write_atomically` puts the checksum of all other bytes."""

# As safetensors and Parquet write the name and the value; in a text of the user's, quotes are escaped.
_CHECKSUM = re.compile(rb'checksum(?:":"|\x18\x28)blake2b:(.{32})', re.DOTALL)


def _write_checksum(path: Path) -> None:
    if (checksum := _find_checksum(path)) is not None:
        with path.open("r+b") as file:
            file.seek(checksum[0])
            file.write(checksum[2])


def has_changed(path: str | Path) -> bool:
    """Return whether a file has other bytes than its checksum says; one without a checksum has not."""
    checksum = _find_checksum(path)
    return checksum is not None and checksum[1] != checksum[2]


def _find_checksum(path: str | Path) -> tuple[int, bytes, bytes] | None:
    """Return the place of a file's checksum, the checksum there, and that of all other bytes; None if it has none."""
    if not os.path.getsize(path):  # which cannot be mapped
        return None
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if (mark := _CHECKSUM.search(content)) is None:
            return None
        with memoryview(content) as view:
            digest = hashlib.blake2b(view[: mark.start(1)], digest_size=16)
            digest.update(view[mark.end(1) :])
        return mark.start(1), mark[1], digest.hexdigest().encode()


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
