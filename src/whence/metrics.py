"""How much sooner an arm gets where standard training gets, and how much seeds alone would make of it.

A *level* is a return that standard training reached; a *reduction* is the share of standard training's
rounds, or seconds, that another arm does without to reach the same level (LDA §5.2, Table 3).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from jaxtyping import Bool, Float64, Int
from scipy import stats

from whence.errors import WhenceError
from whence.intervals import interval_from_error, t_interval

PAIR_METRICS = (
    "se_ave",
    "se_peak",
    "rt_peak",
    "rt_peak_paper",
    "se_ave_literal",
    "se_peak_literal",
    "unreached",
)
"""The keys of `pair_metrics`, in order: each compares one run of an arm with one standard run."""

CURVE_METRICS = ("final_return", "peak_return", "auc")
"""The keys of `curve_metrics`, in order: each describes one run by itself."""


@dataclass(frozen=True, eq=False)
class Curve:
    """One run's test returns and times, kept as read-only float64 copies.

    returns: (R+1,) mean test return after round k = 0..R; index 0 is the untrained policy.
    standard_errors: (R+1,) standard error of each of these evaluations, in units of return, at least 0.
    seconds: (R,) process CPU seconds of each round's collection, scoring and optimisation, no evaluation.
    evaluated: (R+1,) whether the policy was evaluated then; where it was not, its return is that of the evaluation
        before, and nothing is reached. None: it always was.

    Raises WhenceError where lengths disagree, R < 1, a value is not finite, an error or a time is negative, or the
    untrained policy or every trained one was not evaluated.
    Source: LDA §5.2.
    """

    returns: Float64[np.ndarray, " rounds+1"]
    standard_errors: Float64[np.ndarray, " rounds+1"]
    seconds: Float64[np.ndarray, " rounds"]
    evaluated: Bool[np.ndarray, " rounds+1"] | None = None

    def __post_init__(self) -> None:
        for name in ("returns", "standard_errors", "seconds"):
            column = _finite_column(name, getattr(self, name), signed=name == "returns")
            object.__setattr__(self, name, column)
        if self.rounds < 1:
            raise WhenceError(
                "`seconds` is empty, but a curve needs at least one round of training; "
                "give one time for each of R rounds, and R+1 returns."
            )
        for name, length in (("returns", len(self.returns)), ("standard_errors", len(self.standard_errors))):
            if length != self.rounds + 1:
                raise WhenceError(
                    f"`{name}` has length {length}, but the R = {self.rounds} rounds of `seconds` need "
                    f"R+1 = {self.rounds + 1}; evaluate the untrained policy and then after every round."
                )
        there = np.ones(self.rounds + 1, bool) if self.evaluated is None else np.array(self.evaluated, dtype=bool)
        if there.shape != (self.rounds + 1,) or not (there[0] and there[1:].any()):
            raise WhenceError(
                f"`evaluated` is {there.astype(int).tolist()}; R+1 = {self.rounds + 1} of true or false are needed, "
                "true for the untrained policy and for at least one that is trained."
            )
        there.flags.writeable = False
        object.__setattr__(self, "evaluated", there)

    @property
    def rounds(self) -> int:
        """R, the number of rounds of training."""
        return len(self.seconds)

    @property
    def evaluations(self) -> Int[np.ndarray, " evaluations"]:
        """The rounds from 1 on after which the policy was evaluated."""
        assert self.evaluated is not None  # __post_init__ sets it
        return np.flatnonzero(self.evaluated[1:]) + 1


def make_curve(rounds: int, evaluations: pl.DataFrame, seconds: Float64[np.ndarray, " rounds"]) -> Curve:
    """Return a run's learning curve; between evaluations it stays at the last one, and reaches nothing.

    Args:
        rounds: how many the run has.
        evaluations: a row for each, with "round", "test_return" and "standard_error", in order.
        seconds: (rounds,) seconds of each round.
    """
    evaluated = evaluations["round"].to_numpy()
    last = np.searchsorted(evaluated, np.arange(rounds + 1), side="right") - 1
    return Curve(
        returns=evaluations["test_return"].to_numpy()[last],
        standard_errors=evaluations["standard_error"].to_numpy()[last],
        seconds=seconds,
        evaluated=np.isin(np.arange(rounds + 1), evaluated),
    )


def _finite_column(name: str, given: object, *, signed: bool) -> Float64[np.ndarray, " n"]:
    try:
        column = np.array(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise WhenceError(f"`{name}` is no array of numbers ({error}); give a one-dimensional one.") from error
    if column.ndim != 1:
        raise WhenceError(f"`{name}` has shape {column.shape}, but needs one dimension; give one run at a time.")
    wrong = ~np.isfinite(column) if signed else ~(np.isfinite(column) & (column >= 0))
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        raise WhenceError(
            f"`{name}` holds {column[index]} at index {index}, but every value must be finite"
            f"{'' if signed else ' and at least 0'}; find the round that produced it, or leave this run out."
        )
    column.flags.writeable = False
    return column


def levels(standard: Curve) -> Float64[np.ndarray, " levels"]:
    """Return the levels of a standard run that the noise of its evaluations lets one tell apart.

    Running maxima strictly above v_0 + max(2 SE, 5% of (peak - v_0)), each at least 2 SE above the last one
    taken; SE is the larger of the standard errors of the two evaluations that are told apart, since no one figure is
    that of all: it may be 0 where every episode ends alike. Increasing, in units of return; shape (levels,), which may
    be (0,). Source: LDA §5.2, without the levels that are noise.
    """
    returns, errors = standard.returns, standard.standard_errors
    rise = 0.05 * float(returns.max() - returns[0])
    taken: list[int] = []
    # A maximum over k >= 1 that exceeds the floor exceeds v_0 too, so that it is one over k >= 0.
    for k in _highs(standard):
        above = returns[k] > returns[0] + max(2 * max(errors[k], errors[0]), rise)
        if above and (not taken or returns[k] >= returns[taken[-1]] + 2 * max(errors[k], errors[taken[-1]])):
            taken.append(k)
    return np.asarray(returns[taken])


def literal_levels(standard: Curve) -> Float64[np.ndarray, " levels"]:
    """Return the levels of a standard run as the paper words them: every strictly larger maximum, k >= 1.

    The first is v_1, even where v_1 is no better than the untrained policy, so there is always one.
    Increasing, in units of return; shape (levels,). Source: LDA §5.2.
    """
    return np.asarray(standard.returns[_highs(standard)])


def _highs(curve: Curve) -> list[int]:
    """Return the rounds, from 1 on, whose evaluation is above every one before it but that of the untrained policy."""
    trained = curve.returns[curve.evaluations]
    best_before = np.concatenate(([-np.inf], np.maximum.accumulate(trained)[:-1]))
    found: list[int] = curve.evaluations[trained > best_before].tolist()
    return found


def rounds_to(curve: Curve, level: float) -> int:
    """Return the first round k >= 1 whose test return is at least `level`, or R+1 where none is.

    Raises WhenceError where `level` is not finite. Source: LDA §5.2.
    """
    if not np.isfinite(level):
        raise WhenceError(f"The level is {level}, but must be finite; take it from `levels` of a standard run.")
    reached = curve.evaluations[curve.returns[curve.evaluations] >= level]
    return int(reached[0]) if len(reached) else curve.rounds + 1


def seconds_to(curve: Curve, level: float) -> float:
    """Return the seconds until the end of the round in which `level` is first reached.

    Where it never is: the seconds of all rounds and of one mean round more, for R+1 rounds.
    Raises WhenceError where `level` is not finite. Source: LDA §5.2, Table 3.
    """
    rounds = rounds_to(curve, level)
    total = float(curve.seconds[:rounds].sum())
    return total if rounds <= curve.rounds else total + float(curve.seconds.mean())


def pair_metrics(method: Curve, standard: Curve) -> dict[str, float | None]:
    """Compare one run with one standard run; the keys are `PAIR_METRICS`.

    se_ave, se_peak: 1 - rounds_to(method) / rounds_to(standard), averaged over `levels`, and at the highest.
    rt_peak: 1 - seconds_to(method) / seconds_to(standard), both to the highest level.
    se_ave_literal, se_peak_literal: as se_ave and se_peak, over `literal_levels`.
    rt_peak_paper: 1 - seconds_to(method) to the highest of `literal_levels` / seconds of *all* standard rounds,
        which is what the paper's RT_peak is (Acrobot: 1 - 35.80 / 79.87 = 55.2%): only this one belongs beside
        its figures. Standard training itself scores above zero, unless it peaks in its last round.
    unreached: the share of `levels` that the method never reached; these count as R+1 rounds.

    Reductions are shares, at most 1, negative where the method is slower. None where the standard run has no
    level, and for times where the standard's are zero. Raises WhenceError where the runs differ in R.
    Source: LDA §5.2, Table 3.
    """
    if method.rounds != standard.rounds:
        raise WhenceError(_unequal_rounds("the method's curve", method, "the standard's", standard))
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
    return np.array([1 - rounds_to(method, level) / rounds_to(standard, level) for level in at.tolist()])


def _time_reduction(method_seconds: float, standard_seconds: float) -> float | None:
    return 1 - method_seconds / standard_seconds if standard_seconds > 0 else None


def _unequal_rounds(name: str, curve: Curve, other_name: str, other: Curve) -> str:
    return (
        f"R = {curve.rounds} rounds in {name} and R = {other.rounds} in {other_name}: a level never reached "
        "counts as R+1, so R must be the same in all; train for equally many rounds, or cut the longer curve."
    )


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

    All intervals are 95% t intervals over seeds. Where pairs of seeds are compared, each seed is left out in turn (the
    jackknife), method seeds and standard seeds apart, with Welch and Satterthwaite's degrees of freedom.

    An entry of `PAIR_METRICS` holds, as shares:
    mean, low, high: over the pairs of a method seed and a standard seed that have a value; no low and high where
        leaving out one seed leaves no pair.
    per_seed: the mean over standard seeds, for each method seed in sorted order.
    null, null_low, null_high: the same of standard seeds against other standard seeds, which an arm that does
        nothing would show and which need not be zero. A seed never meets itself, so ends take three seeds.
    against_null: mean, low, high of the share of rounds, or seconds, that the arm does without of those that other
        standard seeds take to the same levels: 1 - (1 - mean) / (1 - null), pairs of one seed left out of both. An arm
        that takes half of the rounds has a half here, and one that does nothing has 0.
    The standard arm's own figures are that null: a seed against itself would be zero and say nothing.

    An entry of `CURVE_METRICS` holds, in units of return:
    mean, low, high, per_seed: over seeds; no low and high with one seed.
    iqm: the mean without int(n / 4) of n seeds at either end: the plain mean where n < 4.
    differences: by each other arm, mean, low, high of the differences from it over the seeds that both have; no low
        and high with one such seed, no mean with none.
    null: 0.0, the null of `differences` and not of `mean`: an arm that does nothing differs by 0 on average.

    What is not there is None. No figure of an arm depends on which others are there, but for `differences` from them.
    Raises WhenceError where the standard arm is missing, an arm has no run, or a run has another R than the standard's.
    Source: LDA §5.2, Table 3.
    """
    _check_arms(curves, standard)
    runs = {arm: dict(sorted(own.items())) for arm, own in curves.items()}
    alone = {arm: {s: curve_metrics(run) for s, run in own.items()} for arm, own in runs.items()}
    null = _pair_tables(runs[standard], runs[standard])
    for table in null.values():
        np.fill_diagonal(table, np.nan)
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for arm, own in runs.items():
        pairs = null if arm == standard else _pair_tables(own, runs[standard])
        apart = np.array([[seed != other for other in runs[standard]] for seed in own])
        summary[arm] = {name: _pair_entry(pairs[name], null[name], apart, pairs is null) for name in PAIR_METRICS}
        summary[arm] |= {name: _curve_entry(name, arm, alone) for name in CURVE_METRICS}
    return summary


