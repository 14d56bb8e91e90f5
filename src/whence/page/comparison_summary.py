"""The summary of a comparison: a verdict on each arm, and the table of its metrics."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from scipy import stats

from whence.experiments import STANDARD, Comparison, LanguageConfig
from whence.metrics import PAIR_METRICS, t_interval

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
        both = (returns, standard_returns)
        ends, standard_ends = (", ".join(f"{values[seed]:.3g}" for seed in seeds) for values in both)
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
    needed = count_needed_seeds(spread, effect)
    if needed is not None and needed <= len(seeds):
        return f"{verdict}; a difference of {effect:g} would probably have shown."
    number = f"more than {MOST_SEEDS:,}" if needed is None else f"about {needed}"
    return f"{verdict}; {number} seeds would be needed to see a difference of {effect:g}."


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


HEADINGS: Mapping[str, str] = {
    "se_ave": "SE_ave",
    "se_peak": "SE_peak",
    "se_ave_literal": "SE_ave, every maximum",
    "se_peak_literal": "SE_peak, every maximum",
    "rt_peak": "RT_peak",
    "rt_peak_paper": "RT_peak (paper's)",
    "unreached": "levels never reached",
    "final_return": "final return",
    "peak_return": "peak return",
    "auc": "mean return",
}
"""The headings of metrics."""

_SHOWN = ("se_ave", "se_peak", "rt_peak", "rt_peak_paper", "final_return", "peak_return", "auc")

METRICS: Mapping[str, str] = {metric: HEADINGS[metric] for metric in _SHOWN}
"""The metrics that a comparison shows, with their headings."""

DIVERGENCE = "divergence (KL)"
"""The heading of the row below them."""

DEFINITIONS: Mapping[str, str] = {
    "SE_ave": f"the share of the rounds to a level that an arm saves, compared with {STANDARD}; mean over levels.",
    "SE_peak": "the same at the highest level.",
    "RT_peak": "the share of CPU time saved at the highest level: collecting, scoring, optimising, not evaluating.",
    "RT_peak (paper's)": f"the time saved until {STANDARD}'s highest return, as a share of {STANDARD}'s whole time.",
    "Levels": f"test returns that {STANDARD} reaches, each at least two standard errors above the one before.",
    "Values": f"means over all pairs of a seed of the arm and a seed of {STANDARD}; in brackets 95% t intervals.",
    f"{STANDARD} (null)": f"seeds of {STANDARD} compared with its other seeds: what chance gives. Compare with it.",
}
"""How the metrics are meant."""

COMPARISON_DEFINITIONS: Mapping[str, str] = {
    "Ends higher": "a paired t test of final returns, for each arm by itself. The number of seeds is what finds a "
    f"difference four times in five, if it is a tenth of the range of {STANDARD}'s mean learning curve.",
    **DEFINITIONS,
    "Fewer than three seeds": "there is no interval; round brackets hold each seed's value.",
    "Divergence": "approximate KL from the policy that collected a round, mean over rounds; for language models, from "
    "the start model.",
}
"""How a comparison's verdicts and table are meant."""

READING = "\n".join(f"{term}: {meaning}" for term, meaning in COMPARISON_DEFINITIONS.items())
"""The definitions, one a line."""

Cell = tuple[str, str]
"""A mean, and its interval or each seed's value; "" if there is none."""


class Summary(NamedTuple):
    """What a comparison shows.

    Attributes:
        verdicts: for each arm but the standard one, the rounds it saved, if known, and whether it ends higher.
        headings: the table's, one for each arm.
        rows: a heading, and a cell for each arm.
    """

    verdicts: Sequence[str]
    headings: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]


def make_summary(comparison: Comparison) -> Summary:
    """Return the verdicts and the table of a finished comparison."""
    ((_, arms),) = comparison.summary.items()
    rows = [(heading, [format_seeds(metric, arms[arm][metric]) for arm in arms]) for metric, heading in METRICS.items()]
    divergences = _measure_divergence(comparison)
    if any(divergences.values()):
        cells = [
            format_seeds("divergence", t_interval(divergences[arm]) | {"per_seed": divergences[arm]}) for arm in arms
        ]
        rows.append((DIVERGENCE, cells))
    return Summary(_give_verdicts(comparison, arms), [column_heading(arm) for arm in arms], rows)


def cell(metric: str, entry: Mapping[str, Any]) -> Cell:
    """Return a metric's mean and interval as text; shares as percentages."""
    interval = "" if entry["low"] is None else f"[{_format(metric, entry['low'])}, {_format(metric, entry['high'])}]"
    return _format(metric, entry["mean"]), interval


def format_seeds(metric: str, entry: Mapping[str, Any]) -> Cell:
    """Return a metric's cell; of two seeds each one's value in place of an interval."""
    values = entry.get("per_seed", ())
    if 1 < len(values) < LEAST_SEEDS:
        return _format(metric, entry["mean"]), f"({', '.join(_format(metric, value) for value in values)})"
    return cell(metric, entry)


def column_heading(arm: str) -> str:
    """Return the heading of an arm's column; the standard arm's holds the null."""
    return f"{arm} (null)" if arm == STANDARD else arm


def _format(metric: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1%}" if metric in PAIR_METRICS else f"{value:.3g}"


def _give_verdicts(comparison: Comparison, arms: Mapping[str, Any]) -> list[str]:
    seeds = sorted({config.seed for config in comparison.configs})
    returns = {arm: dict(zip(seeds, arms[arm]["final_return"]["per_seed"], strict=True)) for arm in arms}
    effect = choose_effect(_standard_curve(comparison))
    sentences: list[str] = []
    for arm in arms:
        if arm != STANDARD:
            sentences += _describe_saving(arm, arms)
            sentences.append(give_verdict(arm, returns[arm], STANDARD, returns[STANDARD], effect))
    return sentences


def _describe_saving(arm: str, arms: Mapping[str, Any]) -> list[str]:
    """Return which share of the rounds an arm saves, compared with the null; nothing if there are too few seeds."""
    (saved, interval), (null, null_interval) = (cell("se_ave", arms[name]["se_ave"]) for name in (arm, STANDARD))
    if not interval or len(arms[arm]["final_return"]["per_seed"]) < LEAST_SEEDS:
        return []
    compared = f"; other seeds of {STANDARD}: {null} {null_interval}" if null_interval else ""
    return [f"{arm} saves {saved} {interval} of the rounds that {STANDARD} takes (SE_ave){compared}."]


def _standard_curve(comparison: Comparison) -> list[float]:
    """Return the standard arm's mean test return after each round; nothing if no evaluation is stored."""
    tables = [comparison.run(config).table("evaluations") for config in comparison.configs if config.arm == STANDARD]
    tables = [table.select("round", "test_return") for table in tables if "test_return" in table.columns]
    if not tables:
        return []
    means = pl.concat(tables).group_by("round").agg(pl.col("test_return").mean()).sort("round")
    return means["test_return"].drop_nulls().to_list()


def _measure_divergence(comparison: Comparison) -> dict[str, list[float]]:
    """Return each arm's mean divergence of a round, for each seed that has one."""
    divergences: dict[str, list[float]] = {config.arm: [] for config in comparison.configs}
    for config in sorted(comparison.configs, key=lambda config: config.seed):
        column = "kl" if isinstance(config, LanguageConfig) else "train/approx_kl"
        metrics = comparison.run(config).table("metrics")
        rounds = metrics[column].drop_nulls().to_list() if column in metrics.columns else []
        if rounds:
            divergences[config.arm].append(sum(rounds) / len(rounds))
    return divergences
