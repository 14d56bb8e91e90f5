"""Runs in processes of their own, several at a time."""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from whence.errors import WhenceError
from whence.experiments.kinds import AnyConfig, runner_of
from whence.guards import write_atomically

Job = tuple[AnyConfig, Path]
"""A run and its directory."""


def check_workers(workers: int | None) -> None:
    """Refuse a number of processes below one; None is one per core.

    Raises:
        WhenceError: see above.
    """
    if workers is not None and workers < 1:
        raise WhenceError(f"workers is {workers}; at least 1 is needed.")


def run_all(
    jobs: Sequence[Job], workers: int | None, on_round: Callable[[int, int], None]
) -> Iterator[tuple[int, str | None]]:
    """Run jobs, each in a process with one torch thread, and yield each as it ends: its place and why it failed.

    Results do not depend on how many there are at a time. When the caller breaks off, what is under way is ended.

    Args:
        jobs: what to run; a finished run is left as it is.
        workers: processes at a time; None: one per core.
        on_round: told of a job's place and the number of its rounds that are done.

    Yields:
        The place in `jobs`, and None or what went wrong. The traceback is in `PATH.error.txt` beside the directory.
    """
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    waiting, at_once = deque(range(len(jobs))), workers or multiprocessing.cpu_count()
    under_way: dict[Connection, tuple[int, Any]] = {}
    try:
        while waiting or under_way:
            while waiting and len(under_way) < at_once:
                place = waiting.popleft()
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(theirs, *jobs[place]), daemon=True)
                _start(process)
                theirs.close()  # the worker's end: when the worker is gone, so is the pipe
                under_way[mine] = place, process
            for pipe in wait(list(under_way)):
                assert isinstance(pipe, Connection)
                place, process = under_way[pipe]
                kind, said = _received(pipe)
                if kind == "round":
                    on_round(place, said)
                    continue
                del under_way[pipe]
                pipe.close()
                process.join()
                yield place, _death(process.exitcode) if kind == "lost" else said
    finally:
        for pipe, (_, process) in under_way.items():
            process.terminate()
            process.join()
            pipe.close()


def _start(process: BaseProcess) -> None:
    """Start a process that Ctrl-C does not reach: the terminal sends it to all, and it is the caller's to end them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        return process.start()
    resource_tracker.ensure_running()  # which else `start` would do, and that lets SIGINT through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _received(pipe: Connection) -> tuple[str, Any]:
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except (EOFError, OSError):  # nothing more, or part of a message
        return "lost", None


def _death(code: int | None) -> str:
    """Tell how a process ended that did not say so itself."""
    if code is None or code >= 0:
        return f"its process ended with exit code {code} before the run did"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    why = ", perhaps for want of memory: try fewer workers" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{why}"


def describe_failure(failure: Exception) -> str:
    """Return what went wrong as a sentence: whence's own errors are, others get their kind before them."""
    return str(failure) if isinstance(failure, WhenceError) else f"{type(failure).__name__}: {failure}"


def _work(pipe: Connection, config: AnyConfig, path: Path) -> None:
    torch.set_num_threads(1)
    logging.getLogger("whence").setLevel(logging.ERROR)  # advice stands in the page; here it would break the bars
    threading.Thread(target=_end_with_parent, daemon=True).start()
    told = path.with_name(f"{path.name}.error.txt")
    try:
        runner_of(config).run(config, path, lambda finished, metrics: pipe.send(("round", finished)))
    except Exception as failure:
        with write_atomically(told) as temporary:
            temporary.write_text(traceback.format_exc(), encoding="utf-8")
        pipe.send(("ended", f"{describe_failure(failure)} (traceback: {told})"))
    else:
        with contextlib.suppress(FileNotFoundError):
            told.unlink()
        pipe.send(("ended", None))


def _end_with_parent() -> None:
    # A worker whose parent was killed would train on for nobody.
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
