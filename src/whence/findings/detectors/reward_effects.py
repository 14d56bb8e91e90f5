"""Rewards compared with what the same move earns elsewhere in the run: in places, environments, rounds, and late."""

import numpy as np
from numpy.typing import NDArray

from whence.findings.detectors.models import Matrix, expand, predict_each
from whence.findings.detectors.places import (
    FITTED,
    FLOOR,
    MATCHED,
    Atlas,
    Misfit,
    Ridge,
    find_outstanding,
    list_lags,
    read_moves,
)
from whence.findings.evidence import Evidence, Mask, Numbers
from whence.findings.finding import CannotTellError, Sight

_WIDTH = 64
"""Random features of a state and its move."""

_COLUMNS = 96
"""Columns of products of moves and features of the state, in all."""

Episodes = NDArray[np.int64]

_DIRECTIONS = 128
"""Directions of all columns that are used at most, for the time that it takes."""

_OPPOSITE = -0.5
"""The slope of what is paid on what is due that is nearer to the opposite than to nothing."""

_KINKS = 0.25, 0.5, 0.75
"""Quantiles of each entry at which rewards may bend."""


def read_rewards(evidence: Evidence, rows: np.ndarray) -> Numbers:
    """Return rewards in their deviations, the rarest cut, which have a detector; `CannotTellError` if all are equal."""
    rewards = evidence.columns["reward"][rows]
    rewards = np.clip(rewards, *np.quantile(rewards, [0.002, 0.998]))
    if rewards.std() <= 1e-9 * np.abs(rewards).max(initial=0.0):
        raise CannotTellError("nearly all rewards are equal")
    return np.asarray(rewards / rewards.std())


