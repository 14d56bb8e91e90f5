"""What healthy runs show: the largest statistic of each detector in each environment of the reference."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

import polars as pl

from whence.findings.detectors import Detector
from whence.findings.finding import Outcome

TABLE = Path(__file__).with_name("reference.csv")
"""Rows of detector, environment, family and statistic, written by `python -m studies.healthy.measure`."""

MARGIN = 1.5
"""How far beyond the largest of all healthy environments something is wrong, and no longer only unusual.

Source: results/healthy, leaving each environment out in turn.
"""

FEWEST = 20
"""Healthy environments from which on something may be wrong: a run that is like E of them is beyond all of them with
chance 1 / (E + 1) for each detector, which is to be below 5%.
"""

Reference: TypeAlias = Mapping[str, Sequence[float]]
"""The statistics of each detector, one of each environment, the largest first."""


@cache
def read_reference() -> Reference:
    """Read the reference."""
    table = pl.read_csv(TABLE, schema_overrides={"statistic": pl.Float64}).sort("statistic", descending=True)
    groups = table.group_by("detector", maintain_order=True).agg("statistic")
    return dict(groups.iter_rows())


def compare(statistic: float, healthy: Sequence[float], detector: Detector) -> tuple[Outcome, str]:
    """Return what a statistic is compared with those of healthy environments, largest first, and that in words.

    Beyond all of them it is unusual; beyond the largest by `MARGIN`, where they are enough, it is wrong; but what is
    smaller than the least that matters is fine.
    """
    if detector.is_fact:
        return (detector.most, "true by itself") if statistic > detector.least else ("fine", "nothing is seen")
    if not healthy:
        return "could not be looked at", "because no healthy run was measured"
    largest, count = max(healthy[0], 0.0), len(healthy)
    if statistic <= largest:
        reached = sum(value >= statistic for value in healthy)
        return "fine", f"as large in {reached} of {count} healthy environments" if statistic else "nothing is seen"
    if statistic < detector.least:
        return "fine", "too little to matter"
    text = f"{'larger than in any' if largest else 'seen in no'} run of {count} healthy environments"
    if statistic <= MARGIN * largest or count < FEWEST or detector.most == "unusual":
        return "unusual", text
    return "wrong", f"{text}, {statistic / largest:.3g} times the largest" if largest else text
