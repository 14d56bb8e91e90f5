"""A run's directory on its way between machines: what changed in it, as bytes, and how that is put in place."""

import io
import os
import shutil
import zipfile
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from whence.errors import RunDirectoryError
from whence.guards import explain_write_errors
from whence.runs.files import LOCK

Stamp: TypeAlias = tuple[int, int, int]
"""What differs between two files of one name: inode, size and the time of the last change."""


def list_files(folder: Path) -> dict[str, Stamp]:
    """Return the files of a directory by their relative names; without its lock and what is half written.

    A directory that is not there has no files.
    """
    stamps = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != LOCK and not (path.name.startswith(".") and path.name.endswith(".tmp")):
            status = path.stat()
            stamps[path.relative_to(folder).as_posix()] = status.st_ino, status.st_size, status.st_mtime_ns
    return stamps


def pack_files(folder: Path, names: Collection[str]) -> bytes:
    """Return files of a directory as a zip archive; they are not compressed, since Parquet files are already."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED, strict_timestamps=False) as archive:
        for name in names:
            archive.write(folder / name, name)
    return content.getvalue()


def unpack_files(archive: bytes, folder: Path) -> None:
    """Write the files of an archive into a directory; a file that is there is replaced, not written into.

    Raises:
        RunDirectoryError: the archive is damaged, or has a file whose place is outside of the directory.
    """
    root = folder.resolve()
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as stored:
            for name in stored.namelist():
                target = _find_place(root, name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)  # it may be a hard link to a file of another directory
                with stored.open(name) as source, target.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
    except zipfile.BadZipFile as damage:
        raise RunDirectoryError(
            f"What a node sent for {folder} is damaged ({damage}). Give the command again: finished runs are kept."
        ) from None


def _find_place(root: Path, name: str) -> Path:
    """Return the place of an archive's file, which has to be below the directory."""
    target = (root / name).resolve()
    if target == root or not target.is_relative_to(root):
        raise RunDirectoryError(
            f"What a node sent for {root} has a file {name!r}, whose place is outside of it. Nothing was written "
            "there; check who may reach the cluster."
        )
    return target


def pack_changes(folder: Path, before: Mapping[str, Stamp]) -> tuple[dict[str, Stamp], bytes, list[str]]:
    """Return what changed in a directory since `list_files` or `pack_changes` returned `before`.

    Returns:
        The files as they are now, an archive of those that are new or changed, and the names of those that are gone.
    """
    now = list_files(folder)
    changed = [name for name, stamp in now.items() if before.get(name) != stamp]
    return now, pack_files(folder, changed), [name for name in before if name not in now]


def apply_changes(path: Path, archive: bytes, removed: Collection[str]) -> None:
    """Bring a directory up to date with what `pack_changes` returned elsewhere, as a whole.

    The new directory is made next to the old one and takes its place by renaming. Killed at any moment, `path` is the
    old directory, the new one, or (between two renamings) missing, so that a run starts anew.

    Args:
        path: the directory; it may be missing.
        archive: the files that are new or changed.
        removed: the names of those that are gone.

    Raises:
        RunDirectoryError: the archive is damaged, or the system refuses to write.
    """
    incoming, replaced = path.with_name(f".{path.name}.incoming"), _replaced_path(path)
    with explain_write_errors(path):
        for leftover in (incoming, replaced):  # of a process that was killed here
            shutil.rmtree(leftover, ignore_errors=True)
        incoming.mkdir(parents=True)
        for name in list_files(path):
            if name not in removed:
                (incoming / name).parent.mkdir(parents=True, exist_ok=True)
                _link(path / name, incoming / name)
        unpack_files(archive, incoming)
        if path.exists():
            path.rename(replaced)
        incoming.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_copy(path: Path) -> None:
    """Remove what `apply_changes` made; killed half-way, it leaves the directory or nothing under that name.

    Raises:
        RunDirectoryError: the system refuses to.
    """
    replaced = _replaced_path(path)
    shutil.rmtree(replaced, ignore_errors=True)
    with explain_write_errors(path):
        path.rename(replaced)
    shutil.rmtree(replaced, ignore_errors=True)


def _replaced_path(path: Path) -> Path:
    """Return where a directory lies until it is removed."""
    return path.with_name(f".{path.name}.replaced")


def _link(source: Path, target: Path) -> None:
    """Make a hard link, or a copy where the file system has none; whence replaces files and never writes into one."""
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)
