"""Questions that take long, answered in a process of their own, so that frames do not wait for them."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import CancelledError, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import Any

from whence.core import WhenceError, hide_working_directory
from whence.page.content import ExploredRun, choose_round, stamp_file
from whence.runs import RunDirectory
from whence.stored.agents import AnyEnv

_CONTEXT = multiprocessing.get_context("spawn")

_newest: Any = None
"""In the process that answers: holds the number of the newest question, in shared memory."""

Answer = Callable[..., dict[str, Any]]
"""Takes the run, the round, the record, a setting, and a function to call between steps, which ends the work."""


class Questions:
    """Questions to one process, one at a time; a later one ends those before it, whose readers have gone on."""

    @hide_working_directory()  # a lock in shared memory starts a process that watches over it
    def __init__(self) -> None:
        self._newest: Any = _CONTEXT.Value(ctypes.c_ulonglong, 0)
        self._answers: dict[Any, dict[str, Any]] = {}
        self._pool = self._make_pool()

    def ask(self, answer: Answer, run: ExploredRun, number: int, record: int, setting: Any) -> dict[str, Any]:
        """Return an answer in JSON types, from memory if the round and the number of policies are what they were."""
        directory = run.directory
        state = stamp_file(directory.round_path("records", number)), len(directory.rounds("policies"))
        key = (answer, directory.path, number, record, setting, state)
        if key in self._answers:
            return self._answers[key]
        with self._newest.get_lock():
            self._newest.value += 1
            mine = self._newest.value
        question = (answer, mine, str(directory.path), directory.is_trusted, run.env, number, record, setting)
        try:
            with hide_working_directory():
                future = self._pool.submit(_answer, *question)
            content: dict[str, Any] = future.result()
        except (BrokenProcessPool, CancelledError):
            self._pool = self._make_pool()
            raise WhenceError("the process that computes it ended. Open this record again.") from None
        if mine == self._newest.value:  # a measurement that was ended says so, and is no answer
            self._answers[key] = content
        return content

    def close(self) -> None:
        """End the answer that is under way at its next step, and the process with it."""
        with self._newest.get_lock():
            self._newest.value += 1
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, _CONTEXT, initializer=_begin, initargs=(self._newest,))


def measure(run: ExploredRun, number: int, record: int, rollouts: int, check: Callable[[], None]) -> dict[str, Any]:
    """Return a record's advantage by fresh rollouts; see `ExploredRun.measure`."""
    return run.measure(number, record, rollouts, check)._asdict()


def gather_findings(
    run: ExploredRun, number: int, record: int, setting: Any, check: Callable[..., None]
) -> dict[str, Any]:
    """Return what stands out in a run, what was looked at, and the round to open with; see `ExploredRun`."""
    findings = run.list_findings()
    opens = choose_round(run, run.directory.rounds(), findings)
    return {"findings": findings, "looked": run.describe_checks(), "opens": opens}


def _begin(newest: Any) -> None:
    global _newest
    import torch

    _newest = newest
    os.environ.pop("PYTHONSAFEPATH", None)  # for this process alone
    if hasattr(os, "nice"):
        os.nice(10)  # frames and training go first
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    torch.set_num_threads(1)


_open_run = cache(lambda path, trust, env: ExploredRun(RunDirectory.open(path, trust=trust), env=env))


def _answer(
    answer: Answer, mine: int, path: str, trust: bool, env: AnyEnv, number: int, record: int, setting: Any
) -> dict[str, Any]:
    def check(*progress: int) -> None:
        if mine != _newest.value:
            raise WhenceError("another record was asked about before this one was answered. Ask again.")

    check()
    return answer(_open_run(path, trust, env), number, record, setting, check)
