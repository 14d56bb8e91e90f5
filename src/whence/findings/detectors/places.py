"""Places in a run, and models that were fitted without one: is it predicted as well as other places are?"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from whence.findings.detectors.models import Matrix
from whence.findings.evidence import Evidence, Mask, Numbers
from whence.findings.finding import CannotTellError
from whence.findings.history import FEW

LEAST_RECORDS = 500
"""Records from which on something is said of a model: a few for each of its columns."""

FITTED = 8_000
"""Records that models are fitted on at most, for the time that it takes."""

_SHARES = 0.03, 0.5
"""The share of a place's records: what is rarer hardly changes what is learned; what is more is not the exception."""

_FEW_ACTIONS = 6
_FEW_COPIES = 16
_COARSE, _COARSEST, _FINE = 5, 3, 20
"""Parts of equal counts that ranges are cut into at first; of more than `_FEW_ENTRIES`, for the time that it takes;
and where the best ones are moved."""

_FEW_ENTRIES = 8

_EXTREME = 2
"""Fine parts of a range at either end, that are looked at too: much is wrong only where an entry is extreme."""

LAGS = 1, 2
"""Steps by which a reward or an action may be late: a buffer, or two."""

_RIDGE = 1e-3
_PLACEBOS, _LEAST_PLACEBOS = 16, 3
_STRETCHES = 8
_STRETCH = 64
"""Steps of an episode that depend on each other at most, so that one long episode also has an error."""

_BORDER = 1
"""Fine cuts on each side of a range that are left out of its models: an end is never where a fault ends."""

_ERRORS = 2
"""Standard errors that a slope is taken to be off by, as the place is the most notable of many."""

LEAST_TAKEN, _LEAST_UNITS = 30, 8
"""Records of a place, and episodes or stretches of them, from which on slopes are compared."""

_PRECISE = 0.03
"""The part of a target's deviation that counts as noise at least: a model's error is no noise."""

_MOVES = -2, -1, 0, 1, 2
_CANDIDATES = 4

_SUPPORT = 0.99
"""The quantile of leverage, among the records that a model was fitted on, beyond which it knows nothing alike."""

MATCHED = 1 / 3
"""The share of a place's records that have support at least."""

FLOOR = 0.01
"""Misfits below this share of the variance are all alike: their ratios say nothing of what matters."""


def read_moves(evidence: Evidence) -> tuple[Matrix, Matrix, np.ndarray]:
    """Return states that have a next one, the standardised change to it, and their rows; or raise `CannotTellError`."""
    rows = np.flatnonzero(evidence.has_next)
    if len(rows) < LEAST_RECORDS:
        raise CannotTellError(f"there are {len(rows)} steps, and {LEAST_RECORDS} are needed")
    if not evidence.state.shape[1]:
        raise CannotTellError("the observation is not a few numbers")
    change = evidence.state[rows + 1] - evidence.state[rows]
    return evidence.state[rows], change / np.maximum(change.std(axis=0), 1e-9), rows


