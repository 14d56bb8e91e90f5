"""Parts of a run against the rest: an environment against the others, and the rounds from one on against those before.

What no policy can change is compared: environments share one, and it has no part in how episodes begin.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from scipy import special, stats

from whence.findings.evidence import Evidence, Features, Numbers
from whence.findings.finding import CHANCE, CannotTellError, Sight

_DOUBLINGS = 4.0
"""Ratios count up to 16, or a sixteenth: what is more, nothing, or of the opposite sign is as wrong."""

_FEWEST = 2
"""Episodes that an environment has at least: of one, its spread is unknown."""

_MANY = 64
"""Numbers of an observation that sentences are made of: all are compared in a second."""

_LEAST = 1e-3
"""Of an entry's spread in the run: what starts vary by less is rounding, or nothing."""


class _Trait(NamedTuple):
    """A number of each episode (n,), NaN where unknown, of what kind; whether it is a place, as at 0, or a size."""

    kind: str
    name: str
    values: Numbers
    is_place: bool = False


def look_at_rewards_of_copies(evidence: Evidence) -> Sight:
    """Find the environment whose rewards, or lengths of episodes, differ most from the others': in doublings."""
    count, rewards = np.bincount(evidence.episodes), evidence.columns["reward"]
    totals, paid = (np.bincount(evidence.episodes, each) for each in (np.abs(rewards), rewards != 0))
    traits = [
        _Trait("reward", "The size of rewards", totals / count),
        # Where most episodes pay nothing, means over them hide it.
        _Trait("reward", "The size of rewards other than 0", np.where(paid > 0, totals / np.maximum(paid, 1), np.nan)),
        _Trait("reward", "The reward of a step", np.bincount(evidence.episodes, rewards) / count, is_place=True),
        _Trait("episode", "The length of episodes", np.where(evidence.is_whole, count, np.nan)),
    ]
    return _find_oddest(evidence, traits)


def look_at_observations_of_copies(evidence: Evidence) -> Sight:
    """Find the environment whose observations, or their answer to actions, differ most from the others'."""
    features, count = _name_features(evidence), np.bincount(evidence.episodes)
    before = np.flatnonzero(evidence.has_next)
    episodes, acting = evidence.episodes[before], evidence.acting[before]
    steps, pairs = np.maximum(np.bincount(episodes, minlength=len(count)), 1), max(len(before), 1)
    acting = acting - acting.sum(axis=0) / pairs
    gram = acting.T @ acting + 1e-6 * pairs * np.eye(acting.shape[1])
    traits = []
    for name, values in features.items():
        change = values[before + 1] - values[before]
        change = change - change.sum() / pairs
        # What the actions do on average to this number, and how much of it each episode has: -1 is the opposite.
        effect = acting @ np.linalg.solve(gram, acting.T @ change)
        effect /= max(float((effect**2).sum()) / pairs, 1e-300)
        answers = np.bincount(episodes, effect * change, minlength=len(count)) / steps
        sizes = np.bincount(evidence.episodes, np.abs(values - np.median(values))) / count
        traits += [
            _Trait("observation", f"The size of t{name[1:]}", sizes),
            _Trait("observation", name, np.bincount(evidence.episodes, values) / count, is_place=True),
            _Trait("dynamics", f"t{name[1:]}", np.where(steps > 1, answers, np.nan)),
        ]
    return _find_oddest(evidence, traits)


def _name_features(evidence: Evidence) -> Features:
    """Return the observation's numbers by what a sentence calls them; `CannotTellError` of none or too many."""
    if not 0 < len(evidence.features) <= _MANY:
        raise CannotTellError("the observation has too many numbers" if evidence.features else "it is not known")
    entries = evidence.blocks
    return {f"The observation's {'entry ' * (key in entries)}{key}": x for key, x in evidence.features.items()}


