"""Clocks of the suite: runs that take turns, growth fitted to sizes, and the most memory that a run takes."""

import ctypes
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whence.engines import measure_bytes

LIMIT = 60.0
"""Seconds of one run, at most; what would take longer is estimated."""

TURNS = 15.0
"""Seconds that all turns of a measurement may take together, after the first; it has one at least."""


def time_once(run: Callable[[], Any], device: str) -> float:
    """Return the seconds of one run, until the device has finished it.

    Of a CPU they are the process's own seconds, in which work of others beside it counts little.
    """
    read_clock = time.perf_counter if device.startswith("cuda") else time.process_time
    _wait(device)
    start = read_clock()
    run()
    _wait(device)
    return read_clock() - start


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def take_turns(runs: Sequence[Callable[[], Any]], *, repeats: int, device: str) -> list[list[float]]:
    """Return the seconds of each run in each turn; the first turn counts only if there is time for no other."""
    first = [time_once(run, device) for run in runs]
    count = min(repeats, int(TURNS / sum(first)))
    return [[time_once(run, device) for run in runs] for _ in range(count)] or [first]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the lowest and the highest."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "turns": len(values)}


def fit_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the exponent of the growth of values with sizes, by least squares on logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def predict(sizes: Sequence[float], values: Sequence[float], size: float) -> float:
    """Return the value at a larger size, in proportion to the value at the largest of the measured sizes, the last.

    More records than a budget holds are scored part by part. A growth fitted to fewer would see the step from one pass
    to two, and go on with it.
    """
    return values[-1] * size / sizes[-1]


def find_free_memory(device: str) -> int:
    """Return the free bytes of the device, or of this machine, which Linux alone tells."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    if sys.platform != "linux":
        return sys.maxsize
    return _read_kernel("/proc/meminfo", "MemAvailable")


def measure_peak(run: Callable[[], Any], device: str) -> dict[str, int | None]:
    """Return the most bytes that a run holds in tensors, and by how many the process, or the GPU's memory, grows.

    The process is measured by Linux' own count, elsewhere not at all (None).
    """
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        tensors = max(measure_bytes(run))
        return {"tensors": tensors, "grown": torch.cuda.max_memory_allocated(device) - before}
    if sys.platform != "linux":
        return {"tensors": max(measure_bytes(run)), "grown": None}
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free goes back, so that taking it again counts
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = _read_kernel("/proc/self/status", "VmRSS")
    tensors = max(measure_bytes(run))
    return {"tensors": tensors, "grown": _read_kernel("/proc/self/status", "VmHWM") - before}


def _read_kernel(file: str, name: str) -> int:
    """Return a line of a file of /proc in bytes."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def is_too_long(seconds: float) -> bool:
    """Return whether one run of so many seconds is estimated instead."""
    return not math.isfinite(seconds) or seconds > LIMIT
