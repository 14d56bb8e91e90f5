"""Advantages measured by fresh rollouts in a process of their own, so that frames do not wait for them."""

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from whence.errors import WhenceError, first_line
from whence.report.explorer import ExploredRun, opening, parts
from whence.report.explorer.detail import describe_advantage, describe_unmeasured, measure_advantage
from whence.runs import RunDirectory

REMEMBERED = 1000
"""Measurements that are remembered at most."""


class Measurer:
    """Measures one record's advantage at a time, the latest that was asked for; the process starts with the first."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._latest = 0
        self._is_measuring = False
        self._results: dict[Any, dict[str, Any]] = {}
        self._process: Any = None
        self._connection: Any = None

    def measure(self, run: ExploredRun, number: int, record: int, continuations: int) -> dict[str, Any]:
        """Return a record's advantage in JSON types; see `measure_advantage`.

        Whoever waits while a later record is asked for is told so at once: its reader has gone on, and a browser has
        few connections for all that it waits for.
        """
        if run.env is not None and not isinstance(run.env, str):  # a function, which may not reach another process
            return measure_advantage(run, number, record, continuations)
        file = opening.locate_records(run.directory, number)
        key = (file, file.stat().st_mtime_ns, record, continuations)
        if key in self._results:
            return self._results[key]
        with self._turn:
            self._latest += 1
            mine = self._latest
            self._turn.notify_all()
            self._turn.wait_for(lambda: mine < self._latest or not self._is_measuring)
            if mine < self._latest:
                return describe_unmeasured("another record was opened before its turn came. Open this one again.")
            self._is_measuring = True
        try:
            status, content = self._ask((str(run.directory.path), number, record, run.env, continuations))
        finally:
            with self._turn:
                self._is_measuring = False
                self._turn.notify_all()
        if status != "measured":
            return describe_unmeasured(content)
        while len(self._results) >= REMEMBERED:
            self._results.pop(next(iter(self._results)))
        self._results[key] = describe_advantage(content[0], content[1], continuations)
        return self._results[key]

    def close(self) -> None:
        """End the process, whatever it is measuring."""
        if self._process is not None:
            self._process.kill()

    def _ask(self, question: tuple[Any, ...]) -> tuple[str, Any]:
        if self._process is None or not self._process.is_alive():
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_answer, args=(theirs,), daemon=True, name="whence-measuring")
            self._process.start()
            theirs.close()
        try:
            self._connection.send(question)
            answer: tuple[str, Any] = self._connection.recv()
        except (EOFError, OSError):
            return "refused", "the process that measures ended. Open this record again."
        return answer


def _answer(connection: Connection) -> None:
    """Answer questions until the other end is closed."""
    import torch

    if hasattr(os, "nice"):
        os.nice(10)  # frames and training go first
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    torch.set_num_threads(1)
    while True:
        try:
            path, number, record, env, continuations = connection.recv()
        except (EOFError, OSError):
            return
        try:
            run = RunDirectory.open(Path(path))
            result = parts.estimate_advantage(run, number, record, env=env, continuations=continuations, seed=0)
            connection.send(("measured", result))
        except (WhenceError, *opening.FOREIGN) as refusal:
            connection.send(("refused", first_line(refusal)))
