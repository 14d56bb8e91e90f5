"""What is wrong with observations: parts that never change, are clipped, or are shown a second time."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whence.findings.evidence import FEW, Evidence, Mask, Numbers
from whence.findings.finding import Finding, make_finding, say_chance

_MANY = 50
"""Distinct values from which on a number counts as continuous: for it, no value comes twice by chance."""

_SHARE = 0.05
"""The share of the records from which on a repeat matters to training; chance gives none."""


def find_constant(evidence: Evidence) -> list[Finding]:
    """Find parts of the observation that never change while others do, in all environments or in one."""
    moves = {name: _find_moves(values, evidence.columns["env_index"]) for name, values in evidence.blocks.items()}
    if not 2 <= len(moves) <= FEW or len(evidence) < 200:
        return []
    findings, copies = [], evidence.columns["env_index"]
    for name, is_moving in moves.items():
        others = [each for other, each in moves.items() if other != name and each.any()]
        if not is_moving.any() and len(others) >= len(moves) / 2:
            findings.append(_say_constant(evidence, name, np.ones(len(evidence), dtype=bool), "", None))
        for copy in np.unique(copies) if is_moving.any() else ():
            inside = copies == copy
            if is_moving[inside].any() or not any(each[inside].any() for each in others):
                continue
            # The chance that no episode there shows a change, by the share of the others' episodes that do.
            elsewhere = np.bincount(evidence.episodes[~inside], is_moving[~inside])[
                np.unique(evidence.episodes[~inside])
            ]
            p = float((1 - (elsewhere > 0).mean()) ** len(np.unique(evidence.episodes[inside])))
            text = f" of environment {copy:.0f}"
            findings.append(_say_constant(evidence, name, inside, text, p * len(moves) * len(np.unique(copies))))
    return findings


def _find_moves(values: NDArray[Any], copies: Numbers) -> Mask:
    """Return where a part differs from what it was in the record before, of the same environment."""
    return np.append(False, (values[1:] != values[:-1]).any(axis=1) & (copies[1:] == copies[:-1]))


def _say_constant(evidence: Evidence, name: str, mask: Mask, where: str, p: float | None) -> Finding:
    values = evidence.blocks[name][mask][0]
    shown = f": it is {values[0]:.3g}" if len(values) == 1 else ", not in one pixel,"
    chance = "" if p is None else f" {name} does in other environments; by chance: {say_chance(p)}."
    return make_finding(
        "observation",
        evidence,
        mask,
        title=f"{name} never changes{shown} in all {mask.sum():,} records{where}",
        because=f"Other parts of the observation change.{chance}",
        advice=f"Check that {name} is filled in at each step. If it is constant on purpose, leave it out.",
        p=p,
    )


def find_clipped(evidence: Evidence) -> list[Finding]:
    """Find continuous numbers of the observation of which many lie at their largest or smallest value."""
    limits = _list_limits(evidence.config.get("observation_space"))
    shares: dict[str, tuple[float, Mask]] = {}
    for name, block in evidence.blocks.items():
        values = block[:, 0].astype(np.float64)
        if block.shape[1] > 1 or len(evidence.blocks) > FEW or len(np.unique(values)) < _MANY:
            continue
        # A number may have a limit that its space declares.
        ends = [end for end in (values.min(), values.max()) if not np.isclose(end, limits, rtol=1e-5).any()]
        masks = [np.isclose(values, end, rtol=1e-6) for end in ends]
        if max((mask.mean() for mask in masks), default=0) >= _SHARE:
            at_bound = np.logical_or.reduce(masks)
            shares[name] = float(np.abs(values[at_bound]).max()), at_bound
    if not shares:
        return []
    listed = ", ".join(f"{name} (at ±{bound:.3g} in {mask.mean():.0%})" for name, (bound, mask) in shares.items())
    clip = (evidence.config.get("VecNormalize") or {}).get("clip_obs")
    cause = f" VecNormalize clips at {clip:g} (`clip_obs`)." if isinstance(clip, int | float) else ""
    return [
        make_finding(
            "observation",
            evidence,
            np.logical_or.reduce([mask for _, mask in shares.values()]),
            title=f"The observation is clipped at a bound: {listed} of the records",
            because=f"These numbers have many values, yet that share has exactly the largest or smallest one.{cause}",
            advice="Widen the bound (`clip_obs`, the space's limits, or the clipping in the environment): states "
            "beyond it look the same to the policy.",
            p=None,
        )
    ]


def find_repeated(evidence: Evidence) -> list[Finding]:
    """Find steps after which the observation is exactly as before, whatever the action, though it moves otherwise."""
    rows = np.flatnonzero(evidence.has_next)
    continuous = [values for values in evidence.features.values() if len(np.unique(values)) >= _MANY]
    # A single number, such as that of a cell, stays the same wherever a move fails.
    if len(rows) < 200 or (len(continuous) < 2 and (evidence.features or evidence.digests is None)):
        return []
    if evidence.digests is not None:
        is_same = evidence.digests[rows] == evidence.digests[rows + 1]
    else:
        is_same = np.logical_and.reduce([values[rows] == values[rows + 1] for values in evidence.features.values()])
    # Numbers at their limits are not seen to move.
    inside = [(values[rows] > values.min()) & (values[rows] < values.max()) for values in continuous]
    is_same &= np.mean(inside, axis=0) > 0.5 if inside else True
    if not _SHARE <= is_same.mean() < 1 or _depends_on_action(evidence, rows, is_same):
        return []
    mask = np.zeros(len(evidence), dtype=bool)
    mask[rows[is_same]] = True
    odd = float((evidence.columns["step"][rows[is_same]] % 2).mean())
    pattern = f", mostly at {'odd' if odd > 0.5 else 'even'} steps" if abs(odd - 0.5) > 0.4 else ""
    return [
        make_finding(
            "observation",
            evidence,
            mask,
            title=f"The observation does not change in {is_same.mean():.0%} of the steps{pattern}: an old one is shown "
            "again",
            because="All of it is exactly as at the step before, whatever the action; in the other steps it changes.",
            advice="Check that each step returns a new observation, made after the action: no copy of the last one, "
            "no array that is filled in later.",
            p=None,
        )
    ]


def _depends_on_action(evidence: Evidence, rows: NDArray[np.int64], is_same: Mask) -> bool:
    """Return whether a repeat comes again more often if the action does, too, as against a wall."""
    from scipy import stats  # loaded where it is used: other commands need none

    if evidence.actions.ndim > 1:
        return False
    again = np.flatnonzero(is_same[:-1] & (rows[1:] == rows[:-1] + 1))
    alike = evidence.actions[rows[again]] == evidence.actions[rows[again + 1]]
    counts = [[(is_same[again + 1] & mask).sum(), (~is_same[again + 1] & mask).sum()] for mask in (alike, ~alike)]
    return bool(stats.fisher_exact(counts, alternative="greater").pvalue < 1e-3)


def _list_limits(space: Any) -> NDArray[np.float64]:
    """Return the finite limits of a stored space's numbers."""
    if not isinstance(space, Mapping):
        return np.zeros(0)
    inner = space.get("spaces")
    parts = inner.values() if isinstance(inner, Mapping) else ()
    limits = [np.asarray(space.get(end, "inf"), dtype=np.float64).ravel() for end in ("low", "high")]
    values = np.concatenate([*limits, *map(_list_limits, parts)])
    return np.asarray(values[np.isfinite(values)], dtype=np.float64)
