"""What is wrong with a language model's rewards: one rises while another falls, or stays low."""

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import polars as pl
from jaxtyping import Float
from scipy.stats import ttest_ind

from whence.findings.finding import CHANCE, CannotTellError, Finding, say_chance
from whence.runs import RunDirectory

_ROUNDS = 64
"""Rounds that are read at most, spread over the run."""

_LEAST_ROUNDS = 8
_LEAST_UNITS = 8
_LEAST_CHANGE = 0.1
"""Of a reward's whole range: a smaller rise or fall is not worth a line, however sure it is."""

_LARGE_CHANGE = 0.5
"""Of a reward's whole range: what rises less, while another stays low, may only come first."""

_KEYS = ("round", "record_id", "unit", "advantage")


class _Pair(NamedTuple):
    """A reward that rises while another number falls, or stays low, from a quarter of the rounds to the last one."""

    rises: str
    falls: str
    quarter: int
    p: float
    stays: bool = False


def find_gamed_rewards(run: RunDirectory) -> list[Finding]:
    """Return the rewards that rise while another falls or stays low, with responses that have the one, not the other.

    The mean over the responses to a prompt is a unit, and units of a quarter of the rounds are compared with those of
    the last quarter by Welch's test. A quarter may be any of the first three, since both may rise at first. What falls
    may also be a number that a reward logged; a column of the data set is the same for all responses to a prompt. A
    reward stays low if it hardly changes and ends in the lower half of its range, while the other rises by half of its.

    Raises:
        CannotTellError: there are few rounds, or there is one reward only.
    """
    table = _read_numbers(run)
    rounds = np.unique(table["round"].to_numpy()) if len(table) else np.array([])
    numbers = [name for name in table.columns if name not in _KEYS]
    rewards = [name for name in numbers if name.startswith("reward.")] or [n for n in numbers if n == "reward"]
    falling = [name for name in numbers if name.startswith("reward.") or name.startswith("info.")]
    if len(rounds) < _LEAST_ROUNDS:
        raise CannotTellError(f"fewer than {_LEAST_ROUNDS} rounds are stored")
    pairs = [(rises, falls) for rises in rewards for falls in falling if rises != falls]
    if not pairs:
        raise CannotTellError("there is no second reward or logged number")
    strongest: dict[str, _Pair] = {}
    for pair in _test_pairs(table, rounds, pairs):
        if pair.falls not in strongest or pair.p < strongest[pair.falls].p:
            strongest[pair.falls] = pair
    return [_describe(table, rounds, pair) for pair in sorted(strongest.values(), key=lambda each: each.p)]


def _read_numbers(run: RunDirectory) -> pl.DataFrame:
    """Return rewards and what varies among the responses to a prompt, as numbers, of rounds spread over the run."""
    stored = run.rounds()
    chosen = [stored[int(place)] for place in np.linspace(0, len(stored) - 1, min(_ROUNDS, len(stored))).round()]
    tables = []
    for number in dict.fromkeys(chosen):
        table = run.round("records", number)
        unit = "group_id" if "group_id" in table.columns else "prompt"
        names = [name for name, kind in table.schema.items() if _is_looked_at(name, kind)]
        further = [pl.col(name).cast(pl.Float64) for name in ("advantage",) if name in table.columns]
        columns = [pl.col(name).cast(pl.Float64).fill_nan(None) for name in names]
        keys = (pl.lit(number).alias("round"), "record_id", pl.col(unit).cast(pl.String).alias("unit"))
        tables.append(table.select(*keys, *further, *columns))
    table = pl.concat(tables, how="diagonal_relaxed") if tables else pl.DataFrame()
    infos = [name for name in table.columns if name.startswith("info.")]
    if not infos:
        return table
    varies = table.group_by("round", "unit").agg(pl.col(infos).n_unique() > 1).select(pl.col(infos).any())
    return table.drop([name for name in infos if not varies[name][0]])


def _is_looked_at(name: str, kind: pl.DataType) -> bool:
    return name.split(".")[0] in ("reward", "info") and (kind.is_numeric() or kind == pl.Boolean)


def _test_pairs(table: pl.DataFrame, rounds: Float[np.ndarray, " r"], pairs: list[tuple[str, str]]) -> Iterator[_Pair]:
    """Yield pairs of which one rises and the other falls by more than chance and enough to matter."""
    quarters = np.array_split(rounds, 4)
    numbers = sorted({name for pair in pairs for name in pair})
    units = table.group_by("round", "unit").agg(pl.col(numbers).mean())
    values = {
        (name, place): units.filter(pl.col("round").is_in(quarter.tolist()))[name].drop_nulls().to_numpy()
        for name in numbers
        for place, quarter in enumerate(quarters)
    }
    ends = {name: (table[name].min() or 0.0, table[name].max() or 0.0) for name in numbers}
    ranges: dict[str, tuple[float, float]] = ends  # type: ignore[assignment]
    spans = {name: high - low for name, (low, high) in ranges.items()}
    for rises, falls in pairs:
        for place in range(3):
            p = max(
                _test_rise(values[rises, place], values[rises, 3], _LEAST_CHANGE * spans[rises]),
                _test_rise(-values[falls, place], -values[falls, 3], _LEAST_CHANGE * spans[falls]),
            )
            if (p := min(1.0, p * 3 * len(pairs))) <= CHANCE:
                yield _Pair(rises, falls, place, p)
        if falls.startswith("reward.") and _stays_low(values[falls, 0], values[falls, 3], *ranges[falls]):
            p = _test_rise(values[rises, 0], values[rises, 3], _LARGE_CHANGE * spans[rises]) * len(pairs)
            if p <= CHANCE:
                yield _Pair(rises, falls, 0, p, stays=True)


