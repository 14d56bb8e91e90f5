"""Runs of either kind, agents' or language models', in worker processes, several at a time."""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from whence.core import WhenceError, hide_working_directory, write_atomically
from whence.lab.plans import AnyConfig, runner_of

Job = tuple[AnyConfig, Path]
"""A run and its directory."""

OnJobRound = Callable[[int, int], None]
"""Called with a job's place and the number of its rounds that are done."""


def run_all(
    jobs: Sequence[Job], workers: int | None, on_round: OnJobRound
) -> Generator[tuple[int, str | None], None, None]:
    """Run jobs, each in a process with one torch thread, and yield each as it ends: its place and why it failed.

    Results do not depend on the number of processes. When the caller breaks off, runs under way are ended.

    Yields:
        The place in `jobs`, and None or a sentence that says what went wrong. The traceback is in `PATH.error.txt`
        next to the run's directory, if it can be written there.
    """
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    waiting, limit = deque(range(len(jobs))), workers or multiprocessing.cpu_count()
    under_way: dict[Connection, tuple[int, Any]] = {}
    try:
        while waiting or under_way:
            while waiting and len(under_way) < limit:
                place = waiting.popleft()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(sender, *jobs[place]), daemon=True)
                _start(process)
                sender.close()  # the worker has a copy: when the worker is gone, the pipe is closed
                under_way[receiver] = place, process
            for pipe in wait(list(under_way)):
                assert isinstance(pipe, Connection)
                place, process = under_way[pipe]
                kind, content = _receive(pipe)
                if kind == "round":
                    on_round(place, content)
                    continue
                del under_way[pipe]
                pipe.close()
                process.join()
                yield place, _describe_end(process.exitcode) if kind == "lost" else content
    finally:
        for pipe, (_, process) in under_way.items():
            process.terminate()
            process.join()
            pipe.close()


@hide_working_directory()
def _start(process: BaseProcess) -> None:
    """Start a process that Ctrl-C does not reach: the terminal sends it to all processes, and the caller ends them."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        return process.start()
    resource_tracker.ensure_running()  # otherwise `start` does so, which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _receive(pipe: Connection) -> tuple[str, Any]:
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except (EOFError, OSError):  # nothing more, or part of a message
        return "lost", None


def _describe_end(code: int | None) -> str:
    """Return how a process ended that sent no message at its end."""
    if code is None or code >= 0:
        # A script that starts processes whenever it is imported has one that imports it, and fails.
        hint = ': does your script start runs outside of `if __name__ == "__main__":`?' if code == 1 else ""
        return f"its process ended with exit code {code} before the run did{hint}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    reason = ", perhaps for want of memory: try fewer workers" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{reason}"


def describe_failure(failure: BaseException) -> str:
    """Return what went wrong as a sentence: errors of whence as they are, others with their kind."""
    if isinstance(failure, WhenceError):
        return str(failure)
    return f"{type(failure).__name__}: {failure}"


def _work(pipe: Connection, config: AnyConfig, path: Path) -> None:
    os.environ.pop("PYTHONSAFEPATH", None)  # for this process alone
    torch.set_num_threads(1)
    logging.getLogger("whence").setLevel(logging.ERROR)  # the page shows advice; here it would break the bars
    threading.Thread(target=_end_with_parent, daemon=True).start()
    failure = None
    try:
        runner_of(config).run(config, path, lambda finished, metrics: pipe.send(("round", finished)))
    except Exception as error:
        failure = describe_failure(error), traceback.format_exc()
    pipe.send(("ended", note_failure(path, failure)))


def note_failure(path: Path, failure: tuple[str, str] | None) -> str | None:
    """Write the traceback of a run that failed next to its directory; if none did, delete that of an earlier attempt.

    `failure` is what went wrong and the traceback; returned is what went wrong, with the file that holds the traceback.
    """
    file = path.with_name(f"{path.name}.error.txt")
    if failure is None:
        file.unlink(missing_ok=True)
        return None
    with contextlib.suppress(WhenceError), write_atomically(file) as temporary:
        temporary.write_text(failure[1], encoding="utf-8")
    return f"{failure[0]} (traceback: {file})"


def _end_with_parent() -> None:
    # Otherwise a worker whose parent was killed would go on training.
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
