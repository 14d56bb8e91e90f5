"""What is wrong with learning: records that harm, the critic, and the settings."""

import numpy as np
from jaxtyping import Float

from whence.findings.claims import Claim, Claims, say_chance
from whence.findings.evidence import Evidence
from whence.findings.subgroups import list_conditions, refine, search

_LEAST_RECORDS = 1000
_QUARTER = 0.25
"""What a place has at least of the critic's squared error, or takes back of the gain by the other records."""

_SHARPEST = 5.0
"""Sizes beyond which a number counts no more: a search is for what many records share."""


def find_harm(evidence: Evidence) -> Claims:
    """Find a kind of record that takes back much of what training on the others gains.

    All scores of a round share its target, which is noisy. So the sums over a subgroup are by round and fold of the
    target's episodes, without the records' own fold, and these are what chance would turn.
    """
    rows = np.isfinite(evidence.votes).all(axis=1)
    rounds = evidence.columns["round"][rows].astype(np.int64)
    if rows.sum() < _LEAST_RECORDS:
        return
    votes = _scale(evidence.votes[rows], rounds)
    # No condition is on the reward: what was unlucky harms, in the soundest run.
    conditions = list_conditions(evidence, rows)
    for rough in search(votes, rounds, conditions, sign=-1):
        group = refine(rough, votes, rounds, conditions)
        gain, loss = float(votes[~group.mask].sum()), float(votes[group.mask].sum())
        if -loss <= _QUARTER * gain or gain <= 0:
            continue
        signs = [votes[group.mask & (rounds == number)].sum() < 0 for number in np.unique(rounds[group.mask])]
        yield Claim(
            "records",
            evidence.widen(rows, group.mask),
            f"Training on the records of {group.text} harms: these {group.mask.mean():.1%} of the records undo "
            f"{-loss / gain:.0%} of what the others gain",
            f"Their scores add up to less than 0 in {np.mean(signs):.0%} of {len(signs)} rounds. "
            + say_chance(group.p, "kinds of records"),
            "Open these records and compare their advantages with fresh rollouts; then train without them: `whence "
            "prove --where`.",
            group.p,
        )
        return


def _scale(votes: Float[np.ndarray, "n k"], rounds: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n k"]:
    """Return scores in units of their round's mean size, so that no round decides alone."""
    numbers = np.unique(rounds, return_inverse=True)[1]
    sizes = np.bincount(numbers, np.abs(votes.sum(axis=1))) / np.bincount(numbers)
    return np.clip(votes / np.maximum(sizes[numbers], 1e-12)[:, None], -_SHARPEST, _SHARPEST)


def find_critic_faults(evidence: Evidence) -> Claims:
    """Find where the critic is off in the last third of the rounds: returns differ from its values on average."""
    columns = evidence.columns
    late = columns["round"] > np.quantile(np.unique(columns["round"]), 2 / 3)
    rows = late & np.isfinite(columns["return"]) & np.isfinite(columns["value"])
    rounds = columns["round"][rows]
    if rows.sum() < _LEAST_RECORDS or len(np.unique(rounds)) < 2:
        return
    size = float(columns["return"][rows].std()) or 1.0
    misses = np.clip((columns["return"] - columns["value"])[rows] / size, -_SHARPEST, _SHARPEST)
    numbers = np.unique(rounds, return_inverse=True)[1]
    means = np.bincount(numbers, misses) / np.bincount(numbers)  # of each round, as the policy changes with it
    votes, units, conditions = (
        (misses - means[numbers])[:, None],
        evidence.episodes[rows],
        list_conditions(evidence, rows),
    )
    for rough in (group for sign in (1, -1) for group in search(votes, units, conditions, sign=sign)):
        group = refine(rough, votes, units, conditions)
        off, rest, share = misses[group.mask].mean(), misses[~group.mask].mean(), group.mask.mean()
        by_round = [misses[group.mask & (rounds == each)].mean() for each in np.unique(rounds[group.mask])]
        # By more than all returns vary: a critic that says the mean everywhere would be nearer there.
        side = np.sign(group.t)
        is_large = min(side * off, side * (off - rest)) >= 1 and min(side * np.array(by_round)) >= 0
        if not is_large or off**2 * share < _QUARTER * (misses**2).mean():
            continue
        yield Claim(
            "critic",
            evidence.widen(rows, group.mask),
            f"The critic is too {'low' if off > 0 else 'high'} for {group.text}: by {abs(off) * size:.3g} on average, "
            f"{abs(off):.2g} standard deviations of the return, in {share:.1%} of the last rounds' records",
            f"In each of the last {len(by_round)} rounds that were read; elsewhere by {abs(rest) * size:.2g}. "
            + say_chance(group.p, "places"),
            "Raise `n_epochs` or the critic's size, or look for what the observation leaves out there.",
            group.p,
        )
        return
