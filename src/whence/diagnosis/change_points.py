"""Where a noisy curve changes its level: least squares by dynamic programming, few segments."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float

LEAST = 3
"""Points of a segment at least."""

MOST = 3
"""Segments at most: as many as LDA has phases."""

Pattern: TypeAlias = Literal["three phases", "one fall", "no fall"]
"""What the levels of a curve do: fall twice; end lower than they began, but not by two falls; or neither."""


class Segment(NamedTuple):
    """A stretch of a curve.

    Attributes:
        start: the first point.
        end: the point after the last.
        level: the mean of its values.
    """

    start: int
    end: int
    level: float


def split_curve(values: Float[np.ndarray, " n"], *, most: int = MOST, least: int = LEAST) -> list[Segment]:
    """Return the segments of constant level that fit a curve best, as many as stand out from its noise.

    For each number of segments the sum of squares is the smallest there is. Among these numbers,
    n·log(sum of squares/n) + 3·log(n)·segments is the smallest: a further segment costs its level and its place, which
    is searched for (the leading terms of Zhang and Siegmund's modified BIC, Biometrics 2007).

    Args:
        values: (n,) finite; without any there is no segment.
        most: segments at most.
        least: points of a segment at least; a curve shorter than two such segments is one.
    """
    curve = np.asarray(values, np.float64)
    n = len(curve)
    if n == 0:
        return []
    costs = _segment_costs(curve, least)
    whole = float(((curve - curve.mean()) ** 2).sum())
    best = costs[0]  # best[j]: the sum of squares of the first j points, at present in one segment
    candidates = [(_penalise(whole, whole, n, segments=1), [0, n])]
    starts: list[np.ndarray] = []  # for each further segment: where it starts, if it ends at j
    for segments in range(2, most + 1):
        totals = best[:, None] + costs
        starts.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
        if np.isfinite(best[n]):
            candidates.append((_penalise(float(best[n]), whole, n, segments=segments), _trace_bounds(starts, n)))
    _, bounds = min(candidates)
    return [Segment(a, b, float(curve[a:b].mean())) for a, b in pairwise(bounds)]


def _segment_costs(curve: Float[np.ndarray, " n"], least: int) -> Float[np.ndarray, "n1 n1"]:
    """Return the sum of squares about the mean of curve[i:j] at [i, j]; infinite if that is too short."""
    centred = curve - curve.mean()
    sums, squares = (np.concatenate([[0.0], np.cumsum(part)]) for part in (centred, centred**2))
    lengths = np.arange(len(sums)) - np.arange(len(sums))[:, None]
    means = (sums - sums[:, None]) / np.maximum(lengths, 1)
    costs = squares - squares[:, None] - means**2 * lengths
    return np.where(lengths >= least, np.maximum(costs, 0.0), np.inf)


def _penalise(squares: float, whole: float, n: int, *, segments: int) -> float:
    """Return what is minimised. Fits closer than rounding errors of the whole curve count as equally close."""
    return n * math.log(max(squares, 1e-9 * whole, 1e-300) / n) + 3 * math.log(n) * segments


def _trace_bounds(starts: list[np.ndarray], n: int) -> list[int]:
    """Return where segments start, and n."""
    bounds = [n]
    for at in reversed(starts):
        bounds.append(int(at[bounds[-1]]))
    return [0, *reversed(bounds)]


def name_pattern(levels: Sequence[float]) -> Pattern:
    """Return what the levels of a curve's segments do; see `Pattern`."""
    if len(levels) == MOST and all(later < earlier for earlier, later in pairwise(levels)):
        return "three phases"
    return "one fall" if levels[-1] < levels[0] else "no fall"
