"""Where records go against the others: rewards, the effect of actions, the critic, and what training on them does."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from whence.findings.evidence import Evidence, Mask, Numbers
from whence.findings.finding import CHANCE, Claim, Claims, say_chance
from whence.findings.models import Matrix, expand, predict_each
from whence.findings.subgroups import Condition, Subgroup, Votes, list_conditions, refine, search

_LEAST_RECORDS = 500
_LEAST_LEARNED = 1000
"""Records from which on something is said of rewards and actions, and of learning."""
_FEW_ACTIONS = 6

_HALF = 0.5
"""The slope of what is paid on what is due, halfway from all of it to nothing; from nothing to its opposite, minus."""

_STRETCH = 32
"""Steps of an episode from which on others count as independent in what actions do."""

_MATTERS = 0.05
"""The share of all that is paid that is due in a place at least: less hardly changes what is learned."""

_MOST = 0.75
"""The share of steps that another action explains better, halfway from what chance does to all."""

_EXPLAINED = 0.25
"""The share of the squares that a prediction explains at least; one that explains less says nothing of a subgroup."""

_QUARTER = 0.25
"""What a place has at least of the critic's squared error, or takes back of the gain by the other records."""

_SHARPEST = 5.0
"""Sizes beyond which a number counts no more: a search is for what many records share."""

Predict = Callable[[Mask | None], Numbers]
"""Returns what is due (n,) by a model that was not fitted on the records of a mask."""


def find_reward_faults(evidence: Evidence) -> Claims:
    """Find where rewards go against those that the same change of the observation earns elsewhere.

    The prediction knows the observation and the next one, but not the action: so a reward that is wrong for one action
    in one region, in one environment or from some round on does not enter it. Where the move tells the action, it may;
    so each action's rewards are also predicted from those of the others.
    """
    rows = evidence.has_next
    rewards, episodes = evidence.columns["reward"][rows], evidence.episodes[rows]
    if not evidence.state.shape[1] or rows.sum() < _LEAST_RECORDS or rewards.std() == 0:
        return
    actions = evidence.actions[rows] if evidence.actions.ndim == 1 else np.zeros(len(rewards), dtype=np.int64)
    by_action = [actions == number for number in np.unique(actions)]

    def center(values: Numbers) -> Numbers:
        """Return values less the median of their action, which may have a price of its own."""
        return np.asarray(values - np.select(by_action, [np.median(values[mask]) for mask in by_action]))

    paid, basis = center(rewards), _describe_moves(evidence)

    def predict(without: Mask | None) -> Numbers:
        return center(predict_each(basis, paid[:, None], episodes, without)[0][:, 0])

    def predict_from_others(without: Mask | None) -> Numbers:
        left_out = [mask if without is None else mask | without for mask in by_action]
        return center(
            np.select(by_action, [predict_each(basis, paid[:, None], episodes, each)[0][:, 0] for each in left_out])
        )

    # Where nothing is paid, nothing may be due; so that needs an action, an environment, or a round in its words.
    attempts = [(predict, -_HALF, set[str]()), (predict, _HALF, {"action", "env_index", "round"})]
    attempts += [(predict_from_others, -_HALF, set())] if 1 < len(by_action) <= _FEW_ACTIONS else []
    conditions = _list_all_conditions(evidence, 5)
    for model, slope, needed in attempts:
        due = model(None)
        missed = np.minimum((paid - due) ** 2, paid**2).sum()
        votes = _count_votes(paid, due, slope)
        groups = search(votes, episodes, conditions, sign=-1, needed=needed)
        if not groups or missed > (1 - _EXPLAINED) * (paid**2).sum() or (p := groups[0].p * len(attempts)) > CHANCE:
            continue
        group = replace(refine(groups[0], votes, episodes, _list_all_conditions(evidence, 16)), p=p)
        group, due = _choose_actions(evidence, group, paid, model, slope)
        inside = group.mask
        average, size = (paid * np.sign(due))[inside].mean(), np.abs(due[inside]).mean()
        measured = average / max(size, 1e-12)
        if measured > slope or size * inside.mean() < _MATTERS * np.abs(paid).mean():
            continue
        yield Claim(
            "reward",
            evidence.widen(rows, inside),
            f"The reward {'has the wrong sign' if measured < -_HALF else 'is not paid'} for {group.text}: "
            f"{average:+.2g} a step where {size:+.2g} is due, in "
            f"{inside.mean():.1%} of the steps",
            f"Rewards there are {measured:.2f} times what the same change of the observation earns elsewhere. "
            + say_chance(p, "places"),
            f"Read what the environment and its wrappers pay for {group.text}, and open these records.",
            p,
        )
        return


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


