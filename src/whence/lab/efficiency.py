"""Comparison of arms: how much sooner an arm reaches standard training's returns, with a null from seeds alone.

A *level* is a return that standard training reached. A *reduction* is the share of standard training's rounds, or
seconds, that another arm saves in reaching the same level (LDA §5.2, Table 3).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
import scipy
from jaxtyping import Bool, Float64, Int

from whence.core import RunDirectoryError, WhenceError
from whence.runs import RunDirectory
from whence.statistics import interval_from_error, t_interval

PAIR_METRICS = ("se_ave", "se_peak", "rt_peak", "rt_peak_paper", "se_ave_literal", "se_peak_literal", "unreached")
"""The keys of `pair_metrics`, in order: each compares one run of an arm with one standard run."""

CURVE_METRICS = ("final_return", "peak_return", "auc")
"""The keys of `curve_metrics`, in order: each describes one run by itself."""


@dataclass(frozen=True, eq=False)
class Curve:
    """One run's test returns and times.

    returns: (R+1,) mean test return after round k = 0..R; index 0 is the untrained policy.
    standard_errors: (R+1,) standard error of each evaluation, in units of return, at least 0.
    seconds: (R,) process CPU seconds of each round's collection, scoring and optimisation, without evaluation.
    evaluated: (R+1,) whether the policy was evaluated after the round; if not, its return repeats the last evaluation
        and reaches no level. None: it was evaluated after every round.

    Raises WhenceError if a return is not finite.
    Source: LDA §5.2.
    """

    returns: Float64[np.ndarray, " rounds+1"]
    standard_errors: Float64[np.ndarray, " rounds+1"]
    seconds: Float64[np.ndarray, " rounds"]
    evaluated: Bool[np.ndarray, " rounds+1"] | None = None

    def __post_init__(self) -> None:
        if not np.isfinite(self.returns).all():
            raise WhenceError(f"The test returns are {self.returns.tolist()}; leave this run out, or train it again.")

    @property
    def rounds(self) -> int:
        """R, the number of rounds of training."""
        return len(self.seconds)

    @cached_property
    def evaluations(self) -> Int[np.ndarray, " evaluations"]:
        """The rounds from 1 on after which the policy was evaluated."""
        return np.arange(self.rounds) + 1 if self.evaluated is None else np.flatnonzero(self.evaluated[1:]) + 1


def read_timings(run: RunDirectory, rounds: int) -> pl.DataFrame:
    """Read the timings of all rounds; a `RunDirectoryError` says if some were lost."""
    if (timings := run.table("timings")).height != rounds:
        raise RunDirectoryError(
            f"{run.path / 'timings.parquet'} does not hold the seconds of {rounds} rounds. Restore it from a copy, or "
            "delete the run, and it is made again."
        )
    return timings


def make_curve(rounds: int, evaluations: pl.DataFrame, seconds: Float64[np.ndarray, " rounds"]) -> Curve:
    """Return a run's learning curve; between evaluations it repeats the last one, and reaches no level.

    `evaluations` has a row for each, with "round", "test_return" and "standard_error", in order; seconds are of each
    round.
    """
    evaluated = evaluations["round"].to_numpy()
    last = np.searchsorted(evaluated, np.arange(rounds + 1), side="right") - 1
    return Curve(
        returns=evaluations["test_return"].to_numpy()[last],
        standard_errors=evaluations["standard_error"].to_numpy()[last],
        seconds=seconds,
        evaluated=np.isin(np.arange(rounds + 1), evaluated),
    )


def levels(standard: Curve) -> Float64[np.ndarray, " levels"]:
    """Return the levels of a standard run that differ by more than the noise of its evaluations.

    They are the running maxima strictly above v_0 + max(2 SE, 5% of (peak - v_0)), each at least 2 SE above the level
    before. SE is the larger standard error of the two evaluations compared: one figure for all would not do, since it
    may be 0 if every episode ends alike. Increasing, in units of return; shape (levels,), which may be (0,).
    Source: LDA §5.2, without the levels that are noise.
    """
    returns, errors = standard.returns, standard.standard_errors
    rise = 0.05 * float(returns.max() - returns[0])
    chosen: list[int] = []
    # A maximum over k >= 1 above the floor exceeds v_0 too, so it is also a maximum over k >= 0.
    for k in _running_maxima(standard):
        above = returns[k] > returns[0] + max(2 * max(errors[k], errors[0]), rise)
        if above and (not chosen or returns[k] >= returns[chosen[-1]] + 2 * max(errors[k], errors[chosen[-1]])):
            chosen.append(k)
    return np.asarray(returns[chosen])


def literal_levels(standard: Curve) -> Float64[np.ndarray, " levels"]:
    """Return the levels of a standard run by the paper's definition: every strictly larger maximum, k >= 1.

    The first is v_1, even if v_1 is no better than the untrained policy, so there is always one.
    Increasing, in units of return; shape (levels,). Source: LDA §5.2.
    """
    return np.asarray(standard.returns[_running_maxima(standard)])


def _running_maxima(curve: Curve) -> list[int]:
    """Return the rounds from 1 on whose evaluation exceeds those of all earlier trained policies."""
    trained = curve.returns[curve.evaluations]
    best_before = np.concatenate(([-np.inf], np.maximum.accumulate(trained)[:-1]))
    rounds: list[int] = curve.evaluations[trained > best_before].tolist()
    return rounds


def rounds_to(curve: Curve, level: float) -> int:
    """Return the first round k >= 1 whose test return is at least `level`, or R+1 if none is (LDA §5.2)."""
    return int(_rounds_to_each(curve, np.array([level]))[0])


def _rounds_to_each(curve: Curve, at: Float64[np.ndarray, " levels"]) -> Int[np.ndarray, " levels"]:
    best = np.maximum.accumulate(curve.returns[curve.evaluations])
    return np.append(curve.evaluations, curve.rounds + 1)[np.searchsorted(best, at)]


def seconds_to(curve: Curve, level: float) -> float:
    """Return the seconds until the end of the round in which `level` is first reached.

    If it never is, return the seconds of R+1 rounds: of all rounds and one mean round more (LDA §5.2, Table 3).
    """
    rounds = rounds_to(curve, level)
    total = float(curve.seconds[:rounds].sum())
    return total if rounds <= curve.rounds else total + float(curve.seconds.mean())


def pair_metrics(method: Curve, standard: Curve) -> dict[str, float | None]:
    """Compare one run with one standard run; the keys are `PAIR_METRICS`.

    se_ave, se_peak: 1 - rounds_to(method) / rounds_to(standard), averaged over `levels`, and at the highest.
    rt_peak: 1 - seconds_to(method) / seconds_to(standard), both to the highest level.
    se_ave_literal, se_peak_literal: as se_ave and se_peak, over `literal_levels`.
    rt_peak_paper: 1 - seconds_to(method) to the highest of `literal_levels` / seconds of *all* standard rounds. This
        is the paper's RT_peak (Acrobot: 1 - 35.80 / 79.87 = 55.2%), so compare only this one with the paper's
        figures. Standard training itself scores above zero, unless it peaks in its last round.
    unreached: the share of `levels` that the method never reached; these count as R+1 rounds.

    Reductions are shares, at most 1, and negative if the method is slower. They are None if the standard run has no
    level, and those of time if the standard's times are zero. Raises WhenceError if the runs differ in R.
    Source: LDA §5.2, Table 3.
    """
    if method.rounds != standard.rounds:
        raise WhenceError(
            f"One run has R = {method.rounds} rounds and another R = {standard.rounds}: a level never reached counts "
            "as R+1, so R must be the same in all; train for equally many rounds, or cut the longer curve."
        )
    values: dict[str, float | None] = dict.fromkeys(PAIR_METRICS)
    literal = literal_levels(standard)
    reductions = _round_reductions(method, standard, literal)
    values["se_ave_literal"], values["se_peak_literal"] = float(reductions.mean()), float(reductions[-1])
    values["rt_peak_paper"] = _time_reduction(seconds_to(method, float(literal[-1])), float(standard.seconds.sum()))
    robust = levels(standard)
    if len(robust):
        peak = float(robust[-1])
        reductions = _round_reductions(method, standard, robust)
        values["se_ave"], values["se_peak"] = float(reductions.mean()), float(reductions[-1])
        values["rt_peak"] = _time_reduction(seconds_to(method, peak), seconds_to(standard, peak))
        values["unreached"] = float(np.mean(robust > method.returns[method.evaluations].max()))
    return values


def _round_reductions(
    method: Curve, standard: Curve, at: Float64[np.ndarray, " levels"]
) -> Float64[np.ndarray, " levels"]:
    return np.asarray(1 - _rounds_to_each(method, at) / _rounds_to_each(standard, at))


def _time_reduction(method_seconds: float, standard_seconds: float) -> float | None:
    return 1 - method_seconds / standard_seconds if standard_seconds > 0 else None


def curve_metrics(curve: Curve) -> dict[str, float]:
    """Describe one run by itself, in units of return; the keys are `CURVE_METRICS`.

    final_return: v_R. peak_return: the largest of v_0..v_R. auc: the trapezoidal mean over rounds 0..R.
    Source: LDA §5.2.
    """
    return {
        "final_return": float(curve.returns[-1]),
        "peak_return": float(curve.returns.max()),
        "auc": float(np.trapezoid(curve.returns)) / curve.rounds,
    }


def summarise(
    curves: Mapping[str, Mapping[int, Curve]], *, standard: str = "ppo"
) -> dict[str, dict[str, dict[str, Any]]]:
    """Summarise all arms over their seeds: {arm: {metric: entry}}, ready for JSON.

    curves: for each arm, its run of each seed; `standard` names the arm that the others are compared with.

    All intervals are 95% t intervals over seeds. For pairs of seeds they come from leaving out each seed in turn (the
    jackknife), separately for method seeds and standard seeds, with Welch and Satterthwaite's degrees of freedom.

    An entry of `PAIR_METRICS` holds, as shares:
    mean, low, high: over the pairs of a method seed and a standard seed that have a value; low and high are None if
        leaving out one seed leaves no pair.
    per_seed: the mean over standard seeds, for each method seed in sorted order.
    null, null_low, null_high: the same for standard seeds against other standard seeds, which an arm without effect
        would show and which need not be zero. No seed is paired with itself, so low and high need three seeds.
    against_null: mean, low, high of the share of rounds, or seconds, that the arm saves compared with other standard
        seeds on the same levels: 1 - (1 - mean) / (1 - null), without pairs of one seed. An arm that takes half of the
        rounds has 0.5; an arm without effect has 0.
    The standard arm's own entry is that null, since each seed would save nothing against itself.
    An entry of `CURVE_METRICS` holds, in units of return:
    mean, low, high, per_seed: over seeds; low and high are None for one seed.
    iqm: the mean without int(n / 4) of n seeds at either end; the plain mean if n < 4.
    differences: for each other arm, mean, low, high of the differences from it over the seeds of both; low and high
        are None for one such seed, all three for none.
    null: 0.0, the null of `differences` (not of `mean`): an arm without effect differs by 0 on average.

    No figure of an arm depends on the other arms, except `differences` from them.
    Raises WhenceError if the standard arm is missing, or a run's R is not the standard's.
    Source: LDA §5.2, Table 3.
    """
    if standard not in curves:
        raise WhenceError(
            f"The standard arm {standard!r} is not among the arms {sorted(curves)}; run it too, "
            "or name another with `standard=`."
        )
    runs = {arm: dict(sorted(by_seed.items())) for arm, by_seed in curves.items()}
    alone = {arm: {s: curve_metrics(run) for s, run in by_seed.items()} for arm, by_seed in runs.items()}
    null = _pair_tables(runs[standard], runs[standard])
    for table in null.values():
        np.fill_diagonal(table, np.nan)
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for arm, by_seed in runs.items():
        pairs = null if arm == standard else _pair_tables(by_seed, runs[standard])
        differ = np.array([[seed != other for other in runs[standard]] for seed in by_seed])
        summary[arm] = {name: _pair_entry(pairs[name], null[name], differ, pairs is null) for name in PAIR_METRICS}
        summary[arm] |= {name: _curve_entry(name, arm, alone) for name in CURVE_METRICS}
    return summary


def _pair_tables(
    methods: Mapping[int, Curve], standards: Mapping[int, Curve]
) -> dict[str, Float64[np.ndarray, "methods standards"]]:
    """Return a table of each of `PAIR_METRICS` over all pairs; NaN if a pair has no value."""
    pairs = [[pair_metrics(method, other) for other in standards.values()] for method in methods.values()]
    # As float64, None is NaN.
    return {name: np.array([[pair[name] for pair in row] for row in pairs], dtype=np.float64) for name in PAIR_METRICS}


def _pair_entry(
    values: Float64[np.ndarray, "methods standards"],
    null: Float64[np.ndarray, "standards standards"],
    differ: Bool[np.ndarray, "methods standards"],
    of_standard: bool,
) -> dict[str, Any]:
    """Return the entry of one of `PAIR_METRICS`: of all pairs of seeds, those of the standard arm, and which differ."""
    other_seeds = np.where(differ, values, np.nan)
    methods, standards = (np.ones(count, dtype=bool) for count in values.shape)

    def null_mean(standards: Bool[np.ndarray, " standards"]) -> float | None:
        return _mean(null[np.ix_(standards, standards)])

    def arm_mean(methods: Bool[np.ndarray, " methods"], standards: Bool[np.ndarray, " standards"]) -> float | None:
        return _mean(values[np.ix_(methods, standards)])

    def saving(methods: Bool[np.ndarray, " methods"], standards: Bool[np.ndarray, " standards"]) -> float | None:
        of_null = null_mean(standards)
        of_arm = of_null if of_standard else _mean(other_seeds[np.ix_(methods, standards)])
        return None if of_arm is None or of_null is None or of_null == 1 else 1 - (1 - of_arm) / (1 - of_null)

    chance = _jackknife(null_mean, [standards])
    # Pairs of standard seeds depend on one group of seeds, not two.
    entry = chance if of_standard else _jackknife(arm_mean, [methods, standards])
    return {
        **{**entry, "per_seed": [_mean(row) for row in values]},
        **{"null": chance["mean"], "null_low": chance["low"], "null_high": chance["high"]},
        "against_null": _jackknife(saving, [methods, standards]),
    }


def _curve_entry(name: str, arm: str, alone: Mapping[str, Mapping[int, Mapping[str, float]]]) -> dict[str, Any]:
    by_seed = {run_seed: metrics[name] for run_seed, metrics in alone[arm].items()}
    values = list(by_seed.values())
    others = {other: {s: metrics[name] for s, metrics in runs.items()} for other, runs in alone.items() if other != arm}
    return {
        **t_interval(values),
        "per_seed": values,
        "iqm": float(scipy.stats.trim_mean(values, 0.25)),
        "null": 0.0,
        "differences": {
            other: t_interval([by_seed[s] - theirs[s] for s in by_seed if s in theirs])
            for other, theirs in others.items()
        },
    }


def _mean(values: Float64[np.ndarray, "..."]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def _jackknife(
    statistic: Callable[..., float | None], groups: Sequence[Bool[np.ndarray, " seeds"]]
) -> dict[str, float | None]:
    """Return a statistic of groups of seeds (masks) and its jackknife interval as "mean", "low" and "high"."""
    mean = statistic(*groups)
    mean_alone = {"mean": mean, "low": None, "high": None}
    if mean is None:
        return mean_alone
    variances = []
    for place, group in enumerate(groups):
        without = [statistic(*groups[:place], group & ~seed, *groups[place + 1 :]) for seed in np.eye(len(group)) > 0]
        known = [value for value in without if value is not None]
        if len(known) < len(without):
            return mean_alone
        variances.append((len(group) - 1) * float(np.var(known)))
    # Welch and Satterthwaite's formula in shares of the total variance, since squares of small variances underflow.
    shares = [variance / (sum(variances) or 1) for variance in variances]
    degrees_of_freedom = 1 / (sum(s**2 / (len(group) - 1) for s, group in zip(shares, groups, strict=True)) or 1)
    return interval_from_error(mean, float(np.sqrt(sum(variances))), degrees_of_freedom)
