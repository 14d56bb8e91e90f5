"""Where what happens goes against what the same move does elsewhere: rewards, and the effect of actions."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from whence.findings.evidence import Evidence, Mask, Numbers
from whence.findings.finding import CHANCE, Finding, make_finding, say_chance
from whence.findings.models import Matrix, expand, predict_each
from whence.findings.subgroups import Condition, Subgroup, Votes, list_conditions, refine, search

_LEAST_RECORDS = 500
_FEW_ACTIONS = 6

_HALF = 0.5
"""The slope of what is paid on what is due, halfway from all of it to nothing; from nothing to its opposite, minus."""

_EXPLAINED = 0.25
"""The share of the squares that a prediction explains at least; one that explains less says nothing of a subgroup."""

Predict = Callable[[Mask | None], Numbers]
"""Returns what is due (n,) by a model that was not fitted on the records of a mask."""


def find_reward_faults(evidence: Evidence) -> list[Finding]:
    """Find where rewards go against those that the same change of the observation earns elsewhere.

    The prediction knows the observation, the next one and the action, but not the action and the place together: so a
    reward that is wrong for one action in one region, in one environment or from some round on does not enter it. Where
    the move tells the action, it may; so each action's rewards are also predicted from those of the others.
    """
    rows = evidence.has_next
    rewards = evidence.columns["reward"][rows]
    if not evidence.state.shape[1] or rows.sum() < _LEAST_RECORDS or rewards.std() == 0:
        return []
    actions = evidence.actions[rows] if evidence.actions.ndim == 1 else np.zeros(len(rewards), dtype=np.int64)
    # An action may have a price of its own.
    paid = rewards - _level(rewards, actions)
    basis, episodes = _describe_moves(evidence), evidence.episodes[rows]

    def predict_all(without: Mask | None) -> Numbers:
        due = predict_each(basis, paid[:, None], episodes, without)[0][:, 0]
        return np.asarray(due - _level(due, actions))

    def predict_from_others(without: Mask | None) -> Numbers:
        due = np.zeros(len(paid))
        for number in np.unique(actions):
            mask = actions == number
            due[mask] = predict_each(basis, paid[:, None], episodes, mask if without is None else mask | without)[0][
                mask, 0
            ]
        return np.asarray(due - _level(due, actions))

    has_others = 1 < len(np.unique(actions)) <= _FEW_ACTIONS
    times = {"env_index", "round"}
    # Where nothing is paid, nothing may be due; so that counts only in one environment, or from some round on.
    attempts = [(predict_all, -_HALF, set()), (predict_all, _HALF, times)]
    attempts += [(predict_from_others, -_HALF, set())] if has_others else []
    for model, slope, needed in attempts:
        group = _find_disagreement(evidence, paid, model, slope, needed)
        if group is not None and group.p * len(attempts) <= CHANCE:
            group, due = _choose_actions(evidence, replace(group, p=group.p * len(attempts)), paid, model, slope)
            return [_say_reward(evidence, group, paid, due)]
    return []


def _level(values: Numbers, actions: NDArray[np.int64]) -> Numbers:
    """Return the median of each record's action."""
    levels = {number: np.median(values[actions == number]) for number in np.unique(actions)}
    return np.asarray([levels[number] for number in actions.tolist()], dtype=np.float64)


def _describe_moves(evidence: Evidence) -> Matrix:
    """Return what rewards are predicted from, for each record that has a next one."""
    state, change = _read_moves(evidence)
    change = change / np.maximum(change.std(axis=0), 1e-9)
    # Many rewards are a change of something that depends on the place: so the change is taken times the place.
    width = 320 // state.shape[1]
    products = (expand(state, width)[:, : 1 + width, None] * change[:, None, :]).reshape(len(state), -1)
    return np.hstack([expand(state, 48), expand(np.hstack([state, change]), 96), products])


def _read_moves(evidence: Evidence) -> tuple[Matrix, Matrix]:
    """Return the states that have a next one, and the change to it."""
    before = np.flatnonzero(evidence.has_next)
    return evidence.state[before], evidence.state[before + 1] - evidence.state[before]


