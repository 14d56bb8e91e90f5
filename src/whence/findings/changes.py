"""What changes from some round on: rewards, observations and the lengths of episodes, beyond what learning does."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from whence.findings.evidence import Evidence, Features, Numbers
from whence.findings.finding import CHANCE, CannotTellError, Sight

_LEAST, _MOST = 8, 32
"""Stretches of time: with fewer, a jump has too few others near it to be compared with; with more, each is too short
where rounds are small. Episodes before and after a jump at least, for a word on how they begin."""

_NEAR = 6
"""Jumps before and after one that it is compared with: learning is fast at first and slow later."""

_EARLIER = 2
"""Jumps before one at least: learning is fastest at first, so that the first jump is often the largest."""

_LEVELS = 128
"""Levels of a number at which its distribution is compared."""

_CHANCE = 1.36
"""Jumps of a distribution below this, over √n, are of chance (Kolmogorov and Smirnov's 5% point)."""

_WIDEST = 64
"""Numbers of an observation that are looked at one by one: all, in a second."""


class _Jump(NamedTuple):
    """Between two stretches of time: how much larger it is than those near it, in doublings, and its number."""

    doublings: float
    after: int


def look_at_rewards(evidence: Evidence) -> Sight:
    """Find the round at which rewards jump: in doublings of the largest jump near it."""
    rewards = evidence.columns["reward"]
    return _look(evidence, {"The reward": rewards}, "reward", "Compare what is paid before that round and after it.")


def look_at_observations(evidence: Evidence) -> Sight:
    """Find the round at which a number of the observation jumps: in doublings of the largest jump near it."""
    advice = "Compare what fills it in before that round and after it: its unit, its offset, its source."
    return _look(evidence, name_features(evidence), "observation", advice)


def name_features(evidence: Evidence) -> Features:
    """Return the observation's numbers by what a sentence calls them; `CannotTellError` of none or too many."""
    if not 0 < len(evidence.features) <= _WIDEST:
        raise CannotTellError("the observation has too many numbers" if evidence.features else "it is not known")
    entries = evidence.blocks
    return {f"The observation's {'entry ' * (key in entries)}{key}": x for key, x in evidence.features.items()}


def look_at_lengths(evidence: Evidence) -> Sight:
    """Find the round at which episodes become longer or shorter: in doublings of the largest jump near it."""
    steps = {"The length of episodes, by the step that records are at,": evidence.columns["step"]}
    return _look(evidence, steps, "episode", "Look for a rule that ends episodes, or no longer does, from then on.")


def _look(evidence: Evidence, numbers: Features, kind: str, advice: str) -> Sight:
    time = _divide_time(evidence)
    middles = np.bincount(time, evidence.columns["round"]) / np.bincount(time)
    jumps = {}
    for name, values in numbers.items():
        each = sorted(_measure_jumps(values, time, np.diff(middles)), reverse=True)
        # What a policy seeks out may change, but not where its episodes begin.
        seen = (one for one in each if kind != "observation" or _do_starts_differ(values, evidence, time, one.after))
        jumps[name] = next(seen, _Jump(0.0, 1))
    name = max(jumps, key=lambda each: jumps[each].doublings)
    jump, values = jumps[name], numbers[name]
    before, after = values[time == jump.after - 1], values[time == jump.after]
    first = int(evidence.columns["round"][time == jump.after].min())
    return Sight(
        jump.doublings,
        kind,
        f"{name} changes at round {first}: {before.mean():.3g} ± {before.std():.2g} before it, {after.mean():.3g} ± "
        f"{after.std():.2g} from then on",
        f"The change is {2**jump.doublings:.3g} times the largest one at rounds near it.",
        advice,
        time == jump.after,
    )


def _do_starts_differ(values: Numbers, evidence: Evidence, time: Int[np.ndarray, " n"], after: int) -> bool:
    """Return whether the first observations of episodes change, too; True where they are few or all equal."""
    starts = (evidence.columns["step"] == 0) & (np.abs(time - after + 0.5) < _NEAR)
    before, later = values[starts & (time < after)], values[starts & (time >= after)]
    is_unknown = min(len(before), len(later)) < _LEAST or np.ptp(np.append(before, later)) == 0
    return bool(is_unknown or stats.ks_2samp(before, later).pvalue < CHANCE)


def _divide_time(evidence: Evidence) -> Int[np.ndarray, " n"]:
    """Return the number of each record's stretch of time: a round, or a few of them in a row."""
    rounds, place = np.unique(evidence.columns["round"], return_inverse=True)
    if len(rounds) < _LEAST:
        raise CannotTellError(f"the run has fewer than {_LEAST} rounds")
    return np.asarray(place * min(len(rounds), _MOST) // len(rounds))


def _measure_jumps(values: Numbers, time: Int[np.ndarray, " n"], gaps: Numbers) -> Iterator[_Jump]:
    """Return each jump of a number's distribution, and of its size, against those near it."""
    count = int(time.max()) + 1
    levels = np.unique(np.quantile(values, np.linspace(0, 1, _LEVELS + 1), method="nearest"))
    bins, width = np.searchsorted(levels, values, side="right"), len(levels) + 1
    counts = np.bincount(time * width + bins, minlength=count * width).reshape(count, width)
    totals = counts.sum(axis=1)
    yield from _compare(np.cumsum(counts, axis=1) / totals[:, None], totals, gaps, is_share=True)
    sizes = np.abs(values - np.median(values))
    if (sizes > 0).any():
        logs, time = np.log(sizes[sizes > 0]), time[sizes > 0]
        totals = np.bincount(time, minlength=count)
        means = np.bincount(time, logs, minlength=count) / np.maximum(totals, 1)
        spread = np.sqrt(np.mean((logs - means[time]) ** 2)) + 1e-3  # a size that changes by less is the same
        yield from _compare(means[:, None] / spread, totals, gaps, is_share=False)


def _compare(
    profiles: Float[np.ndarray, "t k"], totals: Int[np.ndarray, " t"], gaps: Numbers, *, is_share: bool
) -> Iterator[_Jump]:
    """Return each lasting jump against those near it that span half as many rounds at least.

    Args:
        profiles: of each stretch of time: its distribution, or a mean in deviations.
        totals: records of each stretch.
        gaps: rounds from each stretch to the next.
        is_share: whether profiles are shares; odds then tell values that never came from those that come more often.
    """

    def measure(distance: int) -> Numbers:
        jumps = np.abs(profiles[distance:] - profiles[:-distance]).max(axis=1)
        fewest = np.maximum(np.minimum(totals[distance:], totals[:-distance]), 1)
        chance = _CHANCE * np.sqrt(2 / fewest)
        both = np.stack([jumps, chance])
        return np.asarray(both / np.maximum(1 - both, 1 / fewest) if is_share else both)

    (jumps, chance), (lasting, _), numbers = measure(1), measure(3), np.arange(len(gaps))
    for at in range(1, len(jumps) - 1):
        apart = np.abs(numbers - at)
        others = (apart > 1) & (apart <= _NEAR) & (2 * gaps >= gaps[at])
        # Learning is fastest at first; and what does not last may be a policy that wanders.
        if others[:at].sum() >= _EARLIER:
            jump = max(min(jumps[at], lasting[at - 1]), 1e-12)
            yield _Jump(max(0.0, float(np.log2(jump / max(jumps[others].max(), chance[at])))), at + 1)
