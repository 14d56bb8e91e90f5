"""One run on a node of a cluster: the task that Ray starts there."""

import logging
import os
import platform
import queue
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeAlias

import torch

from whence.errors import RunDirectoryError, WhenceError
from whence.experiments.kinds import read_config, runner_of
from whence.experiments.parcels import list_files, pack_changes, unpack_files
from whence.experiments.workers import describe_exit, describe_failure
from whence.runs.files import lock_directory

Event: TypeAlias = tuple[str, Any, Any]
"""What a node reports: ("round", rounds done, None), ("files", archive, names that are gone), or ("ended", None or what
went wrong, its traceback)."""


def list_versions() -> dict[str, str]:
    """Return the versions that have to be the same everywhere; a torch for GPUs counts as the one for CPUs."""
    return {name: version(name).partition("+")[0] for name in ("whence", "torch")}


def train_on_node(
    settings: Mapping[str, Any], home: str, files: bytes | None, versions: Mapping[str, str], save_seconds: float
) -> Iterator[Event]:
    """Train in a temporary directory, and yield what happens; this is the task that a node runs.

    Args:
        settings: the configuration, from `to_json`.
        home: where the run's directory is at home, for messages.
        files: an archive of what home has of the run; None: nothing.
        versions: of home's libraries.
        save_seconds: seconds from one copy of the unfinished run to the next.
    """
    torch.set_num_threads(1)
    logging.getLogger("whence").setLevel(logging.ERROR)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    stopped = threading.Event()
    training = threading.Thread(
        target=_train, args=(settings, home, files, versions, save_seconds, events, stopped), daemon=True
    )
    training.start()
    try:
        kind = ""
        while kind != "ended":
            with suppress(queue.Empty):
                kind, content, more = events.get(timeout=0.5)  # a cancellation arrives between two calls
                yield kind, content, more
    finally:
        stopped.set()
        training.join()


def _train(
    settings: Mapping[str, Any],
    home: str,
    files: bytes | None,
    versions: Mapping[str, str],
    save_seconds: float,
    events: "queue.SimpleQueue[Event]",
    stopped: threading.Event,
) -> None:
    """Train, and put what happens into a queue; the last event is "ended"."""
    failure, text = None, ""
    try:
        _check_versions(versions)
        with make_scratch_folder() as scratch:
            folder = scratch / Path(home).name
            if files is not None:
                unpack_files(files, folder)
            stamps, last_time = list_files(folder), time.monotonic()

            def report(rounds: int, metrics: Mapping[str, Any]) -> None:
                nonlocal stamps, last_time
                if stopped.is_set():
                    raise KeyboardInterrupt
                events.put(("round", rounds, None))
                if time.monotonic() - last_time >= save_seconds:
                    stamps, archive, removed = pack_changes(folder, stamps)
                    events.put(("files", archive, removed))
                    last_time = time.monotonic()

            try:
                config = read_config(settings)
                runner_of(config).run(config, folder, report)
            except Exception as error:
                failure = describe_failure(error).replace(str(folder), home)
                text = traceback.format_exc()
            except SystemExit as end:
                failure, text = describe_exit(_exit_code(end)), traceback.format_exc()
            now, archive, removed = pack_changes(folder, stamps)
            if now != stamps:
                events.put(("files", archive, removed))
    except KeyboardInterrupt:
        failure = "it was broken off"
    except BaseException as error:  # whatever it is: without a last event, home would wait for ever
        failure, text = describe_failure(error), traceback.format_exc()
    events.put(("ended", failure, text))


def _exit_code(end: SystemExit) -> int:
    """Return the exit code of a process that ends in this way."""
    if end.code is None:
        return 0
    return end.code if isinstance(end.code, int) else 1


def _check_versions(versions: Mapping[str, str]) -> None:
    """Refuse a node whose libraries are not home's.

    Raises:
        WhenceError: names the library and the node.
    """
    for name, here in list_versions().items():
        if here != versions[name]:
            raise WhenceError(
                f"The node {platform.node()} has {name} {here}, and the machine that the runs belong to has "
                f"{versions[name]}. Install the same on both."
            )


@contextmanager
def make_scratch_folder() -> Iterator[Path]:
    """Yield a new directory of this machine, and remove it; those that processes left which were killed go, too."""
    base = Path(tempfile.gettempdir()) / f"whence-{os.getuid()}"
    with ExitStack() as stack:
        with lock_directory(base, wait=True):
            base.chmod(0o700)
            for leftover in base.iterdir():
                if leftover.is_dir() and not _is_locked(leftover):
                    rmtree(leftover, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(dir=base))
            stack.callback(rmtree, folder, ignore_errors=True)
            stack.enter_context(lock_directory(folder))
        yield folder


def _is_locked(folder: Path) -> bool:
    try:
        with lock_directory(folder):
            return False
    except RunDirectoryError:
        return True