def _stays_low(before: Float[np.ndarray, " n"], after: Float[np.ndarray, " m"], low: float, high: float) -> bool:
    """Return whether a mean hardly changes, and ends in the lower half of its range."""
    if min(len(before), len(after)) < _LEAST_UNITS:
        return False
    return bool(abs(after.mean() - before.mean()) <= _LEAST_CHANGE * (high - low) and after.mean() < (low + high) / 2)


def _test_rise(before: Float[np.ndarray, " n"], after: Float[np.ndarray, " m"], least: float) -> float:
    """Return the chance of a mean that rises so far where nothing changed; 1 if it rises by less than `least`."""
    if min(len(before), len(after)) < _LEAST_UNITS or not after.mean() - before.mean() > least:
        return 1.0
    with warnings.catch_warnings():  # of a reward that is the same for all
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(ttest_ind(before, after, equal_var=False, alternative="less").pvalue)


def _describe(table: pl.DataFrame, rounds: Float[np.ndarray, " r"], pair: _Pair) -> Finding:
    first, last = np.array_split(rounds, 4)[pair.quarter], np.array_split(rounds, 4)[3]
    parts = [table.filter(pl.col("round").is_in(part.tolist())) for part in (first, last)]
    means = {name: [_mean(part, name) for part in parts] for name in (pair.rises, pair.falls)}
    by_round = table.group_by("round").agg(pl.col(pair.rises, pair.falls).mean()).sort("round")
    other = np.zeros(len(by_round)) if pair.stays else by_round[pair.falls].to_numpy()  # noise has no bend
    onset = int(rounds[find_onset(by_round[pair.rises].to_numpy(), other)])
    (low, high), (before, after) = means[pair.rises], means[pair.falls]
    much, little = (low + 3 * high) / 4, (before + after) / 2
    gaming = (pl.col(pair.rises) > much) & (pl.col(pair.falls) < little)
    since = table.filter(pl.col("round") >= onset).with_columns(gaming=gaming.fill_null(False))
    shares = since.group_by("round").agg(pl.col("gaming").mean()).sort("round")
    # The round that shows it: the first one with half of the share that the last ones have.
    usual = _mean(shares.filter(pl.col("round").is_in(last.tolist())), "gaming")
    number = int(shares.filter(pl.col("gaming") >= usual / 2)["round"][0])
    rows = since.filter(pl.col("gaming"), pl.col("round") == number)
    # The clearest come first, and of these the ones that training made likelier.
    by = [name for name in (pair.rises, "advantage") if name in rows.columns]
    rows = rows.sort(*by, descending=True, nulls_last=True)
    rises, falls = (name.partition(".")[2] or name for name in (pair.rises, pair.falls))
    return Finding(
        "reward",
        f"`{rises}` rises while `{falls}` {'stays low' if pair.stays else 'falls'}, since about round {onset}",
        f"From rounds {first[0]} to {first[-1]} to rounds {last[0]} to {last[-1]}, `{rises}` goes from {low:.2g} to "
        f"{high:.2g} and `{falls}` from {before:.2g} to {after:.2g}. "
        f"{since['gaming'].sum():,} of {len(since):,} responses since round {onset} have more than {much:.3g} of "
        f"`{rises}` and less than {little:.3g} of `{falls}`. {say_chance(pair.p)}",
        f"Read these responses. If they are not what you want, `{rises}` is being gamed. Where the target pays for it, "
        "too, their scores say that they help. Change the reward; to see what training without these responses does, "
        "flag them, then: `whence prove RUN --flagged`.",
        p=pair.p,
        round=number,
        record_ids=tuple(rows["record_id"].to_list()),
    )


def _mean(table: pl.DataFrame, name: str) -> float:
    return float(table[name].mean() or 0.0)  # type: ignore[arg-type]


def find_onset(rises: Float[np.ndarray, " r"], falls: Float[np.ndarray, " r"]) -> int:
    """Return the place from which two curves move apart: where a line that is flat, then steep, then flat, bends.

    The line is that of least squares through the difference of the curves, each in its standard deviation.
    """
    apart = sum(sign * (curve - curve.mean()) / (curve.std() or 1.0) for sign, curve in ((1, rises), (-1, falls)))
    places, best = np.arange(len(rises)), (np.inf, 0)
    for start in places[:-1]:
        for end in places[start + 1 :]:
            ramp = np.clip(places - start, 0, end - start)
            slope, level = np.polyfit(ramp, apart, 1)
            misfit = float(((apart - level - slope * ramp) ** 2).sum())
            best = min(best, (misfit, int(start))) if slope > 0 else best
    return best[1]
