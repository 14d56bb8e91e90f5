"""What changes from some round on, and no policy can change: what is paid ever again, and how episodes begin."""

import numpy as np
from jaxtyping import Int
from scipy import special

from whence.findings.copies import compare_groups, name_features
from whence.findings.evidence import Evidence, Numbers
from whence.findings.finding import CHANCE, CannotTellError, Sight

_LEAST = 1e-3
"""Of an entry's spread in the run: what starts vary by less is rounding, or nothing."""


def look_at_rewards(evidence: Evidence) -> Sight:
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


def look_at_observations(evidence: Evidence) -> Sight:
    """Find the round from which on episodes begin elsewhere, which no policy can change: in doublings of their spread.

    Places, and distances from the median, of what episodes begin with are compared where ranks tell them apart.
    """
    features, rows = name_features(evidence), np.flatnonzero(evidence.columns["step"] == 0)
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
            means, rest, z = (each[:-1] for each in compare_groups(numbers, place, len(rounds), in_order=True))
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
