"""What is wrong with episodes: how they end, how long they are, and what their first steps pay."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from whence.findings.detectors.models import expand
from whence.findings.detectors.observations import compare_firsts, has_few_states, identify, select_commonest
from whence.findings.evidence import Evidence, Numbers
from whence.findings.finding import CHANCE, CannotTellError, Sight

_SHORTEST = 20
"""Steps below which a fixed length is more likely a rule of the game than a time limit."""

_LAST, _READ = 5, 256
"""Steps before a fixed length, and numbers of their observations, that are looked at for a sign of the end."""

_EPISODES, _ENDS = 8, 32
"""Episodes that a statement needs at least, and those that a model of ends does."""

_OTHERS = 10_000
"""Steps that do not end an episode which those that do are compared with."""

_WIDTH, _RIDGE = 64, 1e-3

_PASSES = 8
"""Of taking off means, in turn: unequal numbers of episodes leave less than a hundredth."""


def look_at_limit(evidence: Evidence) -> Sight:
    """Compare ends at exactly the largest length with those before, where a limit is registered to truncate."""
    if not evidence.config.get("max_episode_steps"):
        raise CannotTellError("no time limit is registered")
    return _compare_longest(evidence)


def look_at_fixed_length(evidence: Evidence) -> Sight:
    """Compare ends at exactly the largest length with those before, where no limit is registered.

    A fixed length may then be a rule of the game.
    """
    if evidence.config.get("max_episode_steps"):
        raise CannotTellError("a time limit is registered")
    return _compare_longest(evidence)


def _compare_longest(evidence: Evidence) -> Sight:
    """Compare how many episodes are terminated at exactly the largest length with those before: in decades.

    Times the share of that which the observation leaves open: a game that shows its clock may end by it.
    """
    _require_ends(evidence)
    lengths, ended = evidence.columns["step"] + 1, evidence.ends == "terminated"
    longest = int(evidence.last_step) + 1
    at_limit, near = (lengths == longest) & ended, (lengths >= 0.9 * longest) & (lengths < longest) & ended
    if longest < _SHORTEST or at_limit.sum() < _EPISODES:
        return Sight(0.0)
    # Ends that may come at any step come as often at each of the last tenth.
    expected = near.sum() / max(1, longest - int(np.ceil(0.9 * longest)))
    rows = np.flatnonzero(evidence.columns["step"] >= longest - _LAST)
    is_last = (evidence.columns["step"][rows] == longest - 1).astype(np.float64)
    missed = is_last - _predict(_read_numbers(evidence, rows), is_last, evidence.episodes[rows])
    limit = evidence.config.get("max_episode_steps")
    what = "A time limit" if limit == longest else "A fixed length, as of a time limit,"
    registered = f"; the registered limit is {limit} steps" if limit and limit != longest else ""
    hidden = min(1.0, float((missed**2).mean()) / max(float(is_last.var()), 1e-9))
    return Sight(
        max(0.0, float(np.log10(at_limit.sum() / (1 + expected)))) * hidden,
        "episode",
        f"{what} is reported as an end: {at_limit.sum():,} episodes are terminated after exactly {longest} "
        f"steps, {at_limit.sum() / ended.sum():.0%} of those that end",
        f"No episode is longer, {near.sum():,} end in the tenth before that, and {hidden:.0%} of whether a step is the "
        f"last cannot be seen in the observation{registered}.",
        "Return `truncated=True`, not `terminated=True`, at the limit, as Gymnasium's `TimeLimit` does: the critic "
        "then learns that more would have followed. If the game is over then, show the time left.",
        at_limit,
    )


def _require_ends(evidence: Evidence) -> None:
    """Raise where no episode is known to end, as if the loop did not say so."""
    if not (evidence.ends != "").any():
        raise CannotTellError("no end of an episode is known")


def look_at_unforeseen_ends(evidence: Evidence) -> Sight:
    """Measure the share of ends, before the largest length, that come where steps that do not end come, too.

    By a model of ends from the observation and the action, on episodes that it was not fitted on, ends that nothing
    foresees rank as any step: half of them in the lower half.
    """
    steps = evidence.columns["step"]
    ends = np.flatnonzero((evidence.ends == "terminated") & (steps < evidence.last_step))
    others = np.flatnonzero(evidence.has_next)[:: max(1, evidence.has_next.sum() // _OTHERS)]
    if has_few_states(evidence) or select_commonest(evidence).mean() > 0.5:
        raise CannotTellError("observations are of few states, or hardly vary")
    if len(ends) < _ENDS or not len(others):
        raise CannotTellError("too few episodes end")
    rows, is_end = np.append(ends, others), np.repeat([1.0, 0.0], [len(ends), len(others)])
    inputs = np.hstack([_read_numbers(evidence, rows), evidence.acting[rows]])
    weights = np.where(is_end > 0, len(others) / len(ends), 1.0)
    scores = _predict(inputs, is_end, evidence.episodes[rows], weights)
    low, middle = scores[is_end > 0], float(np.median(scores[is_end == 0]))
    share = min(1.0, 2 * float((low < middle).mean() + (low == middle).mean() / 2))
    return Sight(
        share,
        "episode",
        f"Episodes end early without a sign: {share:.0%} of {len(ends):,} ends come at random, where other steps do "
        "not end",
        "A model of ends by the observation and the action ranks them as any step.",
        "Check what sets `terminated`: chance, or something that the observation does not show.",
        np.isin(np.arange(len(evidence)), ends[low <= middle]),
    )


def look_at_equal_starts(evidence: Evidence) -> Sight:
    """Compare how many pairs of episodes start alike within an environment and between two: in decades."""
    starts = np.flatnonzero(evidence.columns["step"] == 0)
    copies = np.unique(evidence.columns["env_index"][starts], return_inverse=True)[1]
    ids = np.unique(identify(evidence, of_few=True)[starts], return_inverse=True)[1]

    def count(numbers: Int[np.ndarray, " n"]) -> float:
        """Return how many pairs are alike in a number."""
        return float((np.bincount(numbers) * (np.bincount(numbers) - 1.0)).sum() / 2)

    pairs, within = count(copies), count(copies * (ids.max(initial=0) + 1) + ids)
    if not pairs or not (between := len(starts) * (len(starts) - 1) / 2 - pairs):
        raise CannotTellError("there is one environment, or none was reset twice")
    expected = pairs * (count(ids) - within) / between
    return Sight(
        float(max(0.0, np.log10((within + 1) / (expected + 1)))),
        "episode",
        f"Episodes of an environment start with the same observation: {within / pairs:.0%} of pairs within an "
        f"environment, {expected / pairs:.1%} of pairs of two",
        "Environments are alike, so that starts are as often equal between them.",
        "Pass a seed to the first `reset` alone: each one with a seed plays the same episode again.",
    )


def look_at_short_episodes(evidence: Evidence) -> Sight:
    """Compare episodes of one or two steps in a row with the others: by their number and their length, in decades."""
    _require_ends(evidence)
    first, counts = np.unique(evidence.episodes, return_index=True, return_counts=True)[1:]
    order = np.argsort(first)
    first, counts = first[order], counts[order]
    copies, ends = evidence.columns["env_index"][first], evidence.ends[first + counts - 1]
    is_short = (counts <= 2) & (ends == "terminated")
    edges = np.flatnonzero(np.append(True, (is_short[1:] != is_short[:-1]) | (copies[1:] != copies[:-1])))
    sizes = np.diff(np.append(edges, len(counts))) * is_short[edges]
    at, many = int(edges[sizes.argmax()]), int(sizes.max())
    if not many or is_short.all():
        return Sight(0.0)
    usual = float(np.median(counts[~is_short]))
    return Sight(
        float(min(np.log10(many), np.log10(usual))),
        "episode",
        f"Episodes shrink to one or two steps: {many:,} one after the other in environment {copies[at]:.0f}, where "
        f"others have {usual:.0f}",
        "They are terminated at their first or second step.",
        "Check that `reset` clears what `terminated` is computed of.",
        np.isin(np.arange(len(evidence)), np.arange(first[at], first[at] + counts[at : at + many].sum())),
    )


def look_at_paid_again(evidence: Evidence) -> Sight:
    """Measure what first rewards have of the last one of the episode before: the variance without it, in decades.

    Before an environment's first episode nothing was paid. Means of environments and of rounds are taken off, since a
    policy's drift moves both rewards; of the correlation, what is beyond chance counts.
    """
    rewards, rounds, env, steps = (evidence.columns[name] for name in ("reward", "round", "env_index", "step"))
    starts = np.flatnonzero((steps == 0) & (evidence.ends == ""))  # a single step is paid for its end
    follows = (starts > 0) & (env[starts - 1] == env[starts]) & (rounds[starts] - rounds[starts - 1] <= 1)
    is_known = np.where(follows, evidence.ends[starts - 1] != "", rounds[starts] == rounds.min())
    starts, follows = starts[is_known], follows[is_known]
    groups = [np.unique(each[starts], return_inverse=True)[1] for each in (env, rounds)]
    freedom = len(starts) - sum(len(np.unique(group)) for group in groups)
    if min(follows.sum() - _EPISODES, freedom) < _EPISODES:
        raise CannotTellError("too few episodes follow one another")
    last, first = (_center(each, groups) for each in (np.where(follows, rewards[starts - 1], 0.0), rewards[starts]))
    least = 1e-6 * np.abs(rewards).max()
    if last.std() <= least:
        raise CannotTellError("all episodes of a round end with the same reward")
    r = float(np.corrcoef(last, first)[0, 1]) if first.std() > least else 0.0
    sure = max(0.0, float(np.tanh(np.arctanh(min(r, 1 - 1e-12)) - stats.norm.isf(CHANCE) / np.sqrt(freedom))))
    return Sight(
        float(np.log10(1 / (1 - sure**2))),
        "reward",
        "The last reward of an episode is paid again at the first step of the next, "
        f"{first @ last / (last @ last):.2g} times: {r**2:.0%} of how first rewards vary",
        f"In {follows.sum():,} episodes that follow another; a first reward has nothing to do with the one before.",
        "Clear what the environment or a wrapper remembers of the reward in `reset()`.",
        np.isin(np.arange(len(evidence)), starts[follows]),
    )


def look_at_first_rewards(evidence: Evidence) -> Sight:
    """Compare how many episodes' first reward is exactly 0, as where rewards are late, with later ones: in decades."""
    is_first, is_nothing = evidence.columns["step"] == 0, evidence.columns["reward"] == 0
    count, late = int(is_first.sum()), int((is_first & is_nothing).sum())
    if count < _EPISODES or is_first.all():
        raise CannotTellError("there are few episodes of more than one step")
    usual = float(is_nothing[~is_first].mean())
    return Sight(
        compare_firsts(late, count, usual),
        "reward",
        f"Rewards look late by a step or more: the first one of {late:,} of {count:,} episodes is 0",
        f"Of later rewards {usual:.2%} are 0.",
        "Return the reward of the action that `step` was given, not the one before it. If the first step earns "
        "nothing by the rules, all is well.",
        is_first & is_nothing,
    )


