"""Advantages measured by fresh rollouts in a process of their own, so that frames do not wait for them."""

import ctypes
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from whence.errors import WhenceError, first_line
from whence.page.explorer import ExploredRun, opening, parts
from whence.page.explorer.detail import describe_advantage, describe_unmeasured, measure_advantage
from whence.runs import RunDirectory

REMEMBERED = 1000
"""Measurements that are remembered at most."""

ENDED = "the process that measures ended. Open this record again."

SUPERSEDED = "another record was opened meanwhile. Open this one again."
"""Why a measurement is not made, or not ended."""

Question = tuple[str, int, int, str | None, int, int]
"""What `measure_question` takes: the run's directory, round, record, environment, continuations, and its number."""

_CONTEXT = multiprocessing.get_context("spawn")


class Measurer:
    """Measures one record's advantage at a time, the latest that was opened; the process starts with the first."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._latest = 0
        self._is_measuring = self._is_closed = False
        self._results: dict[Any, dict[str, Any]] = {}
        self._process: Any = None
        self._connection: Any = None
        self._newest: Any = _CONTEXT.Value(ctypes.c_ulonglong, 0)

    def measure(self, run: ExploredRun, number: int, record: int, continuations: int) -> dict[str, Any]:
        """Return a record's advantage in JSON types; see `measure_advantage`.

        A later record ends the measurement of an earlier one: its reader has gone on, and a browser has few connections
        for all that it waits for.
        """
        if run.env is not None and not isinstance(run.env, str):  # a function, which may not reach another process
            return measure_advantage(run, number, record, continuations)
        file = opening.locate_records(run.directory, number)
        key = (file, file.stat().st_mtime_ns, record, continuations)
        if key in self._results:
            return self._results[key]
        with self._turn:
            self._latest += 1
            mine = self._newest.value = self._latest
            self._turn.notify_all()
            self._turn.wait_for(lambda: mine < self._latest or not self._is_measuring)
            if mine < self._latest:
                return describe_unmeasured(SUPERSEDED)
            self._is_measuring = True
        try:
            status, content = self._ask((str(run.directory.path), number, record, run.env, continuations, mine))
        finally:
            with self._turn:
                self._is_measuring = False
                self._turn.notify_all()
        if status != "measured":
            return describe_unmeasured(content)
        result = describe_advantage(content[0], content[1], continuations)
        with self._turn:
            while len(self._results) >= REMEMBERED:
                self._results.pop(next(iter(self._results)))
            self._results[key] = result
        return result

    def close(self) -> None:
        """End the process, whatever it is measuring; no other one is started."""
        with self._turn:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def _ask(self, question: Question) -> tuple[str, Any]:
        with self._turn:  # so that `close` sees a process that is about to start
            if self._is_closed:
                return "refused", ENDED
            if self._process is None or not self._process.is_alive():
                self._start()
        try:
            self._connection.send(question)
            answer: tuple[str, Any] = self._connection.recv()
        except (EOFError, OSError):
            return "refused", ENDED
        return answer

    def _start(self) -> None:
        self._connection, theirs = _CONTEXT.Pipe()
        arguments = (theirs, self._newest)
        self._process = _CONTEXT.Process(target=_answer, args=arguments, daemon=True, name="whence-measuring")
        self._process.start()
        theirs.close()


def _answer(connection: Connection, newest: Any) -> None:
    """Answer questions until the other end is closed.

    Args:
        connection: to the server.
        newest: shared with the server; the number of the newest question.
    """
    import torch

    if hasattr(os, "nice"):
        os.nice(10)  # frames and training go first
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    torch.set_num_threads(1)
    while True:
        try:
            question: Question = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(measure_question(*question, newest))


def measure_question(
    path: str, number: int, record: int, env: str | None, continuations: int, mine: int, newest: Any
) -> tuple[str, Any]:
    """Return "measured" and an advantage with its error, or "refused" and why.

    Args:
        path: the run's directory.
        number: the round.
        record: the record's id.
        env: see `replay_episode`.
        continuations: see `estimate_advantage`.
        mine: the question's number; the measurement ends as soon as that is not the newest.
        newest: holds the number of the newest question in `value`.
    """

    def go_on() -> None:
        if mine != newest.value:
            raise WhenceError(SUPERSEDED)

    try:
        run = RunDirectory.open(Path(path))
        return "measured", parts.estimate_advantage(
            run, number, record, env=env, continuations=continuations, seed=0, on_step=go_on
        )
    except (WhenceError, *opening.FOREIGN) as refusal:
        return "refused", first_line(refusal)
