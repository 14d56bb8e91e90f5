"""How much sooner an arm gets where standard training gets, and how much seeds alone would make of it.

A *level* is a return that standard training reached; a *reduction* is the share of standard training's
rounds, or seconds, that another arm does without to reach the same level (LDA §5.2, Table 3).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from scipy import stats

from whence.errors import WhenceError

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

_TAIL = 0.025  # at either end of a 95% interval


@dataclass(frozen=True, eq=False)
class Curve:
    """One run's test returns and times, kept as read-only float64 copies.

    returns: (R+1,) mean test return after round k = 0..R; index 0 is the untrained policy.
    standard_errors: (R+1,) standard error of each of these evaluations, in units of return, at least 0.
    seconds: (R,) process CPU seconds of each round's collection, scoring and optimisation, no evaluation.

    Raises WhenceError where lengths disagree, R < 1, a value is not finite or an error or a time is negative.
    Source: LDA §5.2.
    """

    returns: Float64[np.ndarray, " rounds+1"]
    standard_errors: Float64[np.ndarray, " rounds+1"]
    seconds: Float64[np.ndarray, " rounds"]

    def __post_init__(self) -> None:
        for field in fields(self):
            column = _finite_column(field.name, getattr(self, field.name), signed=field.name == "returns")
            object.__setattr__(self, field.name, column)
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

    @property
    def rounds(self) -> int:
        """R, the number of rounds of training."""
        return len(self.seconds)


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
    taken; SE is the median of the R+1 standard errors. Increasing, in units of return; shape (levels,), which
    may be (0,). Source: LDA §5.2, without the levels that are noise.
    """
    start = float(standard.returns[0])
    gap = 2 * float(np.median(standard.standard_errors))
    floor = start + max(gap, 0.05 * (float(standard.returns.max()) - start))
    taken: list[float] = []
    # A maximum over k >= 1 that exceeds the floor exceeds v_0 too, so that it is one over k >= 0.
    for level in literal_levels(standard).tolist():
        if level > floor and (not taken or level >= taken[-1] + gap):
            taken.append(level)
    return np.array(taken, dtype=np.float64)


def literal_levels(standard: Curve) -> Float64[np.ndarray, " levels"]:
    """Return the levels of a standard run as the paper words them: every strictly larger maximum, k >= 1.

    The first is v_1, even where v_1 is no better than the untrained policy, so there is always one.
    Increasing, in units of return; shape (levels,). Source: LDA §5.2.
    """
    trained = standard.returns[1:]
    best_before = np.concatenate(([-np.inf], np.maximum.accumulate(trained)[:-1]))
    return np.asarray(trained[trained > best_before])


