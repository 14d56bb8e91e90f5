"""A stopwatch for CPU and wall time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Counts seconds since its construction: CPU seconds of the process, and wall time."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far, as `cpu` and `wall`."""
        return {"cpu": time.process_time() - self._cpu, "wall": time.perf_counter() - self._wall}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time inside this context."""
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            yield
        finally:
            self._cpu += time.process_time() - cpu
            self._wall += time.perf_counter() - wall