def _find_disagreement(
    evidence: Evidence, paid: Numbers, model: Predict, slope: float, needed: set[str]
) -> Subgroup | None:
    """Return the surest subgroup in which what is paid falls below a slope times what is due; None: there is none."""
    rows, due = evidence.has_next, model(None)
    missed = np.minimum((paid - due) ** 2, paid**2)
    if not (paid**2).sum() or 1 - missed.sum() / (paid**2).sum() < _EXPLAINED:
        return None
    votes, units = _count_votes(paid, due, slope), evidence.episodes[rows]
    groups = search(votes, units, _list_all_conditions(evidence, 5), sign=-1, needed=needed)
    return refine(groups[0], votes, units, _list_all_conditions(evidence, 16)) if groups else None


def _count_votes(paid: Numbers, due: Numbers, slope: float) -> Votes:
    """Return (n, 1) numbers whose sum is below 0 where less than that slope of what is due is paid."""
    votes = paid * np.sign(due) - slope * np.abs(due)
    bound = 10 * np.median(np.abs(votes)) + 1e-12
    return np.asarray(np.clip(votes, -bound, bound)[:, None])


def _list_all_conditions(evidence: Evidence, bins: int) -> list[Condition]:
    rows = evidence.has_next
    rounds = evidence.columns["round"]
    levels = np.unique(np.quantile(np.unique(rounds), np.arange(1, 6) / 6, method="higher"))
    late = [Condition("round", f"round {one:.0f} and later", rounds[rows] >= one) for one in levels]
    return [*list_conditions(evidence, rows, bins=bins), *late]


def _choose_actions(
    evidence: Evidence, group: Subgroup, paid: Numbers, model: Predict, slope: float
) -> tuple[Subgroup, Numbers]:
    """Return a subgroup with all actions that are off in its place, and what is due without these records.

    A model that was fitted on the place's other actions may have learned from them what is wrong there. So it is fitted
    again without the place, and each action there is looked at; where several are off, the records cannot tell which
    one is at fault, and all are named.
    """
    place = tuple(one for one in group.conditions if one.column != "action")
    if not place or len(place) == len(group.conditions):
        return group, model(group.mask)
    where, units = np.logical_and.reduce([one.mask for one in place]), evidence.episodes[evidence.has_next]
    due = model(where)
    votes = _count_votes(paid, due, slope)[:, 0]
    actions, off = [one for one in list_conditions(evidence, evidence.has_next) if one.column == "action"], []
    for action in actions:
        sums = np.bincount(units[where & action.mask], votes[where & action.mask], minlength=1)
        # Twice the error: the place is off already, and the question is only by which of a few actions.
        if sums.sum() < -2 * np.sqrt((sums**2).sum()):
            off.append(action)
    if not 0 < len(off) < len(actions):
        return group, model(group.mask)
    joined = Condition("action", " or ".join(one.text for one in off), np.logical_or.reduce([one.mask for one in off]))
    return replace(group, conditions=(joined, *place), mask=joined.mask & where), due


def _say_reward(evidence: Evidence, group: Subgroup, paid: Numbers, due: Numbers) -> Finding:
    inside = group.mask
    product, square = paid[inside] * due[inside], due[inside] ** 2
    slope = float(product.sum() / max(square.sum(), 1e-12))
    signs = np.sign(due[inside])
    words = "has the wrong sign" if slope < -_HALF else "is not paid"
    return make_finding(
        "reward",
        evidence,
        _widen(evidence.has_next, inside),
        title=f"The reward {words} for {group.text}: {(paid[inside] * signs).mean():+.2g} a step where "
        f"{np.abs(due[inside]).mean():+.2g} is due, in {inside.mean():.1%} of the steps",
        because=f"Rewards there are {slope:.2f} times what the same change of the observation earns in the other "
        f"records. By chance: {say_chance(group.p)}, over all places that were tried.",
        advice=f"Read what the environment and its wrappers pay for {group.text}, and open these records.",
        p=group.p,
    )