def _count_votes(paid: Numbers, due: Numbers, slope: float) -> Votes:
    """Return (n, 1) numbers whose sum is below 0 where less than that slope of what is due is paid."""
    votes = paid * np.sign(due) - slope * np.abs(due)
    bound = 10 * np.median(np.abs(votes)) + 1e-12
    return np.asarray(np.clip(votes, -bound, bound)[:, None])


def _list_all_conditions(evidence: Evidence, bins: int) -> list[Condition]:
    rounds = evidence.columns["round"]
    levels = np.unique(np.quantile(np.unique(rounds), np.arange(1, 6) / 6, method="higher"))
    late = [Condition("round", f"round {one:.0f} and later", rounds[evidence.has_next] >= one) for one in levels]
    return [*list_conditions(evidence, evidence.has_next, bins=bins), *late]


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
    where = np.logical_and.reduce([one.mask for one in place])
    due, units, off = model(where), evidence.episodes[evidence.has_next], []
    votes = _count_votes(paid, due, slope)[:, 0]
    actions = [one for one in list_conditions(evidence, evidence.has_next) if one.column == "action"]
    for action in actions:
        sums = np.bincount(units[where & action.mask], votes[where & action.mask], minlength=1)
        # Twice the error: the place is off already, and the question is only by which of a few actions.
        if sums.sum() < -2 * np.sqrt((sums**2).sum()):
            off.append(action)
    if not 0 < len(off) < len(actions):
        return group, model(group.mask)
    joined = Condition("action", " or ".join(one.text for one in off), np.logical_or.reduce([one.mask for one in off]))
    return replace(group, conditions=(joined, *place), mask=joined.mask & where), due