def _find_oddest(evidence: Evidence, traits: list[_Trait]) -> Sight:
    """Return the largest difference of an environment from the others that is not by chance.

    Environments that are trained in at the same time share the policy, so by ranks of episodes there is a test.
    """
    copies = np.unique(evidence.columns["env_index"])
    copy_of = evidence.columns["env_index"][np.unique(evidence.episodes, return_index=True)[1]]
    if len(copies) < 2:
        raise CannotTellError("there is one environment")
    steps, is_unknown = evidence.columns["step"], not evidence.config.get("env_wrappers", True)
    if is_unknown and not len(steps) % len(copies) and not np.ptp(steps.reshape(len(copies), -1), axis=0).any():
        raise CannotTellError("the environments may be agents of one world: their episodes always end together")
    place = np.searchsorted(copies, copy_of)
    tries, each = len(copies) * len(traits), np.median(np.bincount(place))
    by_chance = -special.ndtri(CHANCE / (2 * tries))
    if np.sqrt(3 * each * (len(place) - each) / (len(place) + 1)) < by_chance:  # where all are beyond all others
        raise CannotTellError(f"{len(place)} episodes of {len(copies)} environments are too few for a sure difference")
    seen = []
    for trait in traits:
        here, others, z = _compare_groups(trait.values, place, len(copies))
        # Of a difference, what is beyond chance: so that it is next to nothing where it is just sure.
        differences = _measure(trait, here, others) * np.maximum(1 - by_chance / np.maximum(z, 1e-9), 0)
        at = int(differences.argmax())
        p = min(1.0, float(2 * special.ndtr(-z[at]) * tries))
        seen.append((float(differences[at]), trait, at, p, float(here[at]), float(others[at])))
    difference, trait, at, chance, mean, rest = max(seen, key=lambda one: one[0])
    where, are_actions = f"in environment {copies[at]:.0f}", trait.kind == "dynamics"
    title = f"{trait.name} {where} is {mean:.3g} on average, and {rest:.3g}"
    if are_actions:
        verb = "do the opposite" if mean * rest < 0 else "act differently"
        title = (
            f"Actions {verb} {where}: their effect on {trait.name} is {mean:.2g} times the usual one, {rest:.2g} times"
        )
    return Sight(
        difference,
        trait.kind,
        f"{title} in the other {len(copies) - 1}",
        "Environments that share a policy have their means over episodes in common.",
        ("Actions may be swapped there, or their axes reversed. " if are_actions else "")
        + f"Compare how environment {copies[at]:.0f} is made with the others: its arguments and its wrappers.",
        evidence.columns["env_index"] == copies[at],
        chance,
    )


def _measure(trait: _Trait, here: Numbers, others: Numbers) -> Numbers:
    """Return how far two means are apart: sizes in doublings, places in deviations of episodes."""
    if trait.is_place:
        differences = np.abs(here - others) / max(float(np.nanstd(trait.values)), 1e-12)
    else:
        signs = np.where(others < 0, -1, 1)
        differences = np.abs(np.log2(np.maximum(signs * here, 1e-12) / np.maximum(signs * others, 1e-12)))
    return np.asarray(np.minimum(differences, _DOUBLINGS))


def _compare_groups(
    values: Numbers, place: Int[np.ndarray, " n"], groups: int, *, in_order: bool = False
) -> tuple[Numbers, Numbers, Numbers]:
    """Return each group's mean, that of the others, and Mann and Whitney's |z| of all, in one pass.

    `values` are NaN where unknown; `in_order` takes each group with all before it.
    """
    known = np.isfinite(values)
    values, place = values[known], place[known]
    if not len(values):
        return np.zeros(groups), np.zeros(groups), np.zeros(groups)
    ranks = stats.rankdata(values)
    sums = np.stack([np.bincount(place, each, minlength=groups) for each in (np.ones(len(values)), values, ranks)])
    sizes, totals, ranked = np.cumsum(sums, axis=1) if in_order else sums
    others = len(values) - sizes
    means, rest = totals / np.maximum(sizes, 1), (values.sum() - totals) / np.maximum(others, 1)
    spread = np.sqrt(np.maximum(sizes * others, 1) / max(len(values) - 1, 1)) * max(ranks.std(), 1e-9)
    z = np.maximum(np.abs(ranked - sizes * ranks.mean()) - 0.5, 0) / spread
    return means, rest, np.where(np.minimum(sizes, others) >= _FEWEST, z, 0.0)


