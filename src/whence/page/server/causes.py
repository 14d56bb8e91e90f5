"""What taught an action, answered for one record at a time: the latest that was asked about."""

import threading
from typing import Any

from whence.errors import WhenceError
from whence.page.explorer import ExploredRun
from whence.page.explorer.causes import build_causes, find_row
from whence.page.explorer.explored_run import stamp_file

REMEMBERED = 50
"""Answers that are remembered at most."""


class CauseFinder:
    """Answers what taught an action, one question at a time.

    Rounds are scored one by one, so that other requests are answered between them, and a later question ends the one
    before it.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._counter = threading.Lock()
        self._latest = 0
        self._closed = False
        self._answers: dict[Any, dict[str, Any]] = {}

    def find(self, run: ExploredRun, number: int, record: int, by: str) -> dict[str, Any]:
        """Return in JSON types what taught the action of a record; see `build_causes`.

        Raises:
            WhenceError: another record was asked about meanwhile; or see `build_causes`.
        """
        find_row(run, number, record)
        # New rounds of a run that goes on, or that is trained anew, change the present policy, and with it the answer.
        policies = run.directory.rounds("policies")
        newest = stamp_file(run.directory.round_path("policies", policies[-1])) if policies else None
        key = (run.directory.path, tuple(policies), newest, number, record, by)
        if key in self._answers:
            return self._answers[key]
        with self._counter:
            self._latest += 1
            mine = self._latest

        def go_on() -> None:
            if self._closed or mine < self._latest:
                raise WhenceError("Another record was asked about before this one was answered. Ask again.")

        with self._turn:
            go_on()
            answer = build_causes(run, number, record, by=by, go_on=go_on)
            while len(self._answers) >= REMEMBERED:
                self._answers.pop(next(iter(self._answers)))
            self._answers[key] = answer
        return answer

    def close(self) -> None:
        """End the answer that is under way, before its next round."""
        self._closed = True