def find_action_faults(evidence: Evidence) -> Claims:
    """Find where an action does what another one does elsewhere, as if the two were swapped."""
    rows, others = evidence.has_next, _list_alternatives(evidence)
    if not evidence.state.shape[1] or rows.sum() < _LEAST_RECORDS or not others:
        return
    (state, change), acting, episodes = _read_moves(evidence), evidence.acting[rows], evidence.episodes[rows]
    # What an action does is the same everywhere to this model: else it would learn where it does something else.
    basis = expand(state, 64)
    alternatives = [np.hstack([basis, actions]) for _, _, actions in others]
    moves = predict_each(np.hstack([basis, acting]), change, episodes, others=alternatives)
    scale = np.maximum(np.median(np.abs(change - moves[0]), axis=0), 1e-3 * change.std(axis=0) + 1e-9)
    misses = [np.minimum(((change - move) / scale) ** 2, 100).sum(axis=1) for move in moves]
    # Above 0 where the other action tells better what happened. Each pair of actions is a condition of the search.
    members = [np.flatnonzero(mask) for _, mask, _ in others]
    places, pair = np.concatenate(members), np.repeat(np.arange(len(others)), [len(each) for each in members])
    votes = np.sign(np.concatenate([(misses[0] - miss)[each] for miss, each in zip(misses[1:], members, strict=True)]))
    pairs = [Condition("pair", str(number), pair == number) for number in range(len(others))]

    def list_pairs(bins: int) -> list[Condition]:
        # Of discrete states the model knows each by itself, so there is no place where it could be wrong.
        where = [each for each in _list_all_conditions(evidence, bins) if each.column != "action"]
        where = [each for each in where if not each.is_place or len(evidence.features) > 1]
        return [*pairs, *(replace(each, mask=each.mask[places]) for each in where)]

    # What an action does to a state does not depend on the steps before, so that long episodes are many units.
    stretches = np.column_stack([episodes, evidence.columns["step"][rows] // _STRETCH])[places]
    units = np.unique(stretches, axis=0, return_inverse=True)[1].reshape(-1)
    groups = search(votes[:, None], units, list_pairs(5), sign=1, needed={"pair"})
    finer = list_pairs(16) if groups else []
    for rough in groups:
        group = refine(rough, votes[:, None], units, finer)
        # Of several actions that fit better than the one that was taken, the best; and what that one itself does there.
        inside = places[group.mask]
        fits = {
            number: misses[1 + number][inside].sum() for number in range(len(others)) if others[number][1][inside].all()
        }
        (one, other), _, _ = others[best := min(fits, key=lambda number: fits[number])]
        back = next((number for number, (names, _, _) in enumerate(others) if names == (other, one)), best)
        where = [condition for condition in group.conditions if condition.column != "pair"]
        there = np.logical_and.reduce([condition.mask for condition in where] or [pairs[best].mask])
        share = _measure_share(votes[pairs[best].mask & there] > 0)
        is_distinct = _measure_share(votes[pairs[best].mask & ~there] < 0) >= _HALF
        is_mutual = _measure_share(votes[pairs[back].mask & there] > 0) > _HALF
        # What is so everywhere is how the action works; elsewhere the two have to be told apart. And where something
        # holds the body, an action may do nothing, in a place or once an agent goes there. No environment differs.
        is_shared = all(condition.column != "env_index" for condition in where)
        if not where or share < _MOST or not is_distinct or (is_shared and not is_mutual):
            continue
        text = " and ".join(condition.text for condition in where)
        swapped = f"Actions {one} and {other} are swapped" if one != other else f"{one} does the opposite of elsewhere"
        yield Claim(
            "dynamics",
            evidence.widen(rows, np.bincount(inside, minlength=len(state)) > 0),
            f"{swapped if is_mutual else f'Action {one} does what {other} does elsewhere,'} for {text}: in "
            f"{share:.0%} of {(pairs[best].mask & there).sum():,} steps",
            "The next observation is nearer to what the other action makes of the same state elsewhere. "
            + say_chance(group.p, "actions and places"),
            f"Compare how the environment and its wrappers read actions for {text} with the others.",
            group.p,
        )
        return


def _measure_share(mask: Mask) -> float:
    """Return the share of True; 0 of nothing."""
    return float(mask.mean()) if len(mask) else 0.0


def _list_alternatives(evidence: Evidence) -> list[tuple[tuple[str, str], Mask, Matrix]]:
    """Return for each pair of actions their names, who took the first, and the second as numbers, once a record."""
    acting, names = evidence.acting[evidence.has_next], evidence.action_names
    if evidence.actions.ndim > 1:
        axes, everywhere = evidence.actions[evidence.has_next], np.ones(len(acting), dtype=bool)
        others = [(("The action", "The action"), -axes)]
        for i, j in itertools.combinations(range(len(names) if len(names) <= _FEW_ACTIONS else 0), 2):
            others.append(((names[i], names[j]), axes.copy()))
            others[-1][1][:, [i, j]] = axes[:, [j, i]]
        return [(pair, everywhere, np.hstack([each, each**2])) for pair, each in others]
    rows, count = np.eye(len(names)), len(names) if len(names) <= _FEW_ACTIONS else 0
    return [
        ((names[i], names[j]), acting[:, i] > 0, np.tile(rows[j], (len(acting), 1)))
        for i, j in itertools.permutations(range(count), 2)
    ]