def find_action_faults(evidence: Evidence) -> list[Finding]:
    """Find where an action does what another one does elsewhere, as if the two were swapped."""
    rows = evidence.has_next
    acts = _list_alternatives(evidence)
    if not evidence.state.shape[1] or rows.sum() < _LEAST_RECORDS or not acts:
        return []
    (state, change), acting, episodes = _read_moves(evidence), evidence.acting[rows], evidence.episodes[rows]
    basis = expand(state, 64)

    def cross(actions: Matrix) -> Matrix:
        return np.hstack([basis, *(basis[:, : 1 + state.shape[1]] * column[:, None] for column in actions.T)])

    moves = predict_each(cross(acting), change, episodes, others=[cross(actions) for _, _, actions in acts])
    scale = np.maximum(np.median(np.abs(change - moves[0]), axis=0), 1e-3 * change.std(axis=0) + 1e-9)
    misses = [np.minimum(((change - move) / scale) ** 2, 100).sum(axis=1) for move in moves]
    # Above 0 where the other action tells better what happened. Each pair of actions is a condition of the search.
    taken = [np.flatnonzero(mask) for _, mask, _ in acts]
    places, pair = np.concatenate(taken), np.repeat(np.arange(len(acts)), [len(each) for each in taken])
    margins = [(misses[0] - other)[each] for other, each in zip(misses[1:], taken, strict=True)]
    votes, units = np.clip(np.concatenate(margins), -100, 100)[:, None], episodes[places]
    pairs = [Condition("pair", name, pair == number) for number, (name, _, _) in enumerate(acts)]

    def list_pairs(bins: int) -> list[Condition]:
        # Of discrete states the model knows each by itself, so no place is left where it could be wrong.
        no_place = len(evidence.features) == 1
        others = [each for each in _list_all_conditions(evidence, bins) if each.column != "action"]
        others = [each for each in others if not (each.is_place and no_place)]
        return [*pairs, *(replace(each, mask=each.mask[places]) for each in others)]

    groups = search(votes, units, list_pairs(5), sign=1, needed={"pair"})
    groups = [group for group in groups if len(group.conditions) > 1]  # what is so everywhere is how the action works
    if not groups or groups[0].p > CHANCE:
        return []
    group = refine(groups[0], votes, units, list_pairs(16))
    is_pair = np.logical_and.reduce([one.mask for one in group.conditions if one.column == "pair"])
    if (votes[is_pair & ~group.mask] < 0).mean() < _HALF:  # nor are the two told apart elsewhere
        return []
    (what,) = (one.text for one in group.conditions if one.column == "pair")
    where = " and ".join(one.text for one in group.conditions if one.column != "pair")
    mask = np.zeros(len(state), dtype=bool)
    mask[places[group.mask]] = True
    return [
        make_finding(
            "dynamics",
            evidence,
            _widen(rows, mask),
            title=f"{what}, for {where}: in {(votes[group.mask] > 0).mean():.0%} of {mask.sum():,} steps",
            because="The next observation is nearer to what the other action makes of the same state in the other "
            f"records. By chance: {say_chance(group.p)}, over all actions and places that were tried.",
            advice=f"Compare how the environment and its wrappers read actions for {where} with the others.",
            p=group.p,
        )
    ]


def _list_alternatives(evidence: Evidence) -> list[tuple[str, Mask, Matrix]]:
    """Return what else each action could be: in words, who took the action, and the others' actions as numbers."""
    acting, names = evidence.acting[evidence.has_next], evidence.action_names
    if evidence.actions.ndim > 1:
        opposite = np.hstack([-evidence.actions, evidence.actions**2])[evidence.has_next]
        return [("Actions do the opposite of what they do elsewhere", np.ones(len(acting), dtype=bool), opposite)]
    rows, count = np.eye(len(names)), len(names) if len(names) <= _FEW_ACTIONS else 0
    return [
        (f"Action {names[i]} does what {names[j]} does elsewhere", acting[:, i] > 0, np.tile(rows[j], (len(acting), 1)))
        for i, j in itertools.permutations(range(count), 2)
    ]


def _widen(rows: Mask, mask: Mask) -> Mask:
    """Return a mask over all records from one over some rows."""
    wide = np.zeros(len(rows), dtype=bool)
    wide[np.flatnonzero(rows)[mask]] = True
    return wide
