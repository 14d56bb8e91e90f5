"""When a run broke: the round from which its return stays below its best, and what was unusual until then."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy import stats

from whence.findings.evidence import Evidence
from whence.findings.finding import CannotTellError, Sight
from whence.findings.history import FEWEST, History, Numbers, Series
from whence.runs import RunDirectory
from whence.scores import read_axes
from whence.stored.agents import state_names

_PART, _LEAST_PART = 10, 3
"""A mean return is of a tenth of the rounds, and of three at least."""

LEAST_DEPTH = 1 / 3
"""How far a return has to fall, as a share of what it had risen, to be a drop."""

_BEYOND, _BEYOND_TREND = 4.0, 6.0
"""How many times the usual change between neighbouring tenths a rise and a fall have, without and with a trend taken
away: of noise, nearly none has either."""

WINDOW = 5
"""Rounds before a drop in which something may have been unusual."""

EARLIER, RECENT = 8, 12
"""Rounds before it that a number is compared with, at least and at most: a policy begins with other numbers."""


@dataclass(frozen=True)
class Drop:
    """A return that rose and fell.

    Attributes:
        place: of the first round of the lower returns, from 0, among those of the history.
        round: its number.
        best_rounds: the first and the last round of the best tenth of the run.
        first, best, last: mean returns of the first tenth of the rounds, the best, and the last.
        depth: how far it fell, as a share of what it had risen.
    """

    place: int
    round: int
    best_rounds: tuple[int, int]
    first: float
    best: float
    last: float
    depth: float


def find_drop(rounds: NDArray[np.int64], returns: Numbers) -> Drop | None:
    """Return how the return fell below its best tenth until the end, if it did so beyond chance.

    The means of both tenths are further apart than their 95% intervals reach, and so are the first and the best. The
    place is the split of least squares between the best tenth and the end. Of r rounds, `rounds` (r,) are the numbers,
    and `returns` (r,) are NaN where no episode ended.
    """
    known = np.flatnonzero(np.isfinite(returns))
    values, part = returns[known], max(_LEAST_PART, len(known) // _PART)
    if len(known) < FEWEST:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(values, part)
    first, *middle, last = means = windows.mean(axis=1)
    best = len(middle) - int(middle[::-1].index(max(middle)))  # of equal ones, the last
    risen, fallen = means[best] - first, means[best] - last
    if risen <= max(_measure_wander(means, part, best), _reach(windows[0]) + _reach(windows[best])):
        return None
    if fallen <= max(_measure_wander(means, part, len(means)), _reach(windows[best]) + _reach(windows[-1])):
        return None
    place = best + split_in_two(values[best:])
    return Drop(
        place=int(known[place]),
        round=int(rounds[known[place]]),
        best_rounds=(int(rounds[known[best]]), int(rounds[known[best + part - 1]])),
        **{"first": float(first), "best": float(means[best]), "last": float(last), "depth": float(fallen / risen)},
    )


def _measure_wander(means: Numbers, part: int, end: int) -> float:
    """Return how far the mean of a tenth gets by chance, until place `end`.

    What has no trend wanders, too, such as a logged mean over a hundred episodes. What rises steadily does not: there
    the change of the change is small, which is three times as variable as the change if means are independent.
    """
    steps = np.abs(means[part:] - means[:-part])
    bends = np.abs(means[2 * part :] - 2 * means[part:-part] + means[: -2 * part]) / np.sqrt(3)
    return min(_BEYOND * float(np.median(steps[: end + 1])), _BEYOND_TREND * float(np.median(bends)))


def _reach(values: Numbers) -> float:
    """Return half of the 95% interval of the mean of a few rounds, by their differences: a slope is no noise."""
    error = np.sqrt((np.diff(values) ** 2).mean() / 2 / len(values))
    return float(stats.t.ppf(0.975, len(values) - 1) * error)


def split_in_two(values: Numbers) -> int:
    """Return where the second part of a series begins, if it is two levels: the split of least squares."""
    counts, total = np.arange(1, len(values)), values.sum()
    before = np.cumsum(values)[:-1]
    apart = before / counts - (total - before) / (len(values) - counts)
    return int((apart**2 * counts * (len(values) - counts)).argmax()) + 1


class Change(NamedTuple):
    """A number of a round that is beyond what it was in the rounds before.

    Attributes:
        series: the number.
        place: of the round, from 0, among those of the history.
        value: there.
        usual: the median of the rounds before.
        size: how far it is beyond their range, in widths of that range.
    """

    series: Series
    place: int
    value: float
    usual: float
    size: float


_LEAST_WIDTH = {"explained variance": 0.25, "clipped share": 0.05, "action": 0.05, "new observations": 0.05}
"""The narrowest range of a share that its changes are measured by."""

_LEAST_SHARE = {"length": 0.1}
"""The narrowest range of others, as a share of their size; else a hundredth."""


def measure_changes(history: History, places: range) -> dict[str, Change]:
    """Return the largest change of each kind of number among some rounds.

    Rounds have to follow `EARLIER` others. The range of a column's summary is that of all its summaries together. Of
    `LEVELS` there is a second kind, whose size is the level itself, whatever it was before.
    """
    columns = defaultdict[tuple[bool, str], list[Numbers]](list)
    for series in history.series:
        columns[_name_scale(series)].append(scale(series))
    changes = dict[str, Change]()
    for series in filter(lambda each: each.kind, history.series):
        values, around = scale(series), np.stack(columns[_name_scale(series)])
        levels = LEVELS[series.kind](series.values) if series.kind in LEVELS else None
        for place in places:
            before = np.arange(max(0, place - RECENT), place)
            before = before[np.isfinite(values[before])]
            if len(before) < EARLIER or not np.isfinite(values[place]):
                continue
            usual, value = float(np.median(series.values[before])), float(series.values[place])
            size = _measure_beyond(values[place], values[before], around[:, before], series.kind)
            sizes = {series.kind: size, f"{series.kind}{ITSELF}": 0.0 if levels is None else float(levels[place])}
            for kind, each in sizes.items():
                if (kind == series.kind or levels is not None) and (kind not in changes or each > changes[kind].size):
                    changes[kind] = Change(series._replace(kind=kind), place, value, usual, each)
    return changes


def _measure_beyond(value: float, earlier: Numbers, around: NDArray[np.float64], kind: str) -> float:
    """Return how far a value is beyond earlier ones, in widths of the range of what is around them."""
    least = _LEAST_WIDTH.get(kind, _LEAST_SHARE.get(kind, 0.01) * float(np.nanmax(np.abs(around))))
    width = max(float(np.nanmax(around) - np.nanmin(around)), least)
    beyond = max(value - earlier.max(), earlier.min() - value, 0.0)
    return float(beyond / width) if width > 0 else 0.0  # it has been 0 all the time


def _count_decades(values: Numbers) -> Numbers:
    """Return how far positive numbers are below the first one, in decades; where one is not positive, 0."""
    known = values[np.isfinite(values)]
    if not len(known) or known.min() <= 0:
        return np.zeros(len(values))
    return np.asarray(np.log10(known[0] / values))


LEVELS: Mapping[str, Callable[[Numbers], Numbers]] = {
    "divergence": lambda values: values,
    "clipped share": lambda values: values,
    "entropy": _count_decades,
    "deviation": lambda values: np.abs(_count_decades(values)),
}
"""Kinds that mean the same in every run: nats, shares, and decades from what they were in the first round."""

ITSELF = " itself"
"""The end of the name of a kind that is a level."""


def _name_scale(series: Series) -> tuple[bool, str]:
    """Return what series have a scale in common: those of a column, but for the shares of its records."""
    is_share = series.kind in _LEAST_WIDTH
    return (True, series.words) if is_share or not series.column else (False, series.column)


def scale(series: Series) -> Numbers:
    """Return a number as it is compared: losses by their order of magnitude, what is explained down to nothing."""
    if series.kind == "value loss":
        return np.log10(np.maximum(series.values, 1e-12))
    if series.kind == "explained variance":
        return np.maximum(series.values, 0.0)
    return series.values


def look_at_drop(evidence: Evidence) -> Sight:
    """Measure how far the return is, at the end, below its best: as a share of what it had risen."""
    if (history := evidence.history) is None:
        raise CannotTellError(f"the run has fewer than {FEWEST} rounds with a return")
    if (drop := find_drop(history.rounds, history.returns)) is None:
        return Sight(0.0)
    first, last = drop.best_rounds
    return Sight(
        drop.depth,
        "drop",
        f"It worked, then it broke: the return rose from {drop.first:.3g} to {drop.best:.4g} in rounds {first} to "
        f"{last}, fell about round {drop.round}, and ends at {drop.last:.3g}",
        f"It {f'lost {drop.depth:.0%} of what it had gained' if drop.depth < 1 else 'ends below where it began'}, "
        "beyond the 95% intervals of these means.",
        f"The policy of round {last} is among the best. `whence again` continues the training of an agent of SB3's "
        "from before the fall, with other seeds, and tells what prevents it.",
    )


def list_precursors(history: History, drop: Drop, healthy: Mapping[str, float]) -> list[Change]:
    """Return what was beyond healthy runs until a drop: what was so first, then what was so the furthest.

    `healthy` is the largest change of each kind of number in healthy runs.
    """
    first = dict[str, Change]()
    for place in range(max(0, drop.place - WINDOW), drop.place + 1):
        for kind, change in measure_changes(history, range(place, place + 1)).items():
            if kind in healthy and change.size > healthy[kind]:
                first.setdefault(change.series.words, change)

    def rank(change: Change) -> tuple[bool, int, float]:
        kind = change.series.kind  # levels come last: they may have been there before
        return kind.endswith(ITSELF), change.place, -change.size / max(healthy[kind], 0.1)

    return sorted(first.values(), key=rank)


_ADVICE: Mapping[str, str] = {
    **dict.fromkeys(
        ("divergence", "clipped share", "gradient norm"),
        "Updates were too large: lower `learning_rate` or `n_epochs`, clip gradients, or stop epochs by `target_kl`.",
    ),
    **dict.fromkeys(("learning rate", "clip range"), "See what the schedule does there."),
    **dict.fromkeys(("value loss", "explained variance", "value"), "Look at rewards and the critic of that round."),
    **dict.fromkeys(("entropy", "deviation", "action"), "Compare the policies of the rounds: `whence view`."),
    **dict.fromkeys(("reward", "advantage"), "Look at these records. An outlier is clipped by `VecNormalize`."),
    **dict.fromkeys(
        ("observation", "new observations"),
        "Look at these records: has the environment or a sensor changed, or has the policy gone where it never was?",
    ),
}


def describe_change(change: Change, number: int, drop: Drop) -> tuple[str, str]:
    """Return what was unusual in round `number`, in a line, and what to do."""
    when = f"Before it broke, in round {number}" if change.place < drop.place else f"As it broke, in round {number}"
    compared = f"after {change.usual:.3g} in the rounds before"
    if change.series.kind.endswith(ITSELF):
        compared = "where no healthy run comes"
    title = f"{when}: {change.series.words} is {change.value:.3g}, {compared}"
    return title, _ADVICE.get(change.series.kind.removesuffix(ITSELF), "Look at that round: `whence view`.")


def say_distance(change: Change) -> str:
    """Return how far a number is beyond those before, as the beginning of a sentence; of a level, nothing."""
    if (kind := change.series.kind).endswith(ITSELF):
        is_size = kind.removesuffix(ITSELF) in ("divergence", "clipped share")
        return "It is" if is_size else "Its distance from the first round's is"
    times = f"{change.size:,.0f}" if change.size >= 10 else f"{change.size:.2g}"
    return f"It is beyond the rounds before by {times} times their range,"


def find_records(run: RunDirectory, history: History, change: Change) -> tuple[int, ...]:
    """Return the ids of the records of its round that show a change; none where no single ones do."""
    series = change.series
    if not series.column:
        return ()
    records = run.round("records", int(history.rounds[change.place]))
    columns = read_axes(records, state_names(run.config.get("env"), run.config))
    columns |= {name: records[name].to_numpy() for name in ("reward", "advantage", "value") if name in records.columns}
    if (values := columns.get(series.column)) is None:
        return ()
    if series.kind == "new observations":
        ranges = [
            each.values[: change.place] for each in history.series if not each.kind and each.column == series.column
        ]
        mask = (values < np.nanmin(ranges)) | (values > np.nanmax(ranges))
    elif series.pick is not None:
        mask = series.pick(values, change.value)
    else:
        return ()
    return tuple(records["record_id"].filter(pl.Series(mask)).to_list())
