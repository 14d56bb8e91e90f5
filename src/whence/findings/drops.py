"""When a run broke: the round from which its return stays below its best, and what was unusual until then."""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from whence.findings.history import History, Series

Numbers = NDArray[np.float64]

FEWEST = 12
"""Rounds that a run needs to have worked, and then broken."""

_PART, _LEAST_PART = 10, 3
"""A tenth of the rounds, and three at least, are what a mean return is of (SPEC of the study: results/collapse)."""

LEAST_DEPTH = 1 / 3
"""How far a return has to fall, as a share of what it had risen, to be a drop."""

EARLIER = 8
"""Rounds before it that a number is compared with, at least."""


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
    place is the split of least squares between the best tenth and the end.

    Args:
        rounds: (r,) their numbers.
        returns: (r,) NaN where no episode ended.
    """
    known = np.flatnonzero(np.isfinite(returns))
    values, part = returns[known], max(_LEAST_PART, len(known) // _PART)
    if len(known) < FEWEST:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(values, part)
    first, *middle, last = means = windows.mean(axis=1)
    best = len(middle) - int(middle[::-1].index(max(middle)))  # of equal ones, the last
    risen, fallen = means[best] - first, means[best] - last
    if risen <= _reach(windows[0]) + _reach(windows[best]) or fallen <= _reach(windows[best]) + _reach(windows[-1]):
        return None
    place = best + split_in_two(values[best:])
    return Drop(
        place=int(known[place]),
        round=int(rounds[known[place]]),
        best_rounds=(int(rounds[known[best]]), int(rounds[known[best + part - 1]])),
        **{"first": float(first), "best": float(means[best]), "last": float(last), "depth": float(fallen / risen)},
    )


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
    """A number of a round that is beyond what it was in all rounds before.

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

    Rounds have to follow `EARLIER` others. The range of a column's summary is that of all its summaries together.
    """
    columns = defaultdict[tuple[bool, str], list[Numbers]](list)
    for series in history.series:
        columns[_name_scale(series)].append(scale(series))
    changes = dict[str, Change]()
    for series in filter(lambda each: each.kind, history.series):
        values, around = scale(series), np.stack(columns[_name_scale(series)])
        for place in places:
            known = np.isfinite(values[:place])
            if known.sum() < EARLIER or not np.isfinite(values[place]):
                continue
            earlier, all_earlier = values[:place][known], around[:, :place][:, known]
            least = _LEAST_WIDTH.get(series.kind, _LEAST_SHARE.get(series.kind, 0.01) * np.nanmax(np.abs(all_earlier)))
            width = max(float(np.nanmax(all_earlier) - np.nanmin(all_earlier)), float(least))
            if width <= 0:  # it has been 0 all the time
                continue
            size = max(values[place] - earlier.max(), earlier.min() - values[place], 0.0) / width
            if series.kind not in changes or size > changes[series.kind].size:
                usual = float(np.median(series.values[:place][known]))
                changes[series.kind] = Change(series, place, float(series.values[place]), usual, float(size))
    return changes


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
