"""A behaviour's history in sentences, and as a file of its run."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whence.diagnosis.phases import TOP, History, Phase
from whence.guards import write_atomically
from whence.moments import name_action
from whence.runs import RunDirectory
from whence.runs.files import check_links

FORMAT, VERSION = "whence-phases", 1

_VERDICTS = {
    "three phases": "LDA's three phases appear (roughness falls twice)",
    "one fall": "LDA's three phases do not appear (roughness ends lower, but does not fall twice)",
    "no fall": "LDA's three phases do not appear (roughness does not end lower)",
}


def describe_history(history: History) -> list[str]:
    """Return sentences: when the behaviour arose, which phases its roughness has, and how permuted scores compare."""
    sentences = [_describe_rise(history)]
    if history.pattern is None:
        return [*sentences, "No round has three records with a positive score, so there is no roughness."]
    levels = [(phase.first, phase.last, phase.roughness) for phase in history.phases]
    sentences.append(f"{_VERDICTS[history.pattern]}: {_list_levels(levels)}.")
    sentences.append(_describe_permuted(history))
    if history.relative_phases:
        sentences.append(_describe_relative(history.relative_phases))
    return sentences


def _describe_permuted(history: History) -> str:
    """Return how often permuted scores have the same pattern, which then needs no likeness of similar states."""
    count = len(history.permuted_patterns)
    same = history.permuted_patterns.count(history.pattern)
    text = f"With the scores permuted over the same records, {same} of {count} histories show the same"
    if history.pattern == "no fall":
        return f"{text}."
    if same > count / 20:
        return f"{text}: the scores' spread alone can make it, even if similar states do not score alike."
    return f"{text}: the scores' spread alone does not make it."


def _describe_rise(history: History) -> str:
    values, rounds = read_preference(history), history.rounds["round"].to_list()
    kind = "The log-density of" if history.is_density else "The probability of"
    verb = "rose" if values[-1] > values[0] else "fell"
    text = f"{kind} {history.behaviour.name} {verb} from {values[0]:.3g} to {values[-1]:.3g}"
    if (span := find_rise(values)) is None:
        return f"{text}."
    first, last = (rounds[min(step, len(rounds) - 1)] for step in span)
    where = f"round {first}" if first == last else f"rounds {first} to {last}"
    return f"{text}; the middle 80% of that change took place in {where}."


def read_preference(history: History) -> list[float]:
    """Return π(a|s), or its logarithm where it is a density, by the policy of each round and by the one after all."""
    last = history.rounds["log_prob_after"][-1]
    values = [*history.rounds["log_prob"].to_list(), *([] if last is None else [last])]
    return values if history.is_density else [math.exp(value) for value in values]


def find_rise(values: Sequence[float]) -> tuple[int, int] | None:
    """Return the first and the last step in which a curve went from a tenth to nine tenths of its way.

    It is counted from the last value that is within a tenth of the way from the first value. Step i leads from value i
    to value i + 1. None if the curve ends where it began.
    """
    way = np.asarray(values, np.float64) - values[0]
    if way[-1] == 0:
        return None
    share = way / way[-1]
    end = int(np.argmax(share >= 0.9))
    start = int(np.flatnonzero(share[: end + 1] <= 0.1)[-1])
    return start, max(end - 1, start)


def _list_levels(levels: Sequence[tuple[int, int, float]]) -> str:
    return ", ".join(f"{level:.2g} in rounds {first}–{last}" for first, last, level in levels)


def _describe_relative(levels: Sequence[tuple[int, int, float]]) -> str:
    """Return what roughness over that of permuted scores does: when similar states scored most alike."""
    text = f"Roughness divided by that of permuted scores is {_list_levels(levels)}; at 1, similarity does not matter"
    if len(levels) == 1:
        return f"{text}. It did not change measurably."
    first, last, _ = min(levels, key=lambda level: level[2])
    return f"{text}. Similar states scored most alike in rounds {first} to {last}."


def summarise_history(history: History, labels: Sequence[str] | None = None) -> dict[str, Any]:
    """Return a history in JSON types, as `write_history` stores it.

    Args:
        history: the history.
        labels: names of the environment's discrete actions.
    """
    behaviour = history.behaviour
    return {
        **{"format": FORMAT, "version": VERSION, "sentences": describe_history(history)},
        "behaviour": {"name": behaviour.name, "round": behaviour.round, "records": list(behaviour.record_ids)},
        **{"is_density": history.is_density, "neighbours": history.neighbours, "top": TOP, "pattern": history.pattern},
        "permuted_patterns": dict(Counter(history.permuted_patterns)),
        "relative_phases": [
            {"first": first, "last": last, "relative": level} for first, last, level in history.relative_phases
        ],
        "phases": [_summarise_phase(phase, labels) for phase in history.phases],
        "preference": read_preference(history),
        "rounds": history.rounds.to_dict(as_series=False),
    }


def _summarise_phase(phase: Phase, labels: Sequence[str] | None) -> dict[str, Any]:
    names = ("episode_id", "step", "first_step", "last_step", "records", "score", "advantage", "reward")
    moments = [
        {"round": number, "record": moment.record_id, "action": name_action(moment.action, labels)}
        | {name: getattr(moment, name) for name in names}
        for number, moment in phase.moments
    ]
    return vars(phase) | {"moments": moments}


def write_history(run: RunDirectory, history: History, content: Mapping[str, Any]) -> Path:
    """Write a summary into `phases/` of its run, in place of one of the same behaviour; return the file.

    Raises:
        RunDirectoryError: the run cannot be written to.
    """
    check_links(run.path)
    path = run.path / "phases" / f"{history.behaviour.key}.json"
    with write_atomically(path) as temporary:
        temporary.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")
    return path