def list_lags(evidence: Evidence, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Return by how many steps something may be late, and for each the places in `rows`; or raise `CannotTellError`."""
    episodes = evidence.episodes[rows]
    lags = [
        (lag, lag + np.flatnonzero((rows[lag:] == rows[:-lag] + lag) & (episodes[lag:] == episodes[:-lag])))
        for lag in LAGS
    ]
    if len(lags[0][1]) < LEAST_RECORDS:
        raise CannotTellError(f"{len(lags[0][1])} steps have others before them, and {LEAST_RECORDS} are needed")
    return [(lag, late) for lag, late in lags if len(late) >= LEAST_RECORDS]


def cut_units(evidence: Evidence, rows: np.ndarray) -> Int[np.ndarray, " n"]:
    """Return the number of the episode of each of some records, or of its stretch of a long one."""
    stretch = evidence.columns["step"][rows].astype(np.int64) // _STRETCH
    return np.asarray(evidence.episodes[rows] * 2**32 + stretch, dtype=np.int64)


class Place(NamedTuple):
    """Records that satisfy conditions: an action (or none), and a range of an entry, a copy, or the later rounds.

    `key` and `ends` say which range it is, to move its ends: the entry and the indices of its cuts.
    """

    text: str
    mask: Mask
    action: int | None = None
    key: str = ""
    ends: tuple[int, int] = (0, 0)
    border: Mask | None = None

    @property
    def around(self) -> Mask:
        """The records that no model of it is fitted on: also those next to a range, that may have the same fault."""
        return self.mask if self.border is None else self.mask | self.border


@dataclass(frozen=True, eq=False)
class Atlas:
    """The places of some records of a run."""

    evidence: Evidence
    rows: Int[np.ndarray, " n"]
    most: float = _SHARES[1]

    @cached_property
    def actions(self) -> list[tuple[str, Mask]]:
        """Each discrete action, or each sign of an axis, with who took it; of many actions none."""
        names, actions = self.evidence.action_names, self.evidence.actions[self.rows]
        if actions.ndim == 1:
            common = np.argsort(-np.bincount(actions, minlength=len(names)), kind="stable")[:_FEW_ACTIONS]
            return [(f"action {names[number]}", actions == number) for number in sorted(common)]
        axes = list(zip(names, actions.T, strict=True))[: _FEW_ACTIONS // 2]
        return [each for name, axis in axes for each in ((f"{name} < 0", axis < 0), (f"{name} ≥ 0", axis >= 0))]

    @cached_property
    def levels(self) -> dict[str, Numbers]:
        """The cuts of each entry, the ends as infinities; of an observation of many entries, or a table, none."""
        cuts = {}
        features = {} if self.evidence.is_table else self.evidence.features
        for name, values in features.items() if len(features) <= FEW else ():
            values = values[self.rows]
            levels = np.unique(np.quantile(values, np.arange(1, _FINE) / _FINE))
            cuts[name] = np.concatenate([[-np.inf], levels[levels > values.min()], [np.inf]])
        return cuts

    def make_range(self, name: str, first: int, last: int, action: int | None = None) -> Place:
        """Return the place between two cuts of an entry, where an action was taken."""
        values, (low, high) = self.evidence.features[name][self.rows], self.levels[name][[first, last]]
        mask = (values >= low) & (values < high)
        text = f"{name} ≥ {low:.3g}" if np.isinf(high) else f"{name} < {high:.3g}"
        if np.isfinite([low, high]).all():
            text = f"{low:.3g} ≤ {name} < {high:.3g}"
        levels = self.levels[name]
        low, high = levels[max(0, first - _BORDER)], levels[min(len(levels) - 1, last + _BORDER)]
        border = (values >= low) & (values < high) & ~mask
        # Of few values, what is next to them may be all the rest.
        some = border if (mask | border).mean() <= self.most + 0.1 else None
        place = Place(f"where {text}", mask, None, name, (first, last), some)
        return place if action is None else self.restrict(place, action)

    def restrict(self, place: Place, action: int) -> Place:
        """Return the part of a place where an action was taken."""
        name, mask = self.actions[action]
        border = None if place.border is None else place.border & mask
        return place._replace(text=f"for {name} {place.text}", mask=place.mask & mask, border=border, action=action)

    def list_ranges(self) -> Iterator[Place]:
        """Yield the ranges of each entry between coarse cuts."""
        parts = _COARSE if len(self.levels) <= _FEW_ENTRIES else _COARSEST
        for name, levels in self.levels.items():
            last = len(levels) - 1
            cuts = np.unique(np.linspace(0, last, min(last, parts) + 1).astype(int))
            extremes = [(0, _EXTREME), (last - _EXTREME, last)] if last == _FINE else []
            for first, end in [*itertools.combinations(cuts, 2), *extremes]:
                if end - first < last:
                    yield self.make_range(name, int(first), int(end))

    def list_parts(self) -> Iterator[Place]:
        """Yield the environment copies, and the rounds from some on."""
        copies, rounds = (self.evidence.columns[name][self.rows] for name in ("env_index", "round"))
        names = np.unique(copies)
        for copy in names if 1 < len(names) <= _FEW_COPIES else ():
            yield Place(f"in environment {copy:.0f}", copies == copy)
        levels = np.unique(np.quantile(np.unique(rounds), np.arange(1, _STRETCHES) / _STRETCHES, method="higher"))
        for level, end in zip(levels, [*levels[1:], np.inf], strict=True):
            yield Place(f"from round {level:.0f} on", rounds >= level)
            if np.isfinite(end):
                yield Place(f"in rounds {level:.0f} to {end - 1:.0f}", (rounds >= level) & (rounds < end))

    def list_places(self, places: Iterator[Place], *, by_action: bool = True) -> list[Place]:
        """Return places of a size, also by action."""
        chosen = [one for one in places if _SHARES[0] <= one.mask.mean()]
        if by_action:
            chosen += [self.restrict(one, action) for one in chosen for action in range(len(self.actions))]
        return [one for one in chosen if _SHARES[0] <= one.mask.mean() <= self.most]

    def mark(self, whole: Evidence, place: Place) -> Mask:
        """Return a mask of a place's records over the whole evidence, which these are a part of."""
        keys = [one.columns["round"] * 2**32 + one.columns["record_id"] for one in (self.evidence, whole)]
        return np.isin(keys[1], keys[0][self.rows[place.mask]])

    def vary(self, place: Place) -> list[Place]:
        """Return a range with one end or both moved by a fine cut, and itself."""
        if not place.key:
            return [place]
        last = len(self.levels[place.key]) - 1
        moved = [(place.ends[0] + i, place.ends[1] + j) for i in _MOVES for j in _MOVES]
        moved = [(i, j) for i, j in moved if 0 <= i < j <= last and j - i < last]
        varied = [self.make_range(place.key, i, j, place.action) for i, j in moved]
        return [one for one in varied if _SHARES[0] <= one.mask.mean() <= self.most]


@dataclass(frozen=True, eq=False)
class Ridge:
    """A ridge regression, fitted anew without a place by taking the place's block from its normal equations."""

    basis: Matrix
    targets: Matrix

    @cached_property
    def _equations(self) -> tuple[Matrix, Matrix, float]:
        gram = (self.basis.T @ self.basis).astype(np.float64)
        gram[np.diag_indices_from(gram)] += _RIDGE * len(self.basis)
        leverage = np.einsum("ij,ij->i", self.basis @ np.linalg.inv(gram).astype(np.float32), self.basis)
        return gram, self.basis.T @ self.targets, float(np.quantile(leverage, _SUPPORT))

    def fit(self, without: Mask) -> tuple[Matrix, Matrix]:
        """Return the coefficients of a fit without some records, and the inverse of its Gram matrix."""
        gram, moments, _ = self._equations
        block = self.basis[without]
        inverse = np.linalg.inv(gram - block.T @ block)
        return inverse @ (moments - block.T @ self.targets[without]), inverse.astype(np.float32)

    def narrow(self, count: int) -> "Ridge":
        """Return a regression on the principal directions of the columns that tell most of the targets, for speed."""
        if self.basis.shape[1] <= count:
            return self
        gram, moments, _ = self._equations
        sizes, directions = np.linalg.eigh(gram)
        gains = ((directions.T @ moments) ** 2).sum(axis=1) / sizes
        return Ridge(self.basis @ directions[:, np.argsort(-gains)[:count]].astype(np.float32), self.targets)

    def measure_scale(self) -> Numbers:
        """Return the deviation of each target's noise."""
        missed = self.targets - self.basis @ self.fit(np.zeros(len(self.basis), dtype=bool))[0]
        return np.asarray(np.maximum(np.sqrt(np.median(missed**2, axis=0)) / 0.674, _PRECISE))

    def measure_support(self, inverse: Matrix, rows: Mask) -> Mask:
        """Return which of some records are alike to those that a fit has seen, by their leverage."""
        block = self.basis[rows]
        return np.asarray(np.einsum("ij,ij->i", block @ inverse, block) <= self._equations[2])

    def predict(self, rows: Mask, without: Mask) -> tuple[Matrix, Mask]:
        """Return the targets of some records by a fit without others, and which are alike to those it has seen."""
        coefficients, inverse = self.fit(without)
        return self.basis[rows] @ coefficients.astype(np.float32), self.measure_support(inverse, rows)


class Misfit(NamedTuple):
    """The mean squared misfit of the records of a place, and after a change of what is predicted.

    `weight` is the number of its records, or the precision of a slope; `explained` is the share of the variance that
    the changed prediction explains; `change` says what was changed.
    """

    misfit: float
    changed: float
    weight: float
    explained: float
    change: float
    slope: float = 1.0

    @property
    def likelihood(self) -> float:
        """How much likelier a change makes all of it."""
        return self.exceed(FLOOR) * self.weight * self.explained

    def exceed(self, reference: float) -> float:
        """Return the log of how many times a change lowers the misfit, down to what other places have at most."""
        return float(np.log(max(self.misfit, 1e-12) / max(self.changed, reference, 1e-12)))


Measure = Callable[[Ridge, Mask, Mask, Misfit | None], Misfit | None]
"""Returns the misfit of a place by a fit without some records, by the change of another one if that is given; None:
too few of its records are like others."""


def compare_slopes(
    expected: Matrix,
    seen: Matrix,
    controls: Matrix,
    units: Int[np.ndarray, " n"],
    other: float,
    change: float,
    doubt: float = 0.0,
) -> Misfit | None:
    """Compare the slope of what is seen on what is expected with 1, and with another, less what controls explain.

    Both are squared distances with the slope's squared error over units, in which records depend on each other,
    and that of what is expected, `doubt`.
    """
    numbers = np.unique(units, return_inverse=True)[1]
    if len(expected) < LEAST_TAKEN or numbers.max() + 1 < _LEAST_UNITS:
        return None
    gram = controls.T @ controls
    gram[np.diag_indices_from(gram)] += _RIDGE * len(controls)
    expected = expected - controls @ np.linalg.solve(gram, controls.T @ expected)
    size = max(float((expected**2).sum()), 1e-12)
    slope = float((expected * seen).sum()) / size
    seen = seen - controls @ np.linalg.solve(gram, controls.T @ seen)
    sums = np.bincount(numbers, (expected * (seen - slope * expected)).sum(axis=1))
    error = doubt + _ERRORS**2 * float(sums @ sums) / size**2
    return Misfit((1 - slope) ** 2 + error, (other - slope) ** 2 + error, 1 / max(error, 1e-12), 1.0, change, slope)


class Outstanding(NamedTuple):
    """The place that stands out most: the log of misfits, and what changes it."""

    statistic: float
    place: Place | None
    misfit: Misfit | None


def compare_with_others(
    place: Place, misfit: Misfit, ridge: Ridge, places: Sequence[Place], measure: Measure
) -> list[Outstanding]:
    """Return how far a place's misfit stands out from those of others, fitted without both; nothing if they are few.

    It is compared with the upper quartile of their misfits, as some have the rest of a fault, and with how well those
    are explained.
    """
    others = [one.mask & ~place.around for one in places if (one.action is None) == (place.action is None)]
    others = [mask for mask in others if mask.mean() >= _SHARES[0] <= 1 - (mask | place.around).mean()]
    chosen = [others[i] for i in np.random.default_rng(0).permutation(len(others))[:_PLACEBOS]]
    seen = [one for mask in chosen if (one := measure(ridge, mask, mask | place.around, misfit))]
    if len(seen) < _LEAST_PLACEBOS:
        return []
    reference = max(FLOOR, float(np.quantile([one.misfit for one in seen], 0.75)))
    usual = max(float(np.median([one.explained for one in seen])), 1e-9)
    return [Outstanding(misfit.exceed(reference) * min(1.0, misfit.explained / usual), place, misfit)]


def find_outstanding(atlas: Atlas, ridge: Ridge, places: Sequence[Place], measure: Measure) -> Outstanding:
    """Return the place whose misfit a change explains best, compared with misfits of other places of its form.

    Those that a change explains best, for all of their records together, are compared, with their ends moved. If
    no place is like the rest of the run, that is a `CannotTellError`.
    """

    def weigh(place: Place) -> float:
        misfit = measure(ridge, place.mask, place.around, None)
        return -np.inf if misfit is None else misfit.likelihood

    rough = [measure(ridge, place.mask, place.around, None) for place in places]
    # A place that is partly at fault is explained badly, but is missed by much.
    weights = [-np.inf if one is None else (one.misfit - one.changed) * one.weight for one in rough]
    best, tried = list[Outstanding](), set[tuple[str, int | None]]()
    for number in np.argsort(weights)[::-1]:
        place = places[number]
        if weights[number] <= 0 or len(best) == _CANDIDATES:
            break
        if (place.key or place.text, place.action) in tried:
            continue
        tried.add((place.key or place.text, place.action))
        place = max(atlas.vary(place), key=weigh)
        misfit = measure(ridge, place.mask, place.around, None)
        if misfit is not None:
            best += compare_with_others(place, misfit, ridge, places, measure)
    if not best and not np.isfinite(weights).any():
        raise CannotTellError("no part of the run is like the rest of it")
    return max(best, key=lambda one: one.statistic, default=Outstanding(0.0, None, None))
