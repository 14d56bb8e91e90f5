"""Intervals of means, and of one more value."""

from collections.abc import Sequence

import numpy as np
import scipy


def t_interval(values: Sequence[float]) -> dict[str, float | None]:
    """Return the "mean" of independent values, and the ends "low" and "high" of its interval.

    All three are None if there is no value; "low" and "high" are None if there is one.
    """
    if len(values) < 2:
        return {"mean": float(np.mean(values)) if len(values) else None, "low": None, "high": None}
    error = float(np.std(values, ddof=1) / np.sqrt(len(values)))
    return interval_from_error(float(np.mean(values)), error, len(values) - 1)


def prediction_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the 95% interval of one more value like two or more independent ones: t(n-1) sd √(1 + 1/n)."""
    error = float(np.std(values, ddof=1)) * np.sqrt(1 + 1 / len(values))
    ends = interval_from_error(float(np.mean(values)), error, len(values) - 1)
    return float(ends["low"] or 0), float(ends["high"] or 0)


def interval_from_error(mean: float, standard_error: float, degrees_of_freedom: float) -> dict[str, float | None]:
    """Return `mean` and the ends of its interval as "mean", "low" and "high"; degrees of freedom may be fractional."""
    # scipy's own `interval` is NaN if the standard error is 0.
    half_width = float(scipy.stats.t.ppf(0.975, degrees_of_freedom)) * standard_error
    return {"mean": mean, "low": mean - half_width, "high": mean + half_width}


def share_interval(count: int, of: int) -> tuple[float, float]:
    """Return the ends of the 95% interval of a share (Wilson 1927)."""
    ends = scipy.stats.binomtest(count, of).proportion_ci(method="wilson")
    return float(ends.low), float(ends.high)


def share_difference(first: tuple[int, int], second: tuple[int, int]) -> tuple[float, float]:
    """Return the ends of the 95% interval of the first share less the second (Newcombe 1998, method 10)."""
    share, other = (count / of for count, of in (first, second))
    (low, high), (other_low, other_high) = share_interval(*first), share_interval(*second)
    below, above = np.hypot(share - low, other_high - other), np.hypot(high - share, other - other_low)
    return float(share - other - below), float(share - other + above)
