"""What healthy runs show: the largest statistic of each detector in each environment of the reference."""

import csv
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from whence.findings.detectors import Detector
from whence.findings.finding import Rank

TABLE = Path(__file__).with_name("reference.csv")
"""Rows of detector, environment, family and statistic, written by `python -m studies.healthy.measure`."""

MARGIN = 1.5
"""How far beyond the largest of all healthy environments something is wrong, and no longer only unusual.

Source: results/healthy, leaving each environment out in turn.
"""

Reference: TypeAlias = Mapping[str, Sequence[float]]
"""The statistics of each detector, one of each environment, the largest first."""


@cache
def read_reference(keeps: Callable[[str, str], bool] = lambda environment, family: True) -> Reference:
    """Read the reference; of environments that are kept, by their name and family."""
    statistics = defaultdict[str, list[float]](list)
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if keeps(row["environment"], row["family"]):
                statistics[row["detector"]].append(float(row["statistic"]))
    return {name: sorted(values, reverse=True) for name, values in statistics.items()}


def compare(statistic: float, healthy: Sequence[float], detector: Detector) -> tuple[Rank | Literal["fine"], str]:
    """Return what a statistic is compared with those of healthy environments, largest first, and that in words.

    Beyond all of them it is unusual; beyond the largest by `MARGIN` it is wrong; but what is smaller than the least
    that matters is fine.
    """
    if detector.is_fact:
        return (detector.most, "true by itself") if statistic > detector.least else ("fine", "nothing is seen")
    largest, count = (healthy[0] if healthy else 0.0), len(healthy)
    if statistic <= max(largest, 0.0):
        reached = sum(value >= statistic for value in healthy)
        return "fine", f"as large in {reached} of {count} healthy environments" if statistic else "nothing is seen"
    if statistic < detector.least:
        return "fine", "too little to matter"
    if not largest:
        return detector.most, f"seen in no run of {count} healthy environments"
    beyond = f"larger than in any run of {count} healthy environments"
    if statistic <= MARGIN * largest or detector.most == "unusual":
        return "unusual", beyond
    return "wrong", f"{beyond}, {statistic / largest:.3g} times the largest"
