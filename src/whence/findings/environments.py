"""What is wrong with an environment: its observations, one that is unlike the others, how episodes end and pay."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from whence.findings.evidence import FEW, Evidence, Mask, Numbers
from whence.findings.finding import CHANCE, Claim, Claims, say_chance
from whence.findings.models import expand, predict_each

_EPISODES = 8
"""Episodes that a statement on episodes needs on either side."""

_SHORTEST = 20
"""Steps below which a fixed length is more likely a rule of the game than a time limit."""

_LAST, _READ = 5, 256
"""Steps before a fixed length, and numbers of their observations, that are looked at for a sign of the end."""

_UNKNOWN = 0.5
"""The share of the variance that these leave open at least if they show no end."""

_MOST = 5
"""Environments that are named at most for one number that never changes there; of thousands, the surest."""

_LEAST_RECORDS = 200
_MANY = 50
"""Distinct values from which on a number counts as continuous: for it, no value comes twice by chance."""

_SHARE = 0.05
"""The share of the records from which on a repeat matters to training; chance gives none."""


def find_limit_as_end(evidence: Evidence) -> Claims:
    """Find a time limit that is reported as an end: many episodes "terminated" after the same, the largest, number."""
    lengths, ended = evidence.columns["step"] + 1, evidence.ends == "terminated"
    longest = int(lengths.max())
    at_limit, near = (lengths == longest) & ended, (lengths >= 0.9 * longest) & (lengths < longest) & ended
    if longest >= _SHORTEST and at_limit.sum() >= _EPISODES and not _shows_end(evidence, longest):
        # Ends that may come at any step come as often at each of the last tenth.
        tenth = longest - int(np.ceil(0.9 * longest)) + 1
        p = float(stats.binom.sf(at_limit.sum() - 1, at_limit.sum() + near.sum(), 1 / tenth))
        yield Claim(
            "episode",
            at_limit,
            f"A time limit is reported as an end: {at_limit.sum():,} episodes are terminated after exactly {longest} "
            f"steps, {at_limit.sum() / ended.sum():.0%} of those that end",
            f"No episode is longer, and {near.sum():,} end in the tenth before that, where ends at any step would "
            f"spread. {say_chance(p)}",
            "Return `truncated=True`, not `terminated=True`, at the limit, as Gymnasium's `TimeLimit` does: the critic "
            "then learns that more would have followed. If the game is over then, show the time left.",
            p,
        )


def _shows_end(evidence: Evidence, longest: int) -> bool:
    """Return whether the last observation tells that the episode ends: then it is a rule of the game, not a clock."""
    rows = evidence.columns["step"] >= longest - _LAST
    values = np.hstack(list(evidence.blocks.values()) or [np.zeros((len(evidence), 0))])[rows].astype(np.float64)
    values = values[:, values.std(axis=0) > 0]
    if values.shape[1] > _READ:
        values = values[:, np.random.default_rng(0).choice(values.shape[1], _READ, replace=False)]
    is_last = (evidence.columns["step"][rows] == longest - 1)[:, None].astype(np.float64)
    missed = is_last - predict_each(expand(values, 64), is_last, evidence.episodes[rows])[0]
    return bool((missed**2).mean() < _UNKNOWN * is_last.var())


def _split_rewards(evidence: Evidence) -> tuple[float, float, float]:
    """Return the rewards between which 99 of 100 steps inside of episodes pay, with the median in the middle."""
    inner = evidence.columns["reward"][evidence.has_next & (evidence.columns["step"] > 0)]
    low, usual, high = np.quantile(inner, [0.005, 0.5, 0.995]) if len(inner) else (0.0, 0.0, 0.0)
    return float(low), float(usual), float(high)


def find_unpaid_ends(evidence: Evidence) -> Claims:
    """Find a place where episodes are terminated without the reward that other ends have."""
    rewards, ended = evidence.columns["reward"], evidence.ends == "terminated"
    low, _, high = _split_rewards(evidence)
    paid = ended & ((rewards < low) | (rewards > high))
    plain = ended & ~paid
    if min(plain.sum(), paid.sum()) < _EPISODES or low == high or not 0 < len(evidence.features) <= FEW:
        return
    # The last observation before an end lies just within the place, so the bound is a quantile of these.
    candidates = []
    for name, values in evidence.features.items():
        for side, bound in ((1, np.quantile(values[plain], 0.1)), (-1, np.quantile(values[plain], 0.9))):
            inside = side * values >= side * bound
            counts = [[(mask & where).sum() for mask in (plain, paid)] for where in (inside, ~inside)]
            # Ends there are plain more often than elsewhere, and steps there end more often.
            often = stats.binom.sf(counts[0][0] - 1, plain.sum(), inside.mean())
            candidates.append((float(max(stats.fisher_exact(counts).pvalue, often)), name, side, bound, inside))
    p, name, side, bound, inside = min(candidates, key=lambda one: one[0])
    yield Claim(
        "episode",
        plain & inside,
        f"Episodes end where {name} {'≥' if side > 0 else '≤'} {bound:.3g}, and nothing rewards or punishes it: "
        f"{(plain & inside).sum():,} of {ended.sum():,} ends",
        f"In all, {plain.sum():,} ends pay {np.median(rewards[plain]):.2g}, as any step does; the other "
        f"{paid.sum():,} pay {np.median(rewards[paid]):.3g}, as hardly any step does. "
        + say_chance(p * len(candidates)),
        f"Check the rule that terminates episodes by {name}; if it is meant, let such an end pay what it is worth.",
        p * len(candidates),
    )


def find_paid_again(evidence: Evidence) -> Claims:
    """Find an unusual last reward that the first step of the next episode has, too."""
    rewards, env, steps = (evidence.columns[name] for name in ("reward", "env_index", "step"))
    low, usual, high = _split_rewards(evidence)
    last = np.flatnonzero((evidence.ends[:-1] != "") & (env[1:] == env[:-1]) & (steps[1:] == 0))
    inner = rewards[evidence.has_next & (steps > 0)]
    is_rare = (rewards[last] < low) | (rewards[last] > high)
    # A rare last reward stands out against all steps, any other against the first steps after other ends.
    for chosen, others in ((last[is_rare], inner), (last[rewards[last] != usual], rewards[last + 1])):
        if len(chosen) < _EPISODES or not len(inner):
            continue
        # Nearer to the last reward than to the usual one; by chance, as often as others are.
        halfway, is_gain = (rewards[chosen] + usual) / 2, rewards[chosen] > usual
        is_near = np.where(is_gain, rewards[chosen + 1] > halfway, rewards[chosen + 1] < halfway)
        below = np.searchsorted(np.sort(others), halfway) / len(others)
        usually = max(float(np.where(is_gain, 1 - below, below).mean()), 1 / len(others))
        p, mask = float(stats.binom.sf(is_near.sum() - 1, len(chosen), usually)), np.zeros(len(evidence), dtype=bool)
        if is_near.mean() < 0.5 or p > CHANCE / 2:
            continue
        mask[chosen[is_near] + 1] = True
        yield Claim(
            "reward",
            mask,
            "The last reward of an episode is paid again at the first step of the next: after "
            f"{is_near.sum():,} of {len(chosen):,} ends that pay something else than most steps",
            f"These first steps pay {np.median(rewards[mask]):.3g}, a usual step {usual:.2g}. {say_chance(2 * p)}",
            "Clear what the environment or a wrapper remembers of the reward in `reset()`.",
            2 * p,
        )
        return


def find_constant(evidence: Evidence) -> Claims:
    """Find parts of the observation that never change while others do, in all environments or in one."""
    copies, episodes = evidence.columns["env_index"], evidence.episodes
    joined = copies[1:] == copies[:-1]
    moves = {name: (each[1:] != each[:-1]).any(axis=1) & joined for name, each in evidence.blocks.items()}
    if not 2 <= len(moves) <= FEW or len(evidence) < _LEAST_RECORDS:
        return
    is_most = 2 * sum(is_moving.any() for is_moving in moves.values()) >= len(moves)
    names, place = np.unique(copies, return_inverse=True)
    lived = np.bincount(place[np.unique(episodes, return_index=True)[1]])
    for name, is_moving in moves.items():
        advice = f"Check that {name} is filled in at each step. If it is constant on purpose, leave it out."
        claims: list[tuple[float | None, float | None]] = [(None, None)] if is_most else []
        if is_moving.any():
            # The chance that no episode there shows a change, by the share of the others' episodes that do.
            still = np.setdiff1d(np.arange(len(names)), place[1:][is_moving])
            moving = len(np.unique(episodes[1:][is_moving])) / (lived.sum() - lived[still])
            chances = (1 - moving) ** lived[still] * len(moves) * len(names)
            surest = np.sort(np.argsort(chances, kind="stable")[:_MOST])
            claims = [(float(names[still[at]]), float(chances[at])) for at in surest]
        for copy, p in claims:
            inside = np.ones(len(evidence), dtype=bool) if copy is None else copies == copy
            value = evidence.blocks[name][inside][0]
            where = "" if copy is None else f" of environment {copy:.0f}"
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