def _check_arms(curves: Mapping[str, Mapping[int, Curve]], standard: str) -> None:
    if standard not in curves:
        raise WhenceError(
            f"The standard arm {standard!r} is not among the arms {sorted(curves)}; run it too, "
            "or name another with `standard=`."
        )
    for arm, runs in curves.items():
        if not runs:
            raise WhenceError(f"The arm {arm!r} has no run, but needs at least one; run it or leave it out.")
    first = min(curves[standard])
    reference = curves[standard][first]
    for arm, runs in curves.items():
        for run_seed, curve in runs.items():
            if curve.rounds != reference.rounds:
                name, other = f"arm {arm!r}, seed {run_seed},", f"the standard arm {standard!r}, seed {first}"
                raise WhenceError(_unequal_rounds(name, curve, other, reference))


def _pair_tables(
    methods: Mapping[int, Curve], standards: Mapping[int, Curve]
) -> dict[str, Float64[np.ndarray, "methods standards"]]:
    """Return each of `PAIR_METRICS` for every pair; NaN where a pair has no value."""
    pairs = [[pair_metrics(method, other) for other in standards.values()] for method in methods.values()]
    # As float64, None is NaN.
    return {name: np.array([[pair[name] for pair in row] for row in pairs], dtype=np.float64) for name in PAIR_METRICS}


