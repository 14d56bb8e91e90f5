"""Roughness of scores on the graph of similar records, and the phases of its curve (LDA §4.2, C.2; v2 B.2)."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import scipy
from jaxtyping import Float, Int

NEIGHBOURS = 50
"""Nearest neighbours of a record where nobody says otherwise; LDA finds little difference from 20 to 100."""

LARGEST = 4096
"""Nodes of a graph at most, since each one's distance to each other is computed."""


class Graph(NamedTuple):
    """The edges of a graph without directions, each once: two nodes, the lower first, and a weight in (0, 1]."""

    first: Int[np.ndarray, " m"]
    second: Int[np.ndarray, " m"]
    weights: Float[np.ndarray, " m"]


def link_similar(embeddings: Float[np.ndarray, "n d"], neighbours: int = NEIGHBOURS) -> Graph:
    """Link each node (n, d) with its nearest ones; w = exp(−‖e_i − e_j‖²/σ²), σ the median distance (LDA C.2; v2 B.2).

    Two nodes are linked if either is among the other's nearest. Nodes that are as near as the last of these are among
    them as well, so that no order of equal states matters.
    """
    nodes = np.ascontiguousarray(embeddings, dtype=np.float64)
    count = min(neighbours, len(nodes) - 1)
    if count < 1:
        return Graph(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    squared = scipy.spatial.distance.cdist(nodes, nodes, "sqeuclidean")
    np.fill_diagonal(squared, np.inf)  # no node is its own neighbour
    furthest = np.partition(squared, count - 1, axis=1)[:, count - 1]
    near = squared <= furthest[:, None]
    first, second = np.nonzero(np.triu(near | near.T))
    return Graph(first, second, np.exp(-squared[first, second] / median_distance(nodes) ** 2))


def median_distance(nodes: Float[np.ndarray, "n d"]) -> float:
    """Return the median distance between two nodes; of those above 0 if most nodes are equal, and 1 if all are.

    Of more than 2,048 nodes, as many are taken, evenly spread.
    """
    distances = scipy.spatial.distance.pdist(spread_evenly(nodes, 2048))
    median = float(np.median(distances)) if len(distances) else 0.0
    apart = distances[distances > 0]
    return median or (float(np.median(apart)) if len(apart) else 1.0)


def spread_evenly(rows: np.ndarray, most: int) -> np.ndarray:
    """Return at most so many rows, evenly spread."""
    return rows if len(rows) <= most else rows[np.linspace(0, len(rows) - 1, most).astype(np.int64)]


def compute_roughness(graph: Graph, values: Float[np.ndarray, " n"]) -> float:
    """Return Σ w_ij (v_i − v_j)² / Σ w_ij over the edges: 0 if linked nodes have equal values (LDA C.2; v2 B.2).

    It is NaN if the graph has no edge.
    """
    total = graph.weights.sum()
    if not total > 0:
        return float("nan")
    return float(graph.weights @ (values[graph.first] - values[graph.second]) ** 2 / total)


def expect_roughness(values: Float[np.ndarray, " n"]) -> float:
    """Return the mean roughness over all permutations of the values: twice their variance, whatever the graph.

    A random pair of nodes then differs by that much squared. Roughness divided by it is Geary's C.
    """
    return 2 * float(np.var(values, ddof=1)) if len(values) > 1 else float("nan")


LEAST = 3
"""Rounds of a phase at least."""

Pattern: TypeAlias = Literal["three phases", "one fall", "no fall"]
"""What the levels of a curve do: fall twice; end lower than they began, but not by two falls; or neither."""


class Segment(NamedTuple):
    """A stretch of a curve: its first point, the point after its last, and the mean of its values."""

    start: int
    end: int
    level: float


def split_curve(values: Float[np.ndarray, " n"]) -> list[Segment]:
    """Return the one to three segments of constant level that fit a curve best, as many as stand out from its noise.

    For each number of segments the sum of squares is the smallest there is, over all places to split at. Among these
    numbers, n·log(sum of squares/n) + 3·log(n)·segments is the smallest: a further segment costs its level and its
    place, which is searched for (the leading terms of Zhang and Siegmund's modified BIC, Biometrics 2007).

    Args:
        values: (n,) finite; without any there is no segment.
    """
    curve = np.asarray(values, np.float64)
    n = len(curve)
    if n == 0:
        return []
    costs = _measure_costs(curve)
    whole = float(((curve - curve.mean()) ** 2).sum())
    two = costs[0] + costs[:, n]
    three = (costs[0][:, None] + costs) + costs[:, n]
    first, second = (int(place) for place in np.unravel_index(three.argmin(), three.shape))
    fits = [
        (whole, [0, n]),
        (float(two.min()), [0, int(two.argmin()), n]),
        (float(three.min()), [0, first, second, n]),
    ]
    # Fits closer than rounding errors of the whole curve count as equally close.
    penalised = [
        (n * math.log(max(squares, 1e-9 * whole, 1e-300) / n) + 3 * math.log(n) * (len(bounds) - 1), bounds)
        for squares, bounds in fits
        if math.isfinite(squares)
    ]
    _, bounds = min(penalised)
    return [Segment(a, b, float(curve[a:b].mean())) for a, b in pairwise(bounds)]


def _measure_costs(curve: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n1 n1"]:
    """Return the sum of squares about the mean of curve[i:j] at [i, j]; infinite if that is too short."""
    centred = curve - curve.mean()
    sums, squares = (np.concatenate([[0.0], np.cumsum(part)]) for part in (centred, centred**2))
    lengths = np.arange(len(sums)) - np.arange(len(sums))[:, None]
    means = (sums - sums[:, None]) / np.maximum(lengths, 1)
    costs = squares - squares[:, None] - means**2 * lengths
    return np.where(lengths >= LEAST, np.maximum(costs, 0.0), np.inf)


def name_pattern(levels: Sequence[float]) -> Pattern:
    """Return what the levels of a curve's segments do; see `Pattern`."""
    if len(levels) == 3 and levels[0] > levels[1] > levels[2]:
        return "three phases"
    return "one fall" if levels[-1] < levels[0] else "no fall"
