"""Verdicts of a proof: what may be said of each outcome, by its values in every training and in the run itself."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np

from whence.statistics import prediction_interval, t_interval

Verdict: TypeAlias = Literal[
    "falls", "rises", "no difference", "one seed", "not measured", "unlike the run", "not comparable"
]

MOVES: Sequence[Verdict] = ("falls", "rises")

Values: TypeAlias = Mapping[str, Sequence[float | None]]
"""An outcome's value in each seed, the same seeds for each of `VARIANTS`; None: not measured."""


def judge(outcomes: Mapping[str, Values], run: Mapping[str, float | None]) -> dict[str, Verdict]:
    """Return a verdict for each outcome: how it changes without the records in question, or why that is not known.

    A replay that is "unlike the run" in one outcome proves nothing of the run: the others are "not comparable". `run`
    has the outcomes of the run's own policy; what it lacks is not compared.
    """
    verdicts = {outcome: _judge_outcome(outcome, values, run.get(outcome)) for outcome, values in outcomes.items()}
    if "unlike the run" in verdicts.values():
        unknown = ("unlike the run", "not measured")
        verdicts = {name: verdict if verdict in unknown else "not comparable" for name, verdict in verdicts.items()}
    return verdicts


def list_changes(values: Values, variant: str) -> list[float]:
    """Return the changes from training on all records, over seeds; none if a seed of either was not measured."""
    pairs = zip(values[variant], values["all"], strict=True)
    changes = [value - full for value, full in pairs if value is not None and full is not None]
    return changes if len(changes) == len(values["all"]) else []


def _judge_outcome(outcome: str, values: Values, run: float | None) -> Verdict:
    full = [value for value in values["all"] if value is not None]
    if run is not None and 1 < len(full) == len(values["all"]) and not _is_replayed(outcome, full, run):
        return "unlike the run"
    changes = {variant: list_changes(values, variant) for variant in values}
    if not all(changes.values()):
        return "not measured"
    if len(full) < 2:
        return "one seed"
    if not _is_apart(changes):
        return "no difference"
    return "falls" if np.mean(changes["without"]) < 0 else "rises"


def _is_replayed(outcome: str, full: Sequence[float], run: float) -> bool:
    """Return whether the run's own value may be one more seed's of training on all records.

    It is inside their 95% prediction interval. Or it is within 1% of their mean, of probabilities and shares within
    0.01: where the order of minibatches does not matter, all seeds are equal but for rounding.
    """
    mean = float(np.mean(full))
    smallest = 0.01 if outcome.startswith(("log-", "share")) else 0.0
    return abs(run - mean) <= max(prediction_interval(full)[1] - mean, 0.01 * abs(mean), smallest)


def _is_apart(changes: Mapping[str, Sequence[float]]) -> bool:
    """Return whether the change without the records is not 0, and further off than one more set of either control.

    A control's set is drawn anew in each seed, so its changes differ by what its records do, too, and not only by
    chance in training. The mean change must be beyond their 95% prediction interval, on its own side of 0.
    """
    change = t_interval(changes["without"])
    mean, low, high = (float(change[name] or 0) for name in ("mean", "low", "high"))
    lows, highs = zip(*(prediction_interval(changes[control]) for control in ("random", "placebo")), strict=True)
    return (high < 0 and mean < min(lows)) or (low > 0 and mean > max(highs))
