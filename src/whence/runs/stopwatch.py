"""A stopwatch for CPU and wall time."""

import time
from collections.abc import Iterator, Mapping
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


@contextmanager
def time_stage(seconds: dict[str, dict[str, float]], stage: str) -> Iterator[None]:
    """Add the seconds of a stage to `seconds`, without those of the stages within it."""
    before, watch = _sum_by_clock(seconds), Stopwatch()
    yield
    after, stage_before = _sum_by_clock(seconds), seconds.get(stage, {})
    seconds[stage] = {
        clock: stage_before.get(clock, 0.0) + value - (after[clock] - before[clock])
        for clock, value in watch.seconds().items()
    }


def _sum_by_clock(seconds: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {clock: sum(clocks[clock] for clocks in seconds.values()) for clock in ("cpu", "wall")}


def flatten_seconds(seconds: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return seconds by stage and clock as one row, with names such as `scoring_cpu`."""
    return {f"{stage}_{clock}": value for stage, clocks in seconds.items() for clock, value in clocks.items()}
