"""One run on a node of a cluster: the task that Ray starts there, and the files that travel between it and home."""

import logging
import os
import platform
import shutil
import tempfile
import time
import traceback
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import torch

from whence.experiments.kinds import read_config, runner_of
from whence.experiments.workers import describe_failure
from whence.guards import explain_write_errors
from whence.runs import LOCK, list_checkpoints

Files: TypeAlias = dict[str, bytes]
"""The contents of files by their names relative to a run's directory."""


def list_versions() -> dict[str, str]:
    """Return the versions that have to be the same everywhere; a torch for GPUs counts as the one for CPUs."""
    return {name: version(name).partition("+")[0] for name in ("whence", "torch")}


def train_on_node(
    queue: Any,
    sender: Any,
    settings: Mapping[str, Any],
    home: Path,
    files: Files,
    versions: Mapping[str, str],
    save_seconds: float,
) -> tuple[str, str] | None:
    """Train in a temporary directory of this machine, and send home what happens; this is the task that a node runs.

    Args:
        queue: Ray's queue of tuples: the sender, "round" and the rounds done; or the sender, "files", those that are
            new or changed, and the names of those that are gone.
        sender: what says at home which run this is.
        settings: the configuration, from `to_json`.
        home: the run's directory at home, for messages.
        files: what home has of the run.
        versions: of home's libraries.
        save_seconds: seconds from one copy of the unfinished run to the next.

    Returns:
        None, or what went wrong and its traceback.
    """
    torch.set_num_threads(1)
    logging.getLogger("whence").setLevel(logging.ERROR)
    if (here := list_versions()) != versions:
        return f"The node {platform.node()} has {here}, and home has {versions}. Install the same on both.", ""
    with tempfile.TemporaryDirectory(prefix="whence-") as scratch:
        folder = Path(scratch) / home.name
        apply_changes(folder, files, ())
        stamps, last_time = list_files(folder), time.monotonic()

        def send_changes() -> None:
            nonlocal stamps, last_time
            now = list_files(folder)
            changed = [name for name, stamp in now.items() if stamps.get(name) != stamp]
            gone = [name for name in stamps if name not in now]
            queue.put((sender, "files", read_files(folder, changed), gone))
            stamps, last_time = now, time.monotonic()

        def report(rounds: int, metrics: Mapping[str, Any]) -> None:
            queue.put((sender, "round", rounds))
            # A run goes on from a checkpoint only: a copy without one would have its rounds refused.
            has_checkpoint = list_checkpoints(folder) or any(folder.glob("trl/checkpoint-*"))
            if has_checkpoint and time.monotonic() - last_time >= save_seconds:
                send_changes()

        failure = None
        try:
            config = read_config(settings)
            runner_of(config).run(config, folder, report)
        except (Exception, SystemExit) as error:  # Ray would take an exit for a lost process, and start the run again.
            failure = describe_failure(error).replace(str(folder), str(home)), traceback.format_exc()
        send_changes()
    return failure


def list_files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of change of a directory's files, without its lock and what is half written.

    A directory that is not there has no files.
    """
    stamps = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != LOCK and not (path.name.startswith(".") and path.name.endswith(".tmp")):
            status = path.stat()
            stamps[path.relative_to(folder).as_posix()] = status.st_ino, status.st_size, status.st_mtime_ns
    return stamps


def read_files(folder: Path, names: Collection[str]) -> Files:
    """Return the contents of files of a directory."""
    return {name: (folder / name).read_bytes() for name in names}


def apply_changes(path: Path, files: Files, removed: Collection[str]) -> None:
    """Bring a run's directory up to date with what was sent, as a whole.

    The new directory is made next to the old one and takes its place by renaming. Killed at any moment, `path` is the
    old directory, the new one, or (between two renamings) missing, so that a run starts anew.

    Args:
        path: the directory; it may be missing.
        files: the files that are new or changed.
        removed: the names of those that are gone.

    Raises:
        RunDirectoryError: the system refuses to write.
    """
    incoming, replaced = (path.with_name(f".{path.name}.{state}") for state in ("incoming", "replaced"))
    with explain_write_errors(path):
        for leftover in (incoming, replaced):  # A process that was killed here may have left them.
            shutil.rmtree(leftover, ignore_errors=True)
        incoming.mkdir(parents=True)
        if path.exists():
            shutil.copytree(path, incoming, copy_function=_link, dirs_exist_ok=True)
        for name in (*removed, *files):
            (incoming / name).unlink(missing_ok=True)  # Writing into it would change the old directory's file, too.
        for name, content in files.items():
            (incoming / name).parent.mkdir(parents=True, exist_ok=True)
            (incoming / name).write_bytes(content)
        if path.exists():
            path.rename(replaced)
        incoming.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def _link(source: str, target: str) -> None:
    """Make a hard link, or a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