def look_at_changes_of_rewards(evidence: Evidence) -> Sight:
    """Find the step from which on every reward differs from all before it, by value or size: in doublings of rewards.

    What a policy learns moves the rewards that it gets, but old ones come again. Rewards of 0 may be left out; as many
    rewards count as there are on the side that has fewer.
    """
    rounds, rewards = evidence.columns["round"], evidence.columns["reward"]
    if rounds.min() == rounds.max():
        raise CannotTellError("there is one round")
    order = np.lexsort((_rank_records(evidence), rounds))
    best, first, text = 0, 0, ""
    for rows, name in ((order, "reward"), (order[rewards[order] != 0], "reward other than 0")):
        for start, values in (("Every", rewards[rows]), ("The size of every", np.abs(rewards[rows]))):
            side, at = max(_divide(values), _divide(-values))
            if side > best:
                best, first = side, int(rows[at])
                before, after = values[:at], values[at:]
                text = (
                    f"{start} {name} changes at round {rounds[first]:.0f}: from {before.min():.3g} to "
                    f"{before.max():.3g} before it, from {after.min():.3g} to {after.max():.3g} from then on"
                )
    return Sight(
        float(np.log2(max(best, 1))),
        "reward",
        text,
        f"{best:,} rewards or more on either side have no value in common.",
        "Compare what is paid before that round and after it.",
        rounds == rounds[first],
    )


def _rank_records(evidence: Evidence) -> Int[np.ndarray, " n"]:
    """Return how many records its environment has before each."""
    copies = evidence.columns["env_index"]
    starts = np.flatnonzero(np.append(True, copies[1:] != copies[:-1]))
    return np.arange(len(copies)) - np.repeat(starts, np.diff(np.append(starts, len(copies))))


def _divide(values: Numbers) -> tuple[int, int]:
    """Return how many values the smaller side has where all before are below all after; and the first one after."""
    if len(values) < 2:
        return 0, 0
    below = np.maximum.accumulate(values)[:-1] < np.minimum.accumulate(values[::-1])[::-1][1:]
    count = np.arange(1, len(values))
    sides = np.minimum(count, count[::-1])
    # Few are apart by chance: in one order of so many, of eight questions at each place.
    sides[~below | (special.binom(len(values), sides) * CHANCE < 8 * len(values))] = 0
    return int(sides.max()), int(sides.argmax()) + 1


def look_at_changes_of_observations(evidence: Evidence) -> Sight:
    """Find the round from which on episodes begin elsewhere, which no policy can change: in doublings of their spread.

    Places, and distances from the median, of what episodes begin with are compared where ranks tell them apart.
    """
    features, rows = _name_features(evidence), np.flatnonzero(evidence.columns["step"] == 0)
    rounds, place = np.unique(evidence.columns["round"][rows], return_inverse=True)
    before = np.cumsum(np.bincount(place, minlength=1))[:-1]
    share = before * (len(rows) - before) / max(len(rows), 1) ** 2
    tries = 2 * len(features) * max(1, len(before))
    by_chance = -special.ndtri(CHANCE / (2 * tries))
    if np.sqrt(len(rows) * share.max(initial=0.0)) * np.sqrt(3) < by_chance:  # where all are beyond all others
        raise CannotTellError(f"{len(rows)} episodes begin in {len(rounds)} rounds, too few for a sure difference")
    best = Sight(0.0)
    for name, values in features.items():
        starts, least = values[rows], max(_LEAST * float(values.std()), 1e-300)
        for numbers in (starts, np.abs(starts - np.median(starts))):
            means, rest, z = (each[:-1] for each in _compare_groups(numbers, place, len(rounds), in_order=True))
            apart = np.abs(means - rest)
            within = np.maximum(np.sqrt(np.maximum(numbers.var() - share * apart**2, 0.0)), least)
            doublings = np.where(z > by_chance, np.log2(1 + apart / within), 0.0)
            at = int(doublings.argmax())
            if doublings[at] > best.statistic:
                early, late = starts[place <= at], starts[place > at]
                best = Sight(
                    float(doublings[at]),
                    "observation",
                    f"{name} changes at round {rounds[at + 1]:.0f}: episodes begin at {early.mean():.3g} ± "
                    f"{early.std():.2g} before it, at {late.mean():.3g} ± {late.std():.2g} from then on",
                    f"No policy changes how episodes begin; {len(early):,} began before that round, {len(late):,} "
                    "after it.",
                    "Compare what fills it in before that round and after it: its unit, its offset, its source.",
                    evidence.columns["round"] == rounds[at + 1],
                )
    return best
