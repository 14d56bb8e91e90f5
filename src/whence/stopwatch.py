"""Seconds that something takes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds since it was made: CPU seconds of the process, and wall time."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far, as `cpu` and `wall`."""
        return {"cpu": time.process_time() - self._cpu, "wall": time.perf_counter() - self._wall}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens in between."""
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            self._cpu += time.process_time() - cpu
            self._wall += time.perf_counter() - wall