def describe_moves(state: Matrix, change: Matrix, acting: Matrix) -> Matrix:
    """Return what rewards are linear in: features of the move, the move times the place, and actions times the move."""
    width = max(1, _COLUMNS // state.shape[1])
    products = (expand(state, width)[:, -width:, None] * change[:, None, :]).reshape(len(state), -1)
    # Many rewards have a kink at a value of an entry.
    bent = [np.maximum(state - level, 0) for level in np.quantile(state, _KINKS, axis=0)]
    products = np.hstack([products, state * change, *bent, *(each * change for each in bent)])
    with_one = np.hstack([np.ones((len(state), 1)), change])
    by_action = (acting[:, :, None] * with_one[:, None, :]).reshape(len(state), -1)
    return np.hstack([expand(np.hstack([state, change]), _WIDTH), products, by_action]).astype(np.float32)


def _compare(ridge: Ridge, episodes: Episodes, place: Mask, without: Mask) -> tuple[Numbers, Numbers, Episodes]:
    """Return what is paid and due in a place, less their means, and the episodes, of records that are like others.

    Means are left out, as an action or a place may have a price.
    """
    predicted, known = ridge.predict(place, without)
    paid = ridge.targets[:, 0]
    due = np.clip(predicted[:, 0], paid.min(), paid.max())[known]
    paid = paid[place][known]
    return paid - paid.sum() / max(len(paid), 1), due - due.sum() / max(len(due), 1), episodes[place][known]


def look_at_rewards(evidence: Evidence, *, in_parts: bool = False, is_missing: bool = False) -> Sight:
    """Look for a place where rewards are not what the same moves earn elsewhere.

    Their opposite in a range of an entry, or for an action in one; another multiple of it in environment copies and
    rounds, `in_parts`; or, `is_missing`, rewards that do not vary at all.
    """
    whole, evidence = evidence, evidence.thin(FITTED)
    state, change, rows = read_moves(evidence)
    rewards = read_rewards(evidence, rows)[:, None].astype(np.float32)
    ridge = Ridge(describe_moves(state, change, evidence.acting[rows]), rewards).narrow(_DIRECTIONS)
    atlas, episodes = Atlas(evidence, rows), evidence.episodes[rows]

    def measure(ridge: Ridge, place: Mask, without: Mask, like: Misfit | None) -> Misfit | None:
        paid, due, _ = _compare(ridge, episodes, place, without)
        if len(paid) <= MATCHED * place.sum():
            return None
        varied, expected, joint = paid @ paid, due @ due, paid @ due
        # A reward that is larger or smaller in a range is how many rewards are made; its opposite is not.
        slope = 0.0 if is_missing else float(joint / max(expected, 1e-12))
        slope = slope if in_parts else min(slope, 0.0)
        changed = varied - 2 * slope * joint + slope**2 * expected
        # What is not paid does not vary at all: little variation has many causes.
        least = 1e-6 * expected
        explained = float(varied <= least) if is_missing else joint**2 / max(varied * expected, least * expected, 1e-12)
        misfit = varied - 2 * joint + expected
        changed = changed if slope or is_missing else misfit
        return Misfit(float(misfit) / len(paid), float(changed) / len(paid), len(paid), float(explained), slope)

    # An agent may cease to do what is paid for by an action, so that rewards that are missing later are of all.
    places = [] if in_parts else atlas.list_places(atlas.list_ranges())
    if in_parts or is_missing:
        places += atlas.list_places(atlas.list_parts(), by_action=not is_missing)
    statistic, place, misfit = find_outstanding(atlas, ridge, places, measure)
    if place is None or misfit is None or statistic <= 0:
        return Sight(0.0)
    if not in_parts and not is_missing and misfit.change > _OPPOSITE:
        return Sight(0.0)  # less is how many rewards are made
    interval = "" if is_missing else f" ({_say_interval(*_compare(ridge, episodes, place.mask, place.around))})"
    return Sight(
        statistic,
        "reward",
        f"The reward {_say_slope(misfit.change)} {place.text}: {misfit.change:.2g}{interval} times what the same move "
        f"earns elsewhere, in {place.mask.mean():.0%} of the steps",
        f"Of a model that was fitted without these steps, the squared misses are {misfit.misfit:.2g} of the rewards' "
        f"variance there, and {misfit.changed:.2g} with what it predicts taken {misfit.change:.2g} times.",
        f"Read what the environment and its wrappers pay {place.text}, and open these records.",
        atlas.mark(whole, place),
    )


def _say_slope(slope: float) -> str:
    """Return a verb for the slope of what is paid on what is due, by the nearest of what it may mean."""
    if slope < _OPPOSITE:
        return "has the opposite sign"
    return "is missing" if slope < 0.25 else "is smaller" if slope < 1 else "is larger"


def _say_interval(paid: Numbers, due: Numbers, episodes: Episodes) -> str:
    """Return the interval of the slope over resampled episodes, in which rewards depend on each other."""
    units = np.unique(episodes, return_inverse=True)[1]
    sums = np.stack([np.bincount(units, paid * due), np.bincount(units, due * due)], axis=1)
    products = sums[np.random.default_rng(0).integers(0, len(sums), (400, len(sums)))].sum(axis=1)
    low, high = np.quantile(products[:, 0] / np.maximum(products[:, 1], 1e-12), [0.025, 0.975])
    return f"{low:.2g} to {high:.2g}"


def look_at_late_rewards(evidence: Evidence) -> Sight:
    """Compare how well a step before explains rewards with how well their own does: the log of squared misses."""
    evidence = evidence.thin(FITTED)
    state, change, rows = read_moves(evidence)
    read_rewards(evidence, rows)
    moves, episodes = describe_moves(state, change, evidence.acting[rows]), evidence.episodes
    best = (0.0, 0, 0.0, 0.0)
    for lag, late in list_lags(evidence, rows):
        paid = read_rewards(evidence, rows[late])[:, None]
        misses = [
            ((paid - predict_each(basis, paid, episodes[rows[late]])) ** 2).mean() / paid.var()
            for basis in (moves[late], moves[late - lag])
        ]
        # A fit may miss by more than the mean does: that is nothing explained, and no more.
        present, before = (min(max(float(miss), FLOOR), 1.0) for miss in misses)
        # A move further back may tell the same state: it has to halve the misses again.
        if np.log(present / before) > best[0] + (np.log(2) if best[0] else 0):
            best = (float(np.log(present / before)), lag, present, before)
    statistic, lag, present, before = best
    if not statistic:
        return Sight(0.0)
    return Sight(
        statistic,
        "reward",
        f"Rewards are late by {lag} step{'s' * (lag > 1)}: a step explains {max(0, 1 - present):.0%} of the variance "
        f"of its own reward, and {max(0, 1 - before):.0%} of the one {lag} later",
        "Both are predicted from the observation, the action and the move, in episodes that were not fitted.",
        "Check which step's reward the environment and its wrappers return.",
    )
