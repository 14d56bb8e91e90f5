"""What is wrong with learning: records that harm, the critic, and the settings."""

import numpy as np
from jaxtyping import Float

from whence.advice import give_advice
from whence.findings.evidence import Evidence
from whence.findings.finding import Finding, make_finding, say_chance
from whence.findings.subgroups import cut, list_conditions, refine, search

_LEAST_RECORDS = 1000
_UNDONE = 0.25
"""The share of the other records' gain that a subgroup takes back at least: the update without it is a third larger."""

_WEIGHT = 0.25
"""The share of the critic's squared error that is of one place at least: less is a rare state, or learned too late."""

_SHARPEST = 5.0
"""Sizes beyond which a number counts no more: a search is for what many records share."""


def find_harm(evidence: Evidence) -> list[Finding]:
    """Find a kind of record that takes back much of what training on the others gains.

    All scores of a round share its target, which is noisy. So the sums over a subgroup are by round and fold of the
    target's episodes, without the records' own fold, and these are what chance would turn.
    """
    rows = np.isfinite(evidence.votes).all(axis=1)
    rounds = evidence.columns["round"][rows]
    if rows.sum() < _LEAST_RECORDS:
        return []
    votes = _scale(evidence.votes[rows], rounds)
    conditions = [*list_conditions(evidence, rows), *cut("reward", evidence.columns["reward"][rows])]
    for rough in search(votes, rounds.astype(np.int64), conditions, sign=-1):
        group = refine(rough, votes, rounds.astype(np.int64), conditions)
        gain, loss = float(votes[~group.mask].sum()), float(votes[group.mask].sum())
        if not -loss > _UNDONE * gain > 0:
            continue
        numbers = np.unique(rounds[group.mask])
        harmful = np.mean([votes[group.mask & (rounds == number)].sum() < 0 for number in numbers])
        mask = np.zeros(len(rows), dtype=bool)
        mask[np.flatnonzero(rows)[group.mask]] = True
        return [
            make_finding(
                "records",
                evidence,
                mask,
                title=f"Training on the records of {group.text} harms: these {group.mask.mean():.1%} of the records "
                f"undo {-loss / gain:.0%} of what the others gain",
                because=f"Their scores add up to less than 0 in {harmful:.0%} of {len(numbers)} rounds. By chance: "
                f"{say_chance(group.p)}, over all kinds of records that were tried.",
                advice="Open these records and compare their advantages with fresh rollouts; then train without them: "
                "`whence intervene --where`.",
                p=group.p,
            )
        ]
    return []


def _scale(votes: Float[np.ndarray, "n k"], rounds: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n k"]:
    """Return scores in units of their round's mean size, so that no round decides alone."""
    scaled = np.empty_like(votes)
    for number in np.unique(rounds):
        rows = rounds == number
        size = max(float(np.abs(votes[rows].sum(axis=1)).mean()), 1e-12)
        scaled[rows] = np.clip(votes[rows] / size, -_SHARPEST, _SHARPEST)
    return scaled


def find_critic_faults(evidence: Evidence) -> list[Finding]:
    """Find where the critic is off in the last third of the rounds: returns differ from its values on average."""
    columns = evidence.columns
    late = columns["round"] > np.quantile(np.unique(columns["round"]), 2 / 3)
    rows = late & np.isfinite(columns["return"]) & np.isfinite(columns["value"])
    rounds = columns["round"][rows]
    if rows.sum() < _LEAST_RECORDS or len(np.unique(rounds)) < 2:
        return []
    size = float(columns["return"][rows].std()) or 1.0
    misses = np.clip((columns["return"] - columns["value"])[rows] / size, -_SHARPEST, _SHARPEST)
    votes, units = misses[:, None] - misses.mean(), evidence.episodes[rows]
    conditions = list_conditions(evidence, rows)
    for sign in (1, -1):
        for rough in search(votes, units, conditions, sign=sign):
            group = refine(rough, votes, units, conditions)
            off, rest = float(misses[group.mask].mean()), float(misses[~group.mask].mean())
            by_round = [misses[group.mask & (rounds == each)].sum() for each in np.unique(rounds[group.mask])]
            # By more than all returns vary: a critic that says the mean everywhere would be nearer there.
            is_large = min(sign * off, sign * (off - rest)) >= 1 and min(sign * np.array(by_round)) >= 0
            if not is_large or off**2 * group.mask.mean() < _WEIGHT * (misses**2).mean():
                continue
            mask = np.zeros(len(rows), dtype=bool)
            mask[np.flatnonzero(rows)[group.mask]] = True
            return [
                make_finding(
                    "critic",
                    evidence,
                    mask,
                    title=f"The critic is too {'low' if off > 0 else 'high'} for {group.text}: by "
                    f"{abs(off) * size:.3g} on average, {abs(off):.2g} standard deviations of the return, in "
                    f"{group.mask.mean():.1%} of the last rounds' records",
                    because=f"In each of the last {len(by_round)} rounds that were read; elsewhere by "
                    f"{abs(rest) * size:.2g}. By chance: {say_chance(group.p)}, over all places that were tried.",
                    advice="Raise `n_epochs` or the critic's size, or look for what the observation leaves out there.",
                    p=group.p,
                )
            ]
    return []


def find_settings(evidence: Evidence) -> list[Finding]:
    """Find settings that do not fit the run, by its metrics and the lengths of its episodes."""
    ended = evidence.ends != ""
    length = float(np.median(evidence.columns["step"][ended]) + 1) if ended.any() else None
    config = {**evidence.config, "episode_length": length}
    return [
        Finding("setting", each.title, each.evidence, each.remedy, None, each.round)
        for each in give_advice(evidence.metrics, config)
        if each.is_setting
    ]
