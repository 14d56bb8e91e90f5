"""A search for subgroups of records whose sum of a column stands out, with a test over the whole search."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

from whence.findings.evidence import FEW, Evidence, Mask, Numbers

LEAST = 0.01
"""The smallest share of the records that is a subgroup: rarer ones are moments, which a page lists by themselves."""

_UNITS = 8
"""Independent units that a subgroup needs: of fewer, a random sign of each decides alone."""

_MOST_UNITS = 512
_PERMUTATIONS = 999
_BEST = 12
_LONGEST = 3

Votes = Float[np.ndarray, "n k"]
Units = Int[np.ndarray, " n"]


@dataclass(frozen=True, eq=False)
class Condition:
    """A set of records in words; conditions of one column are not joined. `is_place`: it is on the observation."""

    column: str
    text: str
    mask: Mask
    is_place: bool = False


@dataclass(frozen=True, eq=False)
class Subgroup:
    """Records that satisfy all of a few conditions, whose sum is t standard errors, over units, from 0.

    `p` is the chance that a search like this one finds as large a |t| where each unit's sums are as often negative.
    """

    conditions: tuple[Condition, ...]
    mask: Mask
    t: float
    p: float

    @property
    def text(self) -> str:
        """The conditions in words."""
        return " and ".join(condition.text for condition in self.conditions)


def cut(name: str, values: Numbers, bins: int = 5, *, is_place: bool = False) -> list[Condition]:
    """Return the conditions of a numeric column: above and below its quantiles; of a few values, equal to each."""
    distinct = np.unique(values[np.isfinite(values)])
    if len(distinct) < 2:
        return []
    if len(distinct) <= bins + 1:
        return [Condition(name, f"{name} = {value:.4g}", values == value, is_place) for value in distinct]
    levels = np.unique(np.quantile(values[np.isfinite(values)], np.linspace(0, 1, bins + 1)[1:-1]))
    below = [Condition(name, f"{name} < {level:.3g}", values < level, is_place) for level in levels]
    return below + [Condition(name, f"{name} ≥ {level:.3g}", values >= level, is_place) for level in levels]


def list_conditions(evidence: Evidence, rows: Mask, *, bins: int = 5) -> list[Condition]:
    """Return what subgroups of some records are made of: action, observation, environment, and time in the episode."""
    conditions: list[Condition] = []
    for number, name in enumerate(evidence.action_names):
        if evidence.actions.ndim == 1:
            conditions.append(Condition("action", f"action {name}", evidence.actions[rows] == number))
        else:
            is_low = evidence.actions[rows, number] < 0
            conditions += [Condition(name, f"{name} < 0", is_low), Condition(name, f"{name} ≥ 0", ~is_low)]
    copies = evidence.columns["env_index"][rows]
    names, counts = np.unique(copies, return_counts=True)
    # A mask each, so those of thousands of environments, too small to be a subgroup, are not made.
    names = names[counts >= LEAST * len(copies)]
    conditions += [Condition("env_index", f"environment {copy:.0f}", copies == copy) for copy in names]
    conditions += [one for one in cut("step", evidence.columns["step"][rows], bins) if "<" not in one.text]
    for name, values in evidence.features.items() if len(evidence.features) <= FEW else ():
        conditions += cut(name, values[rows], bins, is_place=True)
    return conditions


def search(
    values: Votes,
    units: Units,
    conditions: Sequence[Condition],
    *,
    sign: int,
    needed: Collection[str] = (),
    seed: int = 0,
) -> list[Subgroup]:
    """Return the subgroups by one or two conditions whose sums are farthest from 0, the surest first.

    Each unit's sums get a random sign, the same for all subgroups, and the largest |t| of all subgroups is noted, many
    times: so the chance is that of the whole search. Where no sign comes near, it is bounded by Hoeffding's inequality
    for sums of random signs, times the number of subgroups.

    Args:
        values: (n, k) numbers of mean 0 if nothing stands out; the k columns are independent of each other.
        units: (n,) records of different units are independent: their episode, or their round.
        conditions: what subgroups are made of.
        sign: 1 or −1: sums above or below 0.
        needed: columns of which a subgroup has a condition; none: any.
        seed: of the random signs.
    """
    conditions = [one for one in conditions if LEAST <= one.mask.mean() <= 1 - LEAST]
    if not conditions:
        return []
    masks = np.stack([one.mask for one in conditions], axis=1)
    order = np.argsort(units % _MOST_UNITS, kind="stable")
    starts = np.flatnonzero(np.diff((units % _MOST_UNITS)[order], prepend=-1))
    by_unit, sizes = list[NDArray[np.float32]](), np.zeros((len(conditions), len(conditions)))
    for rows in np.split(order, starts[1:]):  # masks of all records as numbers would take four times the memory
        mask, part = masks[rows].astype(np.float32), values[rows].astype(np.float32)
        by_unit += [(mask * column[:, None]).T @ mask for column in part.T]
        sizes += mask.T @ mask
    sums = np.stack(by_unit)
    squares, filled = (sums**2).sum(axis=0), (sums != 0).sum(axis=0)
    columns = np.array([one.column for one in conditions])
    is_pair = np.triu(columns[:, None] != columns) | np.eye(len(columns), dtype=bool)
    if needed:
        is_needed = np.isin(columns, list(needed))
        is_pair &= is_needed[:, None] | is_needed
    is_tested = is_pair & (filled >= _UNITS) & (sizes >= LEAST * len(masks)) & (squares > 0)
    tried = int(is_tested.sum())
    if not tried:
        return []
    tested, scale = sums[:, is_tested], np.sqrt(squares[is_tested])
    t = sign * tested.sum(axis=0) / scale
    signs = np.random.default_rng(seed).choice(np.array([-1, 1], dtype=np.float32), (_PERMUTATIONS, len(tested)))
    null = np.abs(signs @ tested / scale).max(axis=1)
    subgroups = []
    for place in np.argsort(-t)[:_BEST]:
        pair = tuple(conditions[i] for i in sorted({*np.argwhere(is_tested)[place].tolist()}))
        reached = int((null >= t[place]).sum())
        bound = 2 * tried * float(np.exp(-(t[place] ** 2) / 2))
        p = (1 + reached) / (1 + len(null)) if reached else min(1 / (1 + len(null)), bound)
        subgroups.append(Subgroup(pair, _join(pair), sign * float(t[place]), p))
    return [one for one in subgroups if sign * one.t > 0]


def refine(group: Subgroup, values: Votes, units: Units, conditions: Sequence[Condition]) -> Subgroup:
    """Return the surest subgroup that a condition on the observation, changed, added or left out, makes of one.

    A change has to raise t² by more than the best of as many changes by noise would. The chance stays the search's.
    """
    places = [one for one in conditions if one.is_place]
    least = 2 * np.log(1 + len(places))
    for _ in range(_LONGEST):
        options = [
            tuple(one for one in group.conditions if one is not each) for each in group.conditions if each.is_place
        ]
        options += [(*(one for one in group.conditions if one.column != each.column), each) for each in places]
        options = [each for each in options if 0 < len(each) <= _LONGEST and _join(each).mean() >= LEAST]
        measured = [np.sign(group.t) * _measure(_join(each), values, units) for each in options]
        if not measured or max(measured) <= np.sqrt(group.t**2 + least):
            break
        best = options[int(np.argmax(measured))]
        group = Subgroup(best, _join(best), float(np.sign(group.t) * max(measured)), group.p)
    return group


def _join(conditions: Sequence[Condition]) -> Mask:
    return np.asarray(np.logical_and.reduce([one.mask for one in conditions]))


def _measure(mask: Mask, values: Votes, units: Units) -> float:
    sums = np.stack([np.bincount(units[mask], column[mask]) for column in values.T])
    return float(sums.sum() / max(np.sqrt((sums**2).sum()), 1e-12))
