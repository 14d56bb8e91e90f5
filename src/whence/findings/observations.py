"""What is wrong with observations: parts that never change, are clipped, or are shown a second time."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from whence.findings.evidence import FEW, Evidence, Mask
from whence.findings.finding import Claim, Claims, say_chance

_LEAST_RECORDS = 200
_MANY = 50
"""Distinct values from which on a number counts as continuous: for it, no value comes twice by chance."""

_SHARE = 0.05
"""The share of the records from which on a repeat matters to training; chance gives none."""


def find_constant(evidence: Evidence) -> Claims:
    """Find parts of the observation that never change while others do, in all environments or in one."""
    copies, episodes = evidence.columns["env_index"], evidence.episodes
    joined = copies[1:] == copies[:-1]
    moves = {name: (each[1:] != each[:-1]).any(axis=1) & joined for name, each in evidence.blocks.items()}
    if not 2 <= len(moves) <= FEW or len(evidence) < _LEAST_RECORDS:
        return
    is_most = 2 * sum(is_moving.any() for is_moving in moves.values()) >= len(moves)
    for name, is_moving in moves.items():
        p, advice = None, f"Check that {name} is filled in at each step. If it is constant on purpose, leave it out."
        for copy in np.unique(copies) if is_moving.any() else [None]:
            inside, where = (copies == copy, f" of environment {copy:.0f}") if copy is not None else (copies >= 0, "")
            if is_moving[inside[1:]].any() or (copy is None and not is_most):
                continue
            value = evidence.blocks[name][inside][0]
            if copy is not None:
                # The chance that no episode there shows a change, by the share of the others' episodes that do.
                moving = len(np.unique(episodes[1:][is_moving])) / len(np.unique(episodes[~inside]))
                tried = len(moves) * len(np.unique(copies))
                p = float((1 - moving) ** len(np.unique(episodes[inside])) * tried)
            shown = f": it is {value[0]:.3g}" if len(value) == 1 else ", not in one pixel,"
            title = f"{name} never changes{shown} in all {inside.sum():,} records{where}"
            chance = "" if p is None else f" {name} changes in other environments. {say_chance(p)}"
            yield Claim("observation", inside, title, f"Other parts of the observation change.{chance}", advice, p)


def find_clipped(evidence: Evidence) -> Claims:
    """Find continuous numbers of the observation of which many lie at their largest or smallest value."""
    limits, clipped, texts = _list_limits(evidence.config.get("observation_space")), [], []
    parts = [*evidence.blocks.items(), *evidence.normalised.items()]
    for name, block in parts if len(evidence.blocks) <= FEW else ():
        values = block[:, 0].astype(np.float64)
        if block.shape[1] > 1 or len(np.unique(values)) < _MANY:
            continue
        # A number may have a limit that its space declares.
        ends = [end for end in (values.min(), values.max()) if not np.isclose(end, limits, rtol=1e-5).any()]
        masks = [mask for end in ends if (mask := np.isclose(values, end, rtol=1e-6)).mean() >= _SHARE]
        if masks:
            clipped.append(np.logical_or.reduce(masks))
            texts.append(f"{name} (at ±{np.abs(values[clipped[-1]]).max():.3g} in {clipped[-1].mean():.0%})")
    if clipped:
        clip = (evidence.config.get("VecNormalize") or {}).get("clip_obs")
        cause = f" VecNormalize clips at {clip:g} (`clip_obs`)." if isinstance(clip, int | float) else ""
        yield Claim(
            "observation",
            np.logical_or.reduce(clipped),
            f"The observation is clipped at a bound: {', '.join(texts)} of the records",
            f"These numbers have many values, yet that share has exactly the largest or smallest one.{cause}",
            "Widen the bound (`clip_obs`, the space's limits, or the clipping in the environment): states beyond it "
            "look the same to the policy.",
        )


def find_repeated(evidence: Evidence) -> Claims:
    """Find steps after which the observation is exactly as before, whatever the action, though it moves otherwise."""
    rows, features = np.flatnonzero(evidence.has_next), list(evidence.features.values())
    is_image = evidence.digests is not None and all(each.shape[1] > 1 for each in evidence.blocks.values())
    continuous = [] if is_image else [values for values in features if len(np.unique(values)) >= _MANY]
    # A single number, such as that of a cell, stays the same wherever a move fails.
    if len(rows) < _LEAST_RECORDS or (len(continuous) < 2 and not is_image):
        return
    parts = features if evidence.digests is None else [evidence.digests]
    is_same = np.logical_and.reduce([part[rows] == part[rows + 1] for part in parts])
    # Numbers at their limits are not seen to move.
    inside = [(values[rows] > values.min()) & (values[rows] < values.max()) for values in continuous]
    is_same &= np.mean(inside, axis=0) > 0.5 if inside else True
    if not _SHARE <= is_same.mean() < 1 or _depends_on_action(evidence, rows, is_same):
        return
    mask = np.zeros(len(evidence), dtype=bool)
    mask[rows[is_same]] = True
    odd = float((evidence.columns["step"][mask] % 2).mean())
    pattern = f", mostly at {'odd' if odd > 0.5 else 'even'} steps" if abs(odd - 0.5) > 0.4 else ""
    yield Claim(
        "observation",
        mask,
        f"The observation does not change in {is_same.mean():.0%} of the steps{pattern}: an old one is shown again",
        "All of it is exactly as at the step before, whatever the action; in the other steps it changes.",
        "Check that each step returns a new observation, made after the action: no copy of the last one, no array that "
        "is filled in later.",
    )


def _depends_on_action(evidence: Evidence, rows: NDArray[np.int64], is_same: Mask) -> bool:
    """Return whether a repeat comes again more often if the action does, too, as against a wall."""
    if evidence.actions.ndim > 1:
        return False
    first = np.flatnonzero(is_same[:-1] & (rows[1:] == rows[:-1] + 1))
    alike = evidence.actions[rows[first]] == evidence.actions[rows[first + 1]]
    counts = [[(is_same[first + 1] & mask).sum(), (~is_same[first + 1] & mask).sum()] for mask in (alike, ~alike)]
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