def _pair_entry(
    values: Float64[np.ndarray, "methods standards"],
    null: Float64[np.ndarray, "standards standards"],
    apart: Bool[np.ndarray, "methods standards"],
    own: bool,
) -> dict[str, Any]:
    """Return the entry of one of `PAIR_METRICS`.

    Args:
        values: of every pair of a method's seed and a standard seed.
        null: of every pair of standard seeds; NaN for a seed with itself.
        apart: which of the pairs are of two seeds.
        own: whether these are the standard arm's, whose methods are standards.
    """
    other_seeds = np.where(apart, values, np.nan)
    methods, standards = (np.ones(count, dtype=bool) for count in values.shape)

    def of_null(standards: Bool[np.ndarray, " standards"]) -> float | None:
        return _mean(null[np.ix_(standards, standards)])

    def of_arm(methods: Bool[np.ndarray, " methods"], standards: Bool[np.ndarray, " standards"]) -> float | None:
        return of_null(standards) if own else _mean(values[np.ix_(methods, standards)])

    def against(methods: Bool[np.ndarray, " methods"], standards: Bool[np.ndarray, " standards"]) -> float | None:
        beside = of_null(standards)
        arm = beside if own else _mean(other_seeds[np.ix_(methods, standards)])
        return None if arm is None or beside is None or beside == 1 else 1 - (1 - arm) / (1 - beside)

    beside = _jackknife(of_null, [standards])
    # Standard seeds against one another are one group of seeds, not two.
    arm = beside if own else _jackknife(of_arm, [methods, standards])
    return {
        **arm,
        "per_seed": [_mean(row) for row in values],
        "null": beside["mean"],
        "null_low": beside["low"],
        "null_high": beside["high"],
        "against_null": _jackknife(against, [methods, standards]),
    }


