"""The catalogue of detectors: their names, in the order of causes, and what it takes to matter."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from whence.findings import drops
from whence.findings.detectors import actions, episodes, learning, observations, parts, reward_effects
from whence.findings.drops import LEAST_DEPTH
from whence.findings.evidence import Evidence
from whence.findings.finding import Rank, Sight

Look = Callable[[Evidence], Sight]
"""Returns what is seen of a run, or raises `CannotTellError`."""


class Detector(NamedTuple):
    """What looks at a run.

    Attributes:
        look: returns its statistic, and the words for it.
        least: the statistic from which on what is seen matters to training, however rare it is among healthy runs.
        most: the rank that a finding has at most: what may be meant, or only follows, is no more than unusual.
        is_fact: it stands by itself, as that nothing was ever paid does: it is not compared with healthy runs.
        reads_records: whether it needs records; else metrics and settings, which logs may hold, too.
    """

    look: Look
    least: float
    most: Rank = "wrong"
    is_fact: bool = False
    reads_records: bool = True


DOUBLE, TENFOLD = 0.3, 1.0
"""Least statistics of detectors that count in decades or nines: a factor of two, and of ten, or 90%."""

HALVED = 0.7
"""Least statistic of detectors that count in natural logarithms of squared misses: another reading halves them."""

DETECTORS: Mapping[str, Detector] = {
    "a return that fell": Detector(drops.look_at_drop, LEAST_DEPTH, reads_records=False),
    "numbers that are not finite": Detector(observations.look_at_nonfinite, 0.0, is_fact=True),
    "equal observations": Detector(observations.look_at_equal_observations, TENFOLD),
    "lost observations": Detector(observations.look_at_lost_observations, DOUBLE),
    "late observations": Detector(observations.look_at_late_observations, DOUBLE),
    "repeated observations": Detector(observations.look_at_repeats, 0.1),
    "entries that stop": Detector(observations.look_at_stops, DOUBLE),
    "idle entries": Detector(observations.look_at_idle_entries, 3.0, "unusual", is_fact=True),
    "lost entries": Detector(observations.look_at_lost_entries, DOUBLE),
    "outlying observations": Detector(observations.look_at_outlying_observations, TENFOLD),
    "clipped observations": Detector(observations.look_at_clipped_observations, 0.05),
    "equal starts": Detector(episodes.look_at_equal_starts, TENFOLD),
    "dead stretches of actions": Detector(actions.look_at_dead_stretches, HALVED),
    "late actions": Detector(actions.look_at_late_actions, HALVED),
    "swapped actions of copies and rounds": Detector(actions.look_at_swaps, HALVED),
    "short episodes": Detector(episodes.look_at_short_episodes, TENFOLD),
    "paid again at the reset": Detector(episodes.look_at_paid_again, DOUBLE),
    "late rewards": Detector(reward_effects.look_at_late_rewards, HALVED),
    "first rewards": Detector(episodes.look_at_first_rewards, DOUBLE),
    "rewards of copies and rounds": Detector(partial(reward_effects.look_at_rewards, in_parts=True), HALVED),
    "missing rewards": Detector(partial(reward_effects.look_at_rewards, is_missing=True), HALVED),
    "rewards of places": Detector(reward_effects.look_at_rewards, HALVED),
    "outlying rewards": Detector(learning.look_at_outliers, TENFOLD),
    "equal rewards": Detector(learning.look_at_equal_rewards, TENFOLD, "unusual", is_fact=True),
    "rewards of copies": Detector(parts.look_at_rewards_of_copies, 0.5),
    "observations of copies": Detector(parts.look_at_observations_of_copies, 0.5),
    "changes of rewards": Detector(parts.look_at_changes_of_rewards, 2.5),  # six rewards on a side
    "changes of observations": Detector(parts.look_at_changes_of_observations, 1.0),
    "time limit as end": Detector(episodes.look_at_limit, DOUBLE),
    "fixed length as end": Detector(episodes.look_at_fixed_length, DOUBLE),
    "unforeseen ends": Detector(episodes.look_at_unforeseen_ends, 0.25),
    "rewards in loops": Detector(learning.look_at_loops, 1.0),
    "spread of actions": Detector(actions.look_at_spread, TENFOLD),
    "scales of observations": Detector(observations.look_at_scales, 2.0),
    "large steps": Detector(learning.look_at_large_steps, DOUBLE, reads_records=False),
    "small steps": Detector(learning.look_at_small_steps, TENFOLD, reads_records=False),
    "lost entropy": Detector(learning.look_at_entropy, DOUBLE, reads_records=False),
    "critic": Detector(learning.look_at_critic, 0.25),
    "settings of rounds": Detector(learning.look_at_settings, 0.0, "unusual", is_fact=True, reads_records=False),
}
"""By the names that the reference has; of findings of one rank, causes come before what follows from them."""
