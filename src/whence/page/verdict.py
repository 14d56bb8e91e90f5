"""Whether an arm ends higher than another, in a sentence, and how many seeds could tell."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from whence.intervals import t_interval

LEAST_SEEDS = 3
"""Seeds below which there is no verdict, and no interval worth showing."""

MOST_SEEDS = 1000
"""Seeds that are searched for a sufficient number."""


def give_verdict(
    arm: str, returns: Mapping[int, float], standard: str, standard_returns: Mapping[int, float], effect: float
) -> str:
    """Say whether an arm ends higher than the standard arm, by a paired t test of their final returns.

    Args:
        arm: its name.
        returns: its final return for each seed.
        standard: the standard arm's name.
        standard_returns: its final return for each seed; seeds that only one arm has are left out.
        effect: the difference that the number of seeds is computed for, above 0; 0: none is computed.
    """
    seeds = sorted(returns.keys() & standard_returns.keys())
    if len(seeds) < LEAST_SEEDS:
        ends, standard_ends = (_list([values[seed] for seed in seeds]) for values in (returns, standard_returns))
        values = f"{arm} ends at {ends} and {standard} at {standard_ends}" if seeds else "they share none"
        return f"Too few seeds to compare {arm} with {standard}: {values}."
    differences = [returns[seed] - standard_returns[seed] for seed in seeds]
    interval = t_interval(differences)
    mean, low, high = (interval[name] or 0.0 for name in ("mean", "low", "high"))
    difference = f"difference {mean:.3g} [{low:.3g}, {high:.3g}]"
    if low > 0 or high < 0:
        return f"{arm} ends {'higher' if low > 0 else 'lower'} than {standard} ({difference}, {len(seeds)} seeds)."
    verdict = f"No evidence that {arm} ends higher than {standard} ({difference})"
    spread = float(np.std(differences, ddof=1))
    if effect <= 0 or spread == 0:
        return f"{verdict}."
    return f"{verdict}; {_describe_need(count_needed_seeds(spread, effect), len(seeds), effect)}."


def count_needed_seeds(spread: float, effect: float) -> int | None:
    """Return the smallest number of paired seeds that shows a difference with 80% power, at 5% two-sided.

    Args:
        spread: the standard deviation of the paired differences, above 0.
        effect: the true difference, above 0, in the same unit.

    Returns:
        At least 2; None if more than `MOST_SEEDS` are needed.

    Source: power of the paired t test, by the noncentral F distribution of its square.
    """
    seeds = np.arange(2, MOST_SEEDS + 1)
    ratio = min(effect / spread, 100.0)  # of which two seeds are enough
    critical = stats.t.ppf(0.975, seeds - 1) ** 2
    power = stats.ncf.sf(critical, 1, seeds - 1, seeds * ratio**2)
    enough = seeds[power >= 0.8]
    return int(enough[0]) if len(enough) else None


def choose_effect(standard_curve: Sequence[float]) -> float:
    """Return a difference worth seeing: a tenth of the range of a mean learning curve, to one digit; 0 if it is flat.

    Args:
        standard_curve: the standard arm's mean test return after each round.
    """
    tenth = (max(standard_curve) - min(standard_curve)) / 10 if standard_curve else 0.0
    return float(f"{tenth:.0e}") if math.isfinite(tenth) else 0.0


def _describe_need(needed: int | None, seeds: int, effect: float) -> str:
    if needed is None:
        return f"more than {MOST_SEEDS:,} seeds would be needed to see a difference of {effect:g}"
    if needed <= seeds:
        return f"a difference of {effect:g} would probably have shown"
    return f"about {needed} seeds would be needed to see a difference of {effect:g}"


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
