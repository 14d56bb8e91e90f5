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


def choose_best(scores: NDArray[np.float64], places: NDArray[np.int_]) -> NDArray[np.float64]:
    """Return the results of drawn seeds, each at the choice that is the best for the other seeds of its draw.

    Args:
        scores: (choices, seeds) results; with one choice there is nothing to choose. Equals go to the first choice.
        places: (draws, seeds) which seeds each draw has.
    """
    if len(scores) == 1:
        return scores[0][places]
    seeds = np.arange(scores.shape[1])
    counts = (places[..., None] == seeds).sum(1)
    sums = counts @ scores.T
    # A seed that was drawn twice is no other seed.
    others = sums[:, None] - counts[..., None] * scores.T
    best = others.round(9).argmax(-1)
    return np.take_along_axis(scores[best, seeds], places, axis=1)


def bootstrap(
    one: Scores,
    other: Scores,
    statistic: Callable[[Scores, Scores], NDArray[np.float64]],
    *,
    limits: tuple[float, float] = (-np.inf, np.inf),
) -> dict[str, float | None]:
    """Return a statistic with its 95% interval; seeds are drawn again within each environment, in pairs.

    The interval is that of percentiles. Where choices are made it is reflected about the statistic (the basic
    bootstrap): a draw holds two thirds of the seeds, so it chooses worse, and its results are too low.

    Args:
        one, other: (choices, seeds) for each environment. Each seed's choice is made anew in each draw.
        statistic: of the results of all draws, (draws, seeds) for each environment.
        limits: the lowest and the highest value that the statistic can have.
    """
    rng = np.random.default_rng(0)
    seeds = [scores.shape[1] for scores in one]
    draws = [np.vstack([np.arange(n), rng.integers(n, size=(REPEATS, n))]) for n in seeds]
    results = ([choose_best(s, places) for s, places in zip(scores, draws, strict=True)] for scores in (one, other))
    mean, *others = statistic(*results)
    if min(seeds) < LEAST_FOR_INTERVAL:
        return {"mean": float(mean), "low": None, "high": None}
    low, high = np.quantile(others, [0.025, 0.975])
    if any(len(scores) > 1 for scores in (*one, *other)):
        low, high = np.clip([2 * mean - high, 2 * mean - low], *limits)
    return {"mean": float(mean), "low": float(low), "high": float(high)}
