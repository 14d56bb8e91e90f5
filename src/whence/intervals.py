"""Intervals of 95% by Student's t."""

from collections.abc import Sequence

import numpy as np
from scipy import stats


def t_interval(values: Sequence[float]) -> dict[str, float | None]:
    """Return the "mean" of independent values, and "low" and "high" of its interval.

    All None without a value; no interval of fewer than two.
    """
    if len(values) < 2:
        return {"mean": float(np.mean(values)) if len(values) else None, "low": None, "high": None}
    return interval_from_error(
        float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values))), len(values) - 1
    )


def interval_from_error(mean: float, standard_error: float, freedom: float) -> dict[str, float | None]:
    """Return a "mean" with the ends of its interval, "low" and "high".

    Args:
        mean: of whatever.
        standard_error: of it.
        freedom: degrees of it, which need not be whole.
    """
    # By hand, since scipy's interval is NaN where there is no spread.
    half = float(stats.t.ppf(0.975, freedom)) * standard_error
    return {"mean": mean, "low": mean - half, "high": mean + half}
