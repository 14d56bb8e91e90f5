"""What is wrong with a language model's rewards: one rises while another falls, or stays low."""

import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from jaxtyping import Float, Int
from scipy.stats import ttest_ind

from whence.findings.finding import CHANCE, CannotTellError, Finding, say_chance
from whence.findings.response_figures import choose_rounds
from whence.runs import RunDirectory

_LEAST_ROUNDS = 8
_LEAST_UNITS = 8
_LEAST_CHANGE = 0.1
"""Of a reward's whole range: a smaller rise or fall is not worth a line, however sure it is."""

_LARGE_CHANGE = 0.5
"""Of a reward's whole range: what rises less, while another stays low, may only come first."""

_MOST_LEFT = 0.25
"""Of what a reward was above its lowest: one that loses the rest counts from half of the least change on."""

_MANY_UNITS, _PERMUTATIONS, _ENOUGH = 64, 100_000, 20
"""Units that Welch's test needs where few are compared with many; permutations at most, and until so many rise."""

_KEYS = ("round", "record_id", "unit", "advantage")


class _Pair(NamedTuple):
    """A reward that rises while another number falls, or stays low, from some rounds to the last quarter of them."""

    rises: str
    falls: str
    first: tuple[int, ...]
    p: float
    stays: bool = False


def find_gamed_rewards(run: RunDirectory) -> list[Finding]:
    """Return the rewards that rise while another falls or stays low, with responses that have the one, not the other.

    The mean over the responses to a prompt is a unit, and units of a quarter of the rounds are compared with those of
    the last quarter by Welch's test. A quarter may be any of the first three, since both may rise at first. The first
    one, two, four, ... rounds are compared, too, since a reward may be lost in these. If their units are few, the
    chance is the share of permutations of all units, which are exchangeable where nothing changes. What falls may also
    be a number that a reward logged; a column of the data set is the same for all responses to a prompt. A reward stays
    low if it hardly changes and ends in the lower half of its range, while the other rises by half of its. Few rounds,
    or one reward, raise a `CannotTellError`.
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
        # What was lost did not stay low, even if that is the surer of the two.
        if pair.falls not in strongest or (pair.stays, pair.p) < (strongest[pair.falls].stays, strongest[pair.falls].p):
            strongest[pair.falls] = pair
    return [_describe(table, rounds, pair) for pair in sorted(strongest.values(), key=lambda each: each.p)]


def _read_numbers(run: RunDirectory) -> pl.DataFrame:
    """Return rewards and what varies among the responses to a prompt, as numbers, of rounds spread over the run."""
    tables = []
    for number in choose_rounds(run.rounds()):
        table = run.round("records", number)
        unit = "group_id" if "group_id" in table.columns else "prompt"
        kinds = {name: kind for name, kind in table.schema.items() if name.split(".")[0] in ("reward", "info")}
        names = [name for name, kind in kinds.items() if kind.is_numeric() or kind == pl.Boolean]
        columns = [pl.col(name).cast(pl.Float64).fill_nan(None) for name in names]
        columns += [pl.col("advantage").cast(pl.Float64)] if "advantage" in table.columns else []
        keys = (pl.lit(number).alias("round"), "record_id", pl.col(unit).cast(pl.String).alias("unit"))
        tables.append(table.select(*keys, *columns))
    table = pl.concat(tables, how="diagonal_relaxed") if tables else pl.DataFrame()
    infos = [name for name in table.columns if name.startswith("info.")]
    if not infos:
        return table
    varies = table.group_by("round", "unit").agg(pl.col(infos).n_unique() > 1).select(pl.col(infos).any())
    return table.drop([name for name in infos if not varies[name][0]])


def _list_beginnings(rounds: Int[np.ndarray, " r"]) -> list[tuple[int, ...]]:
    """Return the first three quarters of the rounds, then the first one, two, four, ... of the first quarter."""
    quarters = [tuple(part.tolist()) for part in np.array_split(rounds, 4)[:3]]
    return quarters + [quarters[0][: 2**power] for power in range(len(rounds)) if 2**power < len(quarters[0])]


def _test_pairs(table: pl.DataFrame, rounds: Int[np.ndarray, " r"], pairs: list[tuple[str, str]]) -> Iterator[_Pair]:
    """Yield pairs of which one rises and the other falls by more than chance and enough to matter."""
    beginnings, last = _list_beginnings(rounds), tuple(np.array_split(rounds, 4)[3].tolist())
    numbers = sorted({name for pair in pairs for name in pair})
    units = table.group_by("round", "unit", maintain_order=True).agg(pl.col(numbers).mean())
    values = {
        (name, part): units.filter(pl.col("round").is_in(part))[name].drop_nulls().to_numpy()
        for name in numbers
        for part in (*beginnings, last)
    }
    ranges: dict[str, Any] = {name: (table[name].min() or 0.0, table[name].max() or 0.0) for name in numbers}
    spans = {name: high - low for name, (low, high) in ranges.items()}

    @cache
    def test(name: str, part: tuple[int, ...], sign: int) -> float:
        before, after, low = values[name, part], values[name, last], ranges[name][0]
        is_lost = sign < 0 and len(before) > 0 and after.mean() - low <= _MOST_LEFT * (before.mean() - low)
        compare = _test_rise if part in beginnings[:3] else _permute_rise
        return compare(sign * before, sign * after, _LEAST_CHANGE * spans[name] / (2 if is_lost else 1))

    quarter = beginnings[0]
    for rises, falls in pairs:
        for part in beginnings:
            p = max(test(rises, part, 1), test(falls, part, -1)) * len(beginnings) * len(pairs)
            if p <= CHANCE:
                yield _Pair(rises, falls, part, p)
        if falls.startswith("reward.") and _stays_low(values[falls, quarter], values[falls, last], *ranges[falls]):
            p = _test_rise(values[rises, quarter], values[rises, last], _LARGE_CHANGE * spans[rises]) * len(pairs)
            if p <= CHANCE:
                yield _Pair(rises, falls, quarter, p, stays=True)


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


def _permute_rise(before: Float[np.ndarray, " n"], after: Float[np.ndarray, " m"], least: float) -> float:
    """Return the share of permutations of units with such a rise, for units too few for Welch's test; see there."""
    if len(before) >= _MANY_UNITS or not after.mean() - before.mean() > least or len(before) < _LEAST_UNITS:
        return _test_rise(before, after, least)
    units, generator = np.concatenate([before, after]), np.random.default_rng(0)
    count = done = 0
    while done < _PERMUTATIONS and count < _ENOUGH:
        sums = generator.permuted(np.tile(units, (1000, 1)), axis=1)[:, : len(before)].sum(axis=1)
        count, done = count + int((sums <= before.sum() + 1e-9).sum()), done + 1000
    return (count + 1) / (done + 1)


def _describe(table: pl.DataFrame, rounds: Int[np.ndarray, " r"], pair: _Pair) -> Finding:
    first, last = np.array(pair.first), np.array_split(rounds, 4)[3]
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
    beginning = f"rounds {first[0]} to {first[-1]}" if len(first) > 1 else f"round {first[0]}"
    return Finding(
        "reward",
        f"`{rises}` rises while `{falls}` {'stays low' if pair.stays else 'falls'}, since about round {onset}",
        f"From {beginning} to rounds {last[0]} to {last[-1]}, `{rises}` goes from {low:.2g} to "
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