def rounds_to(curve: Curve, level: float) -> int:
    """Return the first round k >= 1 whose test return is at least `level`, or R+1 where none is.

    Raises WhenceError where `level` is not finite. Source: LDA §5.2.
    """
    if not np.isfinite(level):
        raise WhenceError(f"The level is {level}, but must be finite; take it from `levels` of a standard run.")
    reached = np.flatnonzero(curve.returns[1:] >= level)
    return int(reached[0]) + 1 if len(reached) else curve.rounds + 1


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
    rt_peak_paper: 1 - seconds_to(method) to the highest level / seconds of *all* standard rounds, which is
        what the paper's RT_peak is (Acrobot: 1 - 35.80 / 79.87 = 55.2%): only this one belongs beside its
        figures. Standard training itself scores above zero, unless it peaks in its last round.
    se_ave_literal, se_peak_literal: as se_ave and se_peak, over `literal_levels`.
    unreached: the share of `levels` that the method never reached; these count as R+1 rounds.

    Reductions are shares, at most 1, negative where the method is slower. None where the standard run has no
    level, and for times where the standard's are zero. Raises WhenceError where the runs differ in R.
    Source: LDA §5.2, Table 3.
    """
    if method.rounds != standard.rounds:
        raise WhenceError(_unequal_rounds("the method's curve", method, "the standard's", standard))
    values: dict[str, float | None] = dict.fromkeys(PAIR_METRICS)
    literal = _round_reductions(method, standard, literal_levels(standard))
    values["se_ave_literal"], values["se_peak_literal"] = float(literal.mean()), float(literal[-1])
    robust = levels(standard)
    if len(robust):
        peak = float(robust[-1])
        reductions = _round_reductions(method, standard, robust)
        method_seconds = seconds_to(method, peak)
        values["se_ave"], values["se_peak"] = float(reductions.mean()), float(reductions[-1])
        values["rt_peak"] = _time_reduction(method_seconds, seconds_to(standard, peak))
        values["rt_peak_paper"] = _time_reduction(method_seconds, float(standard.seconds.sum()))
        values["unreached"] = float(np.mean(robust > method.returns[1:].max()))
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
    curves: Mapping[str, Mapping[int, Curve]], *, standard: str = "ppo", resamples: int = 2000, seed: int = 0
) -> dict[str, dict[str, dict[str, Any]]]:
    """Summarise all arms over their seeds: {arm: {metric: entry}}, ready for JSON.

    curves: for each arm, its run of each seed; `standard` names the arm that the others are compared with.
    resamples, seed: of the percentile bootstraps; no figure of an arm depends on which others are there.

    An entry of `PAIR_METRICS` holds, as shares:
    mean, low, high: over the pairs of a method seed and a standard seed that have a value, with a 95%
        bootstrap of method seeds and of standard seeds. No low and high where only one of each has one.
    per_seed: the mean over standard seeds, for each method seed in sorted order.
    null, null_low, null_high: the same of standard seeds against other standard seeds, which an arm that does
        nothing would show and which need not be zero. Seeds are resampled once for both places; a seed never
        meets itself. No ends with fewer than three seeds: two have the same mean in every resample.
    The standard arm's own figures are that null: a seed against itself would be zero and say nothing.

    An entry of `CURVE_METRICS` holds, in units of return:
    mean, low, high, per_seed: over seeds; no low and high with one seed.
    iqm: the mean without int(n / 4) of n seeds at either end: the plain mean where n < 4.
    difference: mean, low, high of the differences from the standard arm over the seeds that both have, with a
        95% t interval; no low and high with one such seed, no mean with none.
    null: 0.0, the null of `difference` and not of `mean`: an arm that does nothing differs by 0 on average.

    What is not there is None. Raises WhenceError where the standard arm is missing, an arm has no run, a run
    has another R than the standard's, or `resamples` < 1. Source: LDA §5.2, Table 3.
    """
    _check_arms(curves, standard, resamples)
    standards = dict(sorted(curves[standard].items()))
    reference = {run_seed: curve_metrics(curve) for run_seed, curve in standards.items()}
    nulls = _pair_entries(standards, standards, resamples, seed, null=True)
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for arm in curves:
        methods = dict(sorted(curves[arm].items()))
        pairs = nulls if arm == standard else _pair_entries(methods, standards, resamples, seed)
        summary[arm] = _curve_entries(methods, reference, resamples, seed)
        for name, null in nulls.items():
            beside = {"null": null["mean"], "null_low": null["low"], "null_high": null["high"]}
            summary[arm][name] = pairs[name] | beside
    return summary


def _check_arms(curves: Mapping[str, Mapping[int, Curve]], standard: str, resamples: int) -> None:
    if resamples < 1:
        raise WhenceError(f"`resamples` is {resamples}, but a bootstrap needs at least 1; 2000 is usual.")
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


def _pair_entries(
    methods: Mapping[int, Curve],
    standards: Mapping[int, Curve],
    resamples: int,
    seed: int,
    *,
    null: bool = False,
) -> dict[str, dict[str, Any]]:
    table = [[pair_metrics(method, other) for other in standards.values()] for method in methods.values()]
    # A generator for each arm, so that no interval depends on which arms came before.
    generator = np.random.default_rng(seed)
    method_counts = _seed_counts(generator, len(methods), resamples)
    standard_counts = method_counts if null else _seed_counts(generator, len(standards), resamples)
    entries = {}
    for name in PAIR_METRICS:
        # As float64, None is NaN.
        values = np.array([[pair[name] for pair in row] for row in table], dtype=np.float64)
        if null:
            np.fill_diagonal(values, np.nan)
        # Two seeds make the same pairs in every resample: a null of no width, which would claim too much.
        known_spread = not null or len(standards) > 2
        ends = _bootstrap(values, method_counts, standard_counts) if known_spread else (None, None)
        entries[name] = _entry(values, *ends)
    return entries


def _curve_entries(
    methods: Mapping[int, Curve], reference: Mapping[int, Mapping[str, float]], resamples: int, seed: int
) -> dict[str, dict[str, Any]]:
    own = {run_seed: curve_metrics(curve) for run_seed, curve in methods.items()}
    counts = _seed_counts(np.random.default_rng(seed), len(own), resamples)
    entries = {}
    for name in CURVE_METRICS:
        values = np.array([[metrics[name]] for metrics in own.values()])
        entry = _entry(values, *_bootstrap(values, counts, np.ones((resamples, 1), dtype=np.int64)))
        entry["iqm"] = float(stats.trim_mean(values[:, 0], 0.25))
        entry["null"] = 0.0
        shared = [run_seed for run_seed in own if run_seed in reference]
        entry["difference"] = _t_interval(np.array([own[s][name] - reference[s][name] for s in shared]))
        entries[name] = entry
    return entries


def _entry(values: Float64[np.ndarray, "rows any"], low: float | None, high: float | None) -> dict[str, Any]:
    return {"mean": _mean(values), "low": low, "high": high, "per_seed": [_mean(row) for row in values]}


def _mean(values: Float64[np.ndarray, "..."]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def _seed_counts(generator: np.random.Generator, seeds: int, resamples: int) -> Int64[np.ndarray, "resamples seeds"]:
    """Return how often each seed is drawn in each resample with replacement."""
    return generator.multinomial(seeds, np.full(seeds, 1 / seeds), size=resamples)


def _bootstrap(
    values: Float64[np.ndarray, "rows columns"],
    row_counts: Int64[np.ndarray, "resamples rows"],
    column_counts: Int64[np.ndarray, "resamples columns"],
) -> tuple[float | None, float | None]:
    """Return the percentile interval of the mean of the known values; a pair weighs its counts' product."""
    known = ~np.isnan(values)
    if known.any(axis=1).sum() <= 1 and known.any(axis=0).sum() <= 1:
        return None, None
    totals = ((row_counts @ np.where(known, values, 0.0)) * column_counts).sum(axis=1)
    pairs = ((row_counts @ known.astype(np.int64)) * column_counts).sum(axis=1)
    # A resample may miss every pair that has a value; it then has no mean.
    usable = pairs > 0
    if not usable.any():
        return None, None
    low, high = np.quantile(totals[usable] / pairs[usable], [_TAIL, 1 - _TAIL]).tolist()
    return low, high


def _t_interval(differences: Float64[np.ndarray, " pairs"]) -> dict[str, float | None]:
    # By hand, since scipy's interval is NaN where all differences are equal, as of the standard from itself.
    if len(differences) < 2:
        return {"mean": _mean(differences), "low": None, "high": None}
    mean = float(differences.mean())
    standard_error = differences.std(ddof=1) / np.sqrt(len(differences))
    half = float(stats.t.ppf(1 - _TAIL, len(differences) - 1) * standard_error)
    return {"mean": mean, "low": mean - half, "high": mean + half}
