"""What actions do: their spread, their effect, when it comes, and whether it is that of another action."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from whence.findings.detectors.models import Matrix, expand, predict_each
from whence.findings.detectors.places import (
    FITTED,
    FLOOR,
    MATCHED,
    Atlas,
    Misfit,
    Outstanding,
    Ridge,
    compare_slopes,
    compare_with_others,
    cut_units,
    find_outstanding,
    list_lags,
    read_moves,
)
from whence.findings.evidence import Evidence, Mask
from whence.findings.finding import CannotTellError, Sight

Rows = NDArray[np.int64]

_WIDTH = 48
_FEW_ACTIONS = 8

_NEARLY = 0.9
"""The part of the best log of misfits that a wider stretch has to reach: the rest of it is not left outside."""

_PRODUCTS = 320
"""Products of actions and the state that are used at most; of more none, for the time that they take."""


def look_at_spread(evidence: Evidence) -> Sight:
    """Compare the width of an axis' range with the spread of what was taken: in decades, the largest over axes.

    A Gaussian policy begins with a deviation of 1, so that of a range of thousands it never leaves the middle.
    """
    space = evidence.config.get("action_space") or {}
    if evidence.actions.ndim == 1 or space.get("type") != "Box":
        raise CannotTellError("actions are discrete")
    low, high = (
        np.broadcast_to(np.asarray(space[end], dtype=np.float64).ravel(), (evidence.actions.shape[1],))
        for end in ("low", "high")
    )
    width, spread = high - low, evidence.actions.std(axis=0)
    bounded = np.isfinite(width) & (width > 0)
    if not bounded.any():
        raise CannotTellError("no action has bounds")
    decades = np.where(bounded, np.log10(np.maximum(np.where(bounded, width, 1) / np.maximum(spread, 1e-9), 1)), 0)
    axis = int(decades.argmax())
    return Sight(
        float(decades[axis]),
        "dynamics",
        f"Actions use a small part of their range: {evidence.action_names[axis]} may be from {low[axis]:g} to "
        f"{high[axis]:g}, and its spread is {spread[axis]:.2g}",
        "A Gaussian policy begins with a deviation of 1, whatever the range is.",
        "Let the environment take actions from −1 to 1 and scale them itself (`gymnasium.wrappers.RescaleAction`).",
    )


def _describe_actions(state: Matrix, acting: Matrix) -> Matrix:
    """Return what moves are linear in: features of the state, and actions times the state."""
    is_wide = acting.shape[1] * state.shape[1] > _PRODUCTS
    with_one = np.hstack([np.ones((len(state), 1)), state[:, : 0 if is_wide else None]])
    by_action = (acting[:, :, None] * with_one[:, None, :]).reshape(len(state), -1)
    return np.hstack([expand(state, _WIDTH), by_action]).astype(np.float32)


def _list_swaps(actions: NDArray[np.generic], evidence: Evidence) -> Iterator[tuple[str, Mask, Matrix]]:
    """Yield what may be swapped in words, who took it, and what they would have taken, as numbers."""
    names = evidence.action_names
    if actions.ndim == 1:
        for i, j in itertools.combinations(range(len(names) if len(names) <= _FEW_ACTIONS else 0), 2):
            other = np.select([actions == i, actions == j], [j, i], actions)
            yield f"Actions {names[i]} and {names[j]} are swapped", other != actions, np.eye(len(names))[other]
        return
    axes = range(len(names) if len(names) <= _FEW_ACTIONS else 0)
    others = [
        (f"The axis {names[i]} acts in reverse", actions * np.where(np.arange(len(names)) == i, -1, 1)) for i in axes
    ]
    for i, j in itertools.combinations(axes, 2):
        order = np.arange(len(names))
        order[[i, j]] = j, i
        others.append((f"The axes {names[i]} and {names[j]} are swapped", actions[:, order]))
    for text, other in others:
        yield text, np.ones(len(other), dtype=bool), np.hstack([other, other**2])


def look_at_swaps(evidence: Evidence) -> Sight:
    """Look for an environment copy, or rounds, where moves are those of another action elsewhere.

    Ranges of an entry are not looked at: in healthy worlds, too, an action turns round from place to place, as the
    rudder of a boat does. The statistic is the log of how much nearer an effect is to that of another action than to
    its usual one. The effect is the slope of moves on the difference that the two actions make elsewhere, which needs
    no good prediction of the whole move.
    """
    whole, evidence = evidence, evidence.thin(FITTED)
    state, change, rows = read_moves(evidence)
    swaps = list(_list_swaps(evidence.actions[rows], evidence))
    if not swaps:
        raise CannotTellError(f"there are more than {_FEW_ACTIONS} actions or axes")
    basis = _describe_actions(state, evidence.acting[rows])
    ridge = Ridge(basis, change.astype(np.float32))
    scale = ridge.measure_scale()
    others = [_describe_actions(state, other) - basis for _, _, other in swaps]
    start = expand(state[:1], _WIDTH).shape[1]
    takers = [each for _, each, _ in swaps]
    controls = np.hstack([np.ones((len(state), 1)), state])
    units = cut_units(evidence, rows)

    def measure(ridge: Ridge, place: Mask, without: Mask, like: Misfit | None) -> Misfit | None:
        coefficients, inverse = ridge.fit(without)
        support = ridge.measure_support(inverse, place)
        if support.mean() < MATCHED:
            return None
        rows_here = np.flatnonzero(place)[support]
        missed = (change[rows_here] - ridge.basis[rows_here] @ coefficients.astype(np.float32)) / scale
        best: Misfit | None = None
        for number in range(len(swaps)) if like is None else [int(like.change)]:
            is_taker = takers[number][rows_here]
            here = rows_here[is_taker]
            # Half of the difference of the two actions: the slope of moves on it is 1, or -1 of the other action.
            half = (others[number][here, start:] @ coefficients[start:].astype(np.float32)) / scale / -2
            one = compare_slopes(half, missed[is_taker] + half, controls[here], units[here], -1.0, number)
            if one and (best is None or one.likelihood > best.likelihood):
                best = one
        return best

    atlas = Atlas(evidence, rows)
    places = atlas.list_places(atlas.list_parts(), by_action=False)
    statistic, place, misfit = find_outstanding(atlas, ridge, places, measure)
    if place is None or misfit is None or statistic <= 0:
        return Sight(0.0)
    text, is_taker, _ = swaps[int(misfit.change)]
    return Sight(
        statistic,
        "dynamics",
        f"{text} {place.text}, in {(place.mask & is_taker).mean():.0%} of the steps: their difference has "
        f"{misfit.slope:.2g} times its effect elsewhere",
        "A model of moves was fitted without these steps; the slope of what it misses on the difference of the two "
        "actions is 1 where they act as elsewhere, and -1 where each acts as the other.",
        f"Compare how the environment and its wrappers read actions {place.text} with elsewhere.",
        atlas.mark(whole, place._replace(mask=place.mask & is_taker)),
    )


def look_at_late_actions(evidence: Evidence) -> Sight:
    """Compare how well an action before explains moves with how well their own does: the log of squared misses.

    The difference counts by its share of what the action before explains.
    """
    evidence = evidence.thin(FITTED)
    state, change, rows = read_moves(evidence)
    episodes, best = evidence.episodes[rows], (0.0, 0, 0.0, 0.0)
    for lag, late in list_lags(evidence, rows):
        bases = [_describe_actions(state[late], evidence.acting[rows[each]]) for each in (late, late - lag)]
        start = expand(state[:1], _WIDTH).shape[1]
        moves = change[late]
        none, present, before = (
            np.maximum(((moves - predict_each(basis, moves, episodes[late])) ** 2).mean(axis=0), FLOOR)
            for basis in (bases[0][:, :start], *bases)
        )
        if np.maximum(none - before, 0).sum() <= np.maximum(none - present, 0).sum():
            continue  # the present action tells more of the move, if not of what is nearly known without any
        # Each entry's gain, so that those that no action moves count for nothing.
        gains = [float(np.maximum(np.log(none / each), 0).sum()) for each in (present, before)]
        # Where the present action tells nearly all, too, it does not act late.
        statistic = max(gains[1] - gains[0], 0.0) ** 2 / max(gains[1], 1e-9)
        best = max(best, (statistic, lag, gains[0], gains[1]), key=lambda one: one[0])
    statistic, lag, present_gain, gain = best
    if not statistic:
        return Sight(0.0)
    return Sight(
        statistic,
        "dynamics",
        f"Actions act late, by {lag} step{'s' * (lag > 1)}: the action then lowers the misses of the move by "
        f"{1 - np.exp(-gain):.0%}, the present one by {1 - np.exp(-present_gain):.0%}",
        "Moves are predicted from the observation with either action, in episodes that were not fitted.",
        "Check whether the environment or a wrapper applies an earlier action; if that is meant, let the observation "
        "hold the actions on their way.",
    )


def look_at_dead_stretches(evidence: Evidence) -> Sight:
    """Look for a stretch of an axis in which it does nothing, though it does outside of it.

    The statistic is the log of how much nearer its effect on moves there is to none than to the one that it has
    elsewhere.
    """
    if evidence.actions.ndim == 1 or len(evidence.action_names) > _FEW_ACTIONS:
        raise CannotTellError(f"actions are discrete, or have more than {_FEW_ACTIONS} axes")
    whole, evidence = evidence, evidence.thin(FITTED)
    state, change, rows = read_moves(evidence)
    axes = np.flatnonzero((evidence.actions[rows] % 1 != 0).any(axis=0))
    if not len(axes):
        raise CannotTellError("actions are whole numbers")
    stretches = [_find_dead_stretch(int(axis), state, change, rows, evidence) for axis in axes]
    statistic, place, misfit = max(stretches, key=lambda one: one.statistic)
    if place is None or misfit is None:
        return Sight(0.0)
    return Sight(
        statistic,
        "dynamics",
        f"The axis does nothing {place.text}, in {place.mask.mean():.0%} of the steps: there it has "
        f"{misfit.slope:.2g} times its effect elsewhere",
        "The slope of moves on what the axis does by a model of all moves is compared with the one outside: it is 1 "
        "where the axis acts as elsewhere, and 0 where it does nothing.",
        f"Compare how the environment and its wrappers read the action {place.text} with elsewhere.",
        Atlas(evidence, rows).mark(whole, place),
    )


def _find_dead_stretch(axis: int, state: Matrix, change: Matrix, rows: Rows, evidence: Evidence) -> Outstanding:
    """Return the stretch of an axis whose effect on moves is nearest to none, compared with other stretches."""
    actions, units = evidence.actions[rows], cut_units(evidence, rows)
    controls = np.hstack([np.ones((len(state), 1)), state])
    acting = actions[:, axis, None] * controls
    basis = np.hstack([expand(state, _WIDTH), np.delete(actions, axis, axis=1), acting]).astype(np.float32)
    ridge = Ridge(basis, change.astype(np.float32))
    scale = ridge.measure_scale()
    coefficients = ridge.fit(np.zeros(len(rows), dtype=bool))[0]
    due = acting @ coefficients[-acting.shape[1] :] / scale
    moves = (change - basis @ coefficients) / scale + due

    def measure(_: Ridge, place: Mask, without: Mask, like: Misfit | None) -> Misfit | None:
        elsewhere = compare_slopes(due[~without], moves[~without], controls[~without], units[~without], 0.0, 0.0)
        if elsewhere is None:
            return None
        here = due[place] * elsewhere.slope, moves[place], controls[place], units[place]
        one = compare_slopes(*here, 0.0, 0.0, 1 / elsewhere.weight / max(elsewhere.slope**2, 1e-12))
        # Another stretch is compared by its slope alone, as its error says nothing of the world.
        return one and one._replace(misfit=one.misfit - bool(like) / one.weight)

    name = evidence.action_names[axis]
    atlas = Atlas(replace(evidence, features={name: evidence.actions[:, axis]}), rows, most=0.8)
    last = len(atlas.levels[name]) - 1
    ends = itertools.combinations([*range(0, last, 2), last], 2)
    stretches = atlas.list_places((atlas.make_range(name, *each) for each in ends), by_action=False)
    misfits = [(one, misfit) for one in stretches if (misfit := measure(ridge, one.mask, one.around, None))]
    if not misfits:
        return Outstanding(0.0, None, None)
    first, misfit = max(misfits, key=lambda one: one[1].likelihood)
    # The rest of a stretch would be among those that it is compared with.
    least = _NEARLY * misfit.exceed(0.0)
    wider = [one for one in misfits if one[1].exceed(0.0) >= least and not (first.mask & ~one[0].mask).any()]
    place, misfit = max(wider or [(first, misfit)], key=lambda one: one[0].mask.sum())
    places = atlas.list_places(atlas.list_ranges(), by_action=False)
    candidates = compare_with_others(place, misfit, ridge, places, measure)
    return max(candidates, key=lambda one: one.statistic, default=Outstanding(0.0, None, None))
