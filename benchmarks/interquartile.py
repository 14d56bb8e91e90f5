"""Interquartile means and the probability of improvement, as rliable defines them (Agarwal et al., 2021)."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.stats import trim_mean

REPEATS = 5000

LEAST_FOR_INTERVAL = 3
"""The seeds that each environment needs for an interval."""

Scores = list[NDArray[np.float64]]
"""The scaled results of some runs, an array of (..., seeds) for each environment."""


def interquartile_mean(scores: Scores) -> NDArray[np.float64]:
    """Return the mean of the middle half of all results."""
    return np.asarray(trim_mean(np.concatenate(scores, axis=-1), 0.25, axis=-1))


def subtract_means(one: Scores, other: Scores) -> NDArray[np.float64]:
    """Return the difference of two interquartile means."""
    return interquartile_mean(one) - interquartile_mean(other)


def probability_of_improvement(one: Scores, other: Scores) -> NDArray[np.float64]:
    """Return how probably a run of one is better than one of the other, averaged over the environments."""
    # The statistic of scipy.stats.mannwhitneyu, without its test: the bootstraps would take minutes more.
    pairs = (a[..., :, None] - b[..., None, :] for a, b in zip(one, other, strict=True))
    return np.mean([np.heaviside(differences, 0.5).mean((-2, -1)) for differences in pairs], axis=0)


def bootstrap(
    one: Scores, other: Scores, statistic: Callable[[Scores, Scores], NDArray[np.float64]]
) -> dict[str, float | None]:
    """Return a statistic with its 95% interval; seeds are drawn again within each environment, in pairs."""
    mean = float(statistic(one, other))
    if min(map(len, one)) < LEAST_FOR_INTERVAL:
        return {"mean": mean, "low": None, "high": None}
    rng = np.random.default_rng(0)
    places = [rng.integers(len(scores), size=(REPEATS, len(scores))) for scores in one]
    one, other = ([s[p] for s, p in zip(scores, places, strict=True)] for scores in (one, other))
    low, high = np.quantile(statistic(one, other), [0.025, 0.975])
    return {"mean": mean, "low": float(low), "high": float(high)}