def _center(values: Numbers, groups: Sequence[Int[np.ndarray, " n"]]) -> Numbers:
    """Return values less the means of groups, of several kinds in turn."""
    for group in [*groups] * _PASSES:
        values = values - (np.bincount(group, values) / np.bincount(group))[group]
    return values


def _read_numbers(evidence: Evidence, rows: Int[np.ndarray, " k"]) -> Float[np.ndarray, "k d"]:
    """Return the numbers of some observations that are not all equal; of many, some drawn at random."""
    if not evidence.blocks:
        raise CannotTellError("observations are not stored")
    values = np.hstack([block[rows] for block in evidence.blocks.values()]).astype(np.float64)
    values = values[:, values.std(axis=0) > 0]
    if values.shape[1] > _READ:
        values = values[:, np.random.default_rng(0).choice(values.shape[1], _READ, replace=False)]
    return values


def _predict(
    inputs: Float[np.ndarray, "n d"], targets: Numbers, groups: Int[np.ndarray, " n"], weights: Numbers | float = 1.0
) -> Numbers:
    """Return what ridge regression on the episodes of the other half predicts."""
    basis, half, predictions = expand(inputs, _WIDTH), groups % 2 == 0, np.full(len(targets), targets.mean())
    weighted = basis * np.broadcast_to(weights, len(targets))[:, None]
    for train in (half, ~half):
        if train.any() and not train.all():
            gram = weighted[train].T @ basis[train]
            gram[np.diag_indices_from(gram)] += _RIDGE * gram[0, 0]
            predictions[~train] = basis[~train] @ np.linalg.solve(gram, weighted[train].T @ targets[train])
    return predictions
