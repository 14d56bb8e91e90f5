"""What is wrong with an environment: one that is unlike the others, and how episodes end and pay."""

import numpy as np

from whence.findings.evidence import FEW, Evidence, Mask
from whence.findings.finding import Finding, make_finding, say_chance

_EPISODES = 8
"""Episodes that a statement on episodes needs on either side."""

_SHORTEST = 20
"""Steps below which a fixed length is more likely a rule of the game than a time limit."""


def find_odd_copies(evidence: Evidence) -> list[Finding]:
    """Find an environment with other rewards, lengths of episodes or observations than the others.

    Environments that are trained in side by side share the policy, so all that differs is of the environment.
    """
    from scipy import stats  # loaded where it is used: other commands need none

    copies = np.unique(evidence.columns["env_index"])
    if len(copies) < 2:
        return []
    first = np.unique(evidence.episodes, return_index=True)[1]
    count, copy_of = np.bincount(evidence.episodes), evidence.columns["env_index"][first]
    is_whole = np.bincount(evidence.episodes, (evidence.columns["step"] == 0) | (evidence.ends != "")) == 2
    sizes = {"The size of rewards": np.bincount(evidence.episodes, np.abs(evidence.columns["reward"])) / count}
    if is_whole.sum() >= _EPISODES * len(copies):
        sizes["The length of episodes"] = np.where(is_whole, count, np.nan)
    for name, values in evidence.features.items() if len(evidence.features) <= FEW else ():
        sizes[f"The size of {name}"] = np.bincount(evidence.episodes, np.abs(values - np.median(values))) / count
    results = []
    for name, values in sizes.items():
        for copy in copies:
            here, others = (values[mask & np.isfinite(values)] for mask in (copy_of == copy, copy_of != copy))
            if min(len(here), len(others)) < _EPISODES:
                continue
            ratio = here.mean() / others.mean() if others.mean() else np.inf
            p = float(stats.mannwhitneyu(here, others).pvalue) * len(copies) * len(sizes)
            # What differs by less hardly changes what is learned.
            if not 0.5 <= ratio <= 2:
                results.append((p, name, copy, ratio))
    if not results:
        return []
    p, name, copy, ratio = min(results)
    return [
        make_finding(
            "reward" if "reward" in name else "episode" if "episode" in name else "observation",
            evidence,
            evidence.columns["env_index"] == copy,
            title=f"{name} in environment {copy:.0f} is {ratio:.3g} times that in the other {len(copies) - 1}",
            because="Means of episodes, which environments that share a policy have in common. By chance: "
            f"{say_chance(p)}, over all that was compared.",
            advice=f"Compare how environment {copy:.0f} is made with the others: its arguments and its wrappers.",
            p=p,
        )
    ]


def find_limit_as_end(evidence: Evidence) -> list[Finding]:
    """Find a time limit that is reported as an end: many episodes "terminated" after the same, the largest, number."""
    from scipy import stats  # loaded where it is used: other commands need none

    steps, ended = evidence.columns["step"], evidence.ends == "terminated"
    longest = int(steps.max()) + 1
    at_limit, near = (steps + 1 == longest) & ended, (steps + 1 >= 0.9 * longest) & (steps + 1 < longest) & ended
    if longest < _SHORTEST or at_limit.sum() < _EPISODES:
        return []
    # Ends that may come at any step come as often at each of the last tenth.
    tenth = longest - int(np.ceil(0.9 * longest)) + 1
    p = float(stats.binom.sf(at_limit.sum() - 1, at_limit.sum() + near.sum(), 1 / tenth))
    return [
        make_finding(
            "episode",
            evidence,
            at_limit,
            title=f"A time limit is reported as an end: {at_limit.sum():,} episodes are terminated after exactly "
            f"{longest} steps, {at_limit.sum() / ended.sum():.0%} of those that end",
            because=f"No episode is longer, and {near.sum():,} end in the tenth before that, where ends at any step "
            f"would spread. By chance: {say_chance(p)}.",
            advice="Return `truncated=True`, not `terminated=True`, at the limit, as Gymnasium's `TimeLimit` does: the "
            "critic then learns that more would have followed. If the game is over then, show the time left.",
            p=p,
        )
    ]


def find_unpaid_ends(evidence: Evidence) -> list[Finding]:
    """Find a place where episodes are terminated without the reward that other ends have."""
    from scipy import stats  # loaded where it is used: other commands need none

    rewards, ended = evidence.columns["reward"], np.isin(evidence.ends, ["terminated", "ended"])
    inner = rewards[evidence.has_next]
    if not len(inner) or len(evidence.features) > FEW:
        return []
    low, high = np.quantile(inner, [0.005, 0.995])  # as 99 of 100 steps do
    plain, paid = ended & (rewards >= low) & (rewards <= high), ended & ((rewards < low) | (rewards > high))
    if min(plain.sum(), paid.sum()) < _EPISODES or low == high:
        return []
    # The last observation before an end lies just within the place, so the bound is a quantile of these.
    candidates = []
    for name, values in evidence.features.items():
        for side, bound in ((1, np.quantile(values[plain], 0.1)), (-1, np.quantile(values[plain], 0.9))):
            inside = side * values >= side * bound
            there, ends = (plain & inside).sum(), (ended & inside).sum()
            # That ends there are plain more often than elsewhere, and that steps there end more often.
            p = stats.fisher_exact([[there, ends - there], [plain.sum() - there, paid.sum() - (ends - there)]]).pvalue
            often = stats.binom.sf(there - 1, plain.sum(), inside.mean())
            candidates.append((float(max(p, often)), name, side, bound, inside))
    p, name, side, bound, inside = min(candidates, key=lambda one: one[0])
    p *= len(candidates)
    return [
        make_finding(
            "episode",
            evidence,
            plain & inside,
            title=f"Episodes end early where {name} {'≥' if side > 0 else '≤'} {bound:.3g}: "
            f"{plain.sum() / ended.sum():.0%} of all ends, without the reward of the other ends",
            because=f"These {plain.sum():,} ends pay {np.median(rewards[plain]):.2g} as any step does; the other "
            f"{paid.sum():,} pay {np.median(rewards[paid]):.3g}, as hardly any step does. By chance: {say_chance(p)}.",
            advice=f"Check the rule that terminates episodes by {name}.",
            p=p,
        )
    ]


