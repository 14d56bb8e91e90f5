"""What is wrong with an environment: a copy that is unlike the others, and rewards that are collected in loops."""

import numpy as np
from scipy import stats

from whence.findings.evidence import FEW, Evidence, Mask, Numbers
from whence.findings.finding import Claim, Claims, say_chance

_EPISODES = 8
"""Episodes that a statement on episodes needs on either side."""


def find_odd_copies(evidence: Evidence) -> Claims:
    """Find the environment with the surest difference in rewards, lengths of episodes or observations from the others.

    Environments that are trained in side by side share the policy, so all that differs is of the environment.
    """
    count, copies = np.bincount(evidence.episodes), np.unique(evidence.columns["env_index"])
    copy_of = evidence.columns["env_index"][np.unique(evidence.episodes, return_index=True)[1]]
    is_whole = np.bincount(evidence.episodes, (evidence.columns["step"] == 0) | (evidence.ends != "")) == 2
    rewards = np.abs(evidence.columns["reward"])
    totals, paid = (np.bincount(evidence.episodes, column) for column in (rewards, rewards > 0))
    sizes = {"The size of rewards": totals / count}
    # Where most episodes pay nothing, means over them hide it.
    sizes["The size of rewards other than 0"] = np.where(paid > 0, totals / np.maximum(paid, 1), np.nan)
    sizes["The length of episodes"] = np.where(is_whole, count, np.nan)
    for name, values in evidence.features.items() if len(evidence.features) <= FEW else ():
        sizes[f"The size of {name}"] = np.bincount(evidence.episodes, np.abs(values - np.median(values))) / count
    results = []
    for name, values in sizes.items():
        known = np.isfinite(values)
        if (copy := _find_oddest(values[known], copy_of[known])) is not None:
            here, others = values[known & (copy_of == copy)], values[known & (copy_of != copy)]
            p = stats.mannwhitneyu(here, others).pvalue * len(copies) * len(sizes)
            results.append((p, name, copy, here.mean() / max(others.mean(), 1e-12)))
    for p, name, copy, ratio in sorted(results)[:1]:
        yield Claim(
            "reward" if "reward" in name else "episode" if "episode" in name else "observation",
            evidence.columns["env_index"] == copy,
            f"{name} in environment {copy:.0f} is {ratio:.3g} times that in the other {len(copies) - 1}",
            "Environments that share a policy have their means over episodes in common. "
            + say_chance(p, "environments and numbers"),
            f"Compare how environment {copy:.0f} is made with the others: its arguments and its wrappers.",
            float(p),
        )


def _find_oddest(values: Numbers, copy_of: Numbers) -> float | None:
    """Return the environment whose values differ surest from the others', by ranks, of those that differ enough.

    All environments are measured at once: one after the other, thousands would take as many passes over the episodes.

    Args:
        values: a number of each episode.
        copy_of: the environment of each episode.
    """
    copies, place, sizes = np.unique(copy_of, return_inverse=True, return_counts=True)
    others, totals = len(values) - sizes, np.bincount(place, values)
    means, rest = totals / sizes, (totals.sum() - totals) / np.maximum(others, 1)
    # What differs by less than twice or half hardly changes what is learned.
    is_odd = (np.minimum(sizes, others) >= _EPISODES) & ((means < rest / 2) | (means > 2 * rest))
    # Mann and Whitney's U, less its mean, in its standard deviations, without ties.
    middle, spread = (len(values) + 1) / 2, np.sqrt(np.maximum(sizes * others, 1) * (len(values) + 1) / 12)
    z = np.abs(np.bincount(place, stats.rankdata(values)) - sizes * middle) / spread
    return float(copies[np.argmax(np.where(is_odd, z, -1))]) if is_odd.any() else None


def _split_rewards(evidence: Evidence) -> tuple[float, float, float]:
    """Return the rewards between which 99 of 100 steps inside of episodes pay, with the median in the middle."""
    inner = evidence.columns["reward"][evidence.has_next & (evidence.columns["step"] > 0)]
    low, usual, high = np.quantile(inner, [0.005, 0.5, 0.995]) if len(inner) else (0.0, 0.0, 0.0)
    return float(low), float(usual), float(high)


def find_loops(evidence: Evidence) -> Claims:
    """Find rewards that are collected again at a place where the episode was paid, by which not ending pays more."""
    rewards, steps = evidence.columns["reward"], evidence.columns["step"]
    # Episodes that were read from their first step. A goal pays more than nearly any step, before the time is over.
    is_last = (evidence.ends != "") & (np.bincount(evidence.episodes)[evidence.episodes] == steps + 1)
    reached = is_last & (evidence.ends != "truncated") & (steps < steps.max()) & (rewards > _split_rewards(evidence)[2])
    runs_on = is_last & ~reached & (steps >= 0.9 * steps.max())
    if min(reached.sum(), runs_on.sum()) < _EPISODES or not evidence.state.shape[1]:
        return
    totals = np.bincount(evidence.episodes, rewards)
    with_end, without = totals[evidence.episodes[reached]], totals[evidence.episodes[runs_on]]
    p = float(stats.mannwhitneyu(without, with_end, alternative="greater").pvalue)
    inside = np.isin(evidence.episodes, evidence.episodes[runs_on])
    again = inside & _is_paid_again(evidence)
    share = float(rewards[again].sum() / max(rewards[inside & (rewards > 0)].sum(), 1e-12))
    if share >= 0.5:
        yield Claim(
            "reward",
            again,
            f"A reward of {np.median(rewards[again]):.2g} is collected again and again at the same place: episodes "
            f"without an end earn {np.median(without):.3g}, those that reach it {np.median(with_end):.3g}",
            f"In {runs_on.sum():,} episodes that run to the limit, {share:.0%} of the gains are paid where the episode "
            f"was paid before. {say_chance(p)}",
            "Pay for progress once, or by a difference of potentials, so that going round in a loop earns nothing.",
            p,
        )


def _is_paid_again(evidence: Evidence) -> Mask:
    """Return whether each record pays a gain where its episode had one: states alike to half a standard deviation."""
    places = np.column_stack([evidence.episodes, np.round(2 * evidence.state)]).astype(np.int64)
    paid = np.flatnonzero(evidence.columns["reward"] > 0)
    again = np.zeros(len(evidence), dtype=bool)
    again[paid] = True
    again[paid[np.unique(places[paid], axis=0, return_index=True)[1]]] = False
    return again