def _curve_entry(name: str, arm: str, alone: Mapping[str, Mapping[int, Mapping[str, float]]]) -> dict[str, Any]:
    own = {run_seed: metrics[name] for run_seed, metrics in alone[arm].items()}
    values = list(own.values())
    others = {other: {s: metrics[name] for s, metrics in runs.items()} for other, runs in alone.items() if other != arm}
    return {
        **t_interval(values),
        "per_seed": values,
        "iqm": float(stats.trim_mean(values, 0.25)),
        "null": 0.0,
        "differences": {
            other: t_interval([own[s] - theirs[s] for s in own if s in theirs]) for other, theirs in others.items()
        },
    }


def _mean(values: Float64[np.ndarray, "..."]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def _jackknife(
    statistic: Callable[..., float | None], groups: Sequence[Bool[np.ndarray, " seeds"]]
) -> dict[str, float | None]:
    """Return a statistic of groups of seeds, given as masks, with the ends that leaving out each seed in turn gives."""
    mean = statistic(*groups)
    without_ends = {"mean": mean, "low": None, "high": None}
    if mean is None:
        return without_ends
    variances = []
    for place, group in enumerate(groups):
        without = [statistic(*groups[:place], group & ~seed, *groups[place + 1 :]) for seed in np.eye(len(group)) > 0]
        known = [value for value in without if value is not None]
        if len(known) < len(without):
            return without_ends
        variances.append((len(group) - 1) * float(np.var(known)))
    # Welch and Satterthwaite's, by shares of the whole, which squares of small variances are too small for.
    shares = [variance / (sum(variances) or 1) for variance in variances]
    freedom = 1 / (sum(s**2 / (len(group) - 1) for s, group in zip(shares, groups, strict=True)) or 1)
    return interval_from_error(mean, float(np.sqrt(sum(variances))), freedom)