def find_paid_again(evidence: Evidence) -> list[Finding]:
    """Find an unusual last reward that the first step of the next episode has, too."""
    from scipy import stats  # loaded where it is used: other commands need none

    rewards, env = evidence.columns["reward"], evidence.columns["env_index"]
    last = np.flatnonzero((evidence.ends[:-1] != "") & (env[1:] == env[:-1]) & (evidence.columns["step"][1:] == 0))
    inner = np.sort(rewards[evidence.has_next & (evidence.columns["step"] > 0)])
    if not len(inner):
        return []
    low, usual, high = np.quantile(inner, [0.005, 0.5, 0.995])  # as 99 of 100 steps pay
    last = last[(rewards[last] < low) | (rewards[last] > high)]
    if len(last) < _EPISODES:
        return []
    # Nearer to the last reward than to the usual one; by chance, as often as other steps are.
    halfway = (rewards[last] + usual) / 2
    is_near = np.where(rewards[last] > usual, rewards[last + 1] > halfway, rewards[last + 1] < halfway)
    below = np.searchsorted(inner, halfway) / len(inner)
    by_chance = max(float(np.where(rewards[last] > usual, 1 - below, below).mean()), 1 / len(inner))
    p = float(stats.binom.sf(is_near.sum() - 1, len(last), by_chance))
    if is_near.mean() < 0.5:
        return []
    mask = np.zeros(len(evidence), dtype=bool)
    mask[last[is_near] + 1] = True
    return [
        make_finding(
            "reward",
            evidence,
            mask,
            title="The last reward of an episode is paid again at the first step of the next: after "
            f"{is_near.sum():,} of {len(last):,} ends that pay what few steps do",
            because=f"These first steps pay {np.median(rewards[last[is_near] + 1]):.3g}, a usual step {usual:.2g}. By "
            f"chance: {say_chance(p)}.",
            advice="Clear what the environment or a wrapper remembers of the reward in `reset()`.",
            p=p,
        )
    ]


def find_loops(evidence: Evidence) -> list[Finding]:
    """Find rewards that are collected again at a place where the episode was paid, by which not ending pays more."""
    from scipy import stats  # loaded where it is used: other commands need none

    rewards, steps = evidence.columns["reward"], evidence.columns["step"]
    length, is_last = np.bincount(evidence.episodes), evidence.ends != ""
    is_last &= length[evidence.episodes] == steps + 1  # Episodes that were read from their first step.
    totals, usual = np.bincount(evidence.episodes, rewards), rewards[evidence.has_next]
    # A goal pays more than nearly any step, or ends an episode before its time.
    reached = is_last & (evidence.ends != "truncated") & (steps < steps.max()) & (rewards > np.quantile(usual, 0.99))
    runs_on = is_last & ~reached & (steps >= 0.9 * steps.max())
    if min(reached.sum(), runs_on.sum()) < _EPISODES or not evidence.state.shape[1]:
        return []
    with_end, without = totals[evidence.episodes[reached]], totals[evidence.episodes[runs_on]]
    p = float(stats.mannwhitneyu(without, with_end, alternative="greater").pvalue)
    inside = np.isin(evidence.episodes, evidence.episodes[runs_on])
    again = inside & _is_paid_again(evidence)
    share = float(rewards[again].sum() / max(rewards[inside & (rewards > 0)].sum(), 1e-12))
    if share < 0.5 or p > 0.05:
        return []
    return [
        make_finding(
            "reward",
            evidence,
            again,
            title=f"A reward of {np.median(rewards[again]):.2g} is collected again and again at the same place: "
            f"episodes without an end earn {np.median(without):.3g}, those that reach it {np.median(with_end):.3g}",
            because=f"In {runs_on.sum():,} episodes that run to the limit, {share:.0%} of the gains are paid where the "
            f"episode was paid before. That these earn more: {say_chance(p)} by chance.",
            advice="Pay for progress once, or by a difference of potentials, so that going round in a loop earns "
            "nothing.",
            p=p,
        )
    ]


def _is_paid_again(evidence: Evidence) -> Mask:
    """Return whether each record pays a gain where its episode had one: states alike to half a standard deviation."""
    places = np.column_stack([evidence.episodes, np.round(2 * evidence.state)]).astype(np.int64)
    codes = np.unique(places, axis=0, return_inverse=True)[1].ravel()
    paid = np.flatnonzero(evidence.columns["reward"] > 0)
    again = np.zeros(len(evidence), dtype=bool)
    again[paid] = True
    again[paid[np.unique(codes[paid], return_index=True)[1]]] = False
    return again
