"""Phases of a behaviour: its probability, its influence's roughness, and the records of each phase (LDA §4.2)."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Float

from whence.attribution import attribute
from whence.core import Action, RecordBatch, eval_mode, write_atomically
from whence.diagnosis.decisions import Behaviour, embed_records, is_density
from whence.diagnosis.roughness import (
    LARGEST,
    NEIGHBOURS,
    Pattern,
    compute_roughness,
    expect_roughness,
    link_similar,
    name_pattern,
    split_curve,
    spread_evenly,
)
from whence.experiments import AnyEnv, load_model, load_policy, read_records
from whence.moments import Moment, find_moments, name_action
from whence.runs import RunDirectory, check_links
from whence.sb3 import actor_critic_view, model_objective

FORMAT, VERSION = "whence-phases", 1

PERMUTATIONS = 20
"""Permutations of the scores that roughness is compared with."""

_LEAST = 3  # nodes of a graph
_MOMENTS = 3  # of a phase that are kept


@dataclass(frozen=True)
class Phase:
    """Rounds between two changes of the roughness.

    Attributes:
        first: the first round.
        last: the last round.
        roughness: the mean over the rounds.
        relative: the mean of roughness over that of permuted scores; None if it is not defined.
        log_prob: log π(a|s) before the first round.
        log_prob_after: log π(a|s) after the last; None if that policy is not stored.
        moments: the rounds and moments of the highest scores among the records that trained, the highest first.
    """

    first: int
    last: int
    roughness: float
    relative: float | None
    log_prob: float
    log_prob_after: float | None
    moments: tuple[tuple[int, Moment], ...]


@dataclass(frozen=True, eq=False)
class History:
    """How a behaviour arose.

    Attributes:
        behaviour: the behaviour.
        is_density: whether its log-probabilities are log-densities.
        neighbours: of each node of the similarity graph.
        rounds: a row for each round: `round`; `log_prob` and `log_prob_after`, the behaviour's under the policy that
            collected the round and under the next; `nodes`, records with a positive score; `roughness`; of permuted
            scores the `expected` roughness, and the `low` and `high` of all permutations; and `relative`, roughness
            over expected. What is not defined is null.
        phases: in the order of time; none if no round has a roughness.
        permuted_patterns: the pattern of each permutation's roughness over the rounds; see `name_pattern`.
    """

    behaviour: Behaviour
    is_density: bool
    neighbours: int
    rounds: pl.DataFrame
    phases: tuple[Phase, ...]
    permuted_patterns: tuple[Pattern, ...]

    @property
    def pattern(self) -> Pattern | None:
        """What roughness does over the phases; None if there are none."""
        return name_pattern([phase.roughness for phase in self.phases]) if self.phases else None


def trace_phases(
    run: RunDirectory,
    behaviour: Behaviour,
    *,
    neighbours: int = NEIGHBOURS,
    permutations: int = PERMUTATIONS,
    env: AnyEnv = None,
    seed: int = 0,
    on_round: Callable[[int, int], None] = lambda done, rounds: None,
) -> History:
    """Trace how a behaviour arose over a run's rounds (LDA §4.2, C.2).

    Each round's records are scored for the behaviour (target `Action`) at the policy that collected them. The records
    with a positive score are the nodes of a graph that links similar states, by the last policy's penultimate layer.
    Roughness says how much linked records' scores, over the largest, differ. Permuting the scores over the nodes tells
    how much they would differ if similarity did not matter.

    Args:
        run: the run, of `whence train` or a callback.
        behaviour: from `find_behaviour`, `behaviour_of_records` or `behaviour_by_hand`.
        neighbours: nearest neighbours that each node is linked with, at least 1.
        permutations: of the scores, at least 1.
        env: see `load_round`.
        seed: seeds the permutations.
        on_round: called after each round with the number of rounds that are done, and of all.

    Raises:
        RunDirectoryError: there are no rounds, or a policy is missing or cannot be built again.
    """
    numbers, policies, target = run.require_rounds(), run.rounds("policies"), behaviour.target
    model, final = (load_model(run, number, env=env) for number in (numbers[0], policies[-1]))
    rows: list[dict[str, Any]] = []
    permuted: list[Float[np.ndarray, " p"]] = []
    moments: list[tuple[int, Moment]] = []
    for done, number in enumerate(numbers, start=1):
        load_policy(run, number, model)
        table = run.round("records", number)
        records = read_records(run, table, model, env=env)
        influence = attribute(model.policy, records, target=target, objective=model_objective(model))
        scores = influence.scores.double().numpy()
        row, of_permuted = _measure_roughness(
            scores,
            embed_records(final.policy, records),
            neighbours,
            permutations,
            np.random.default_rng([seed, number, 0]),
        )
        rows.append({**_UNDEFINED, **row, "round": number, "log_prob": _rate(target, model.policy, records)})
        permuted.append(of_permuted)
        trained = table["keep"].fill_null(True).to_numpy() if "keep" in table.columns else True
        taught = records.to_polars().with_columns(score=pl.Series(np.where(trained, scores, 0.0)))
        moments += [(number, moment) for moment in find_moments(taught, lowest=False, most=_MOMENTS)]
        on_round(done, len(numbers))
    # The policy after the last round is missing if training was stopped in that round.
    last = _rate(target, final.policy, records) if policies[-1] > numbers[-1] else None
    after = pl.Series("log_prob_after", [*(row["log_prob"] for row in rows[1:]), last], dtype=pl.Float64)
    rounds = pl.DataFrame(rows, schema=_SCHEMA).with_columns(after)
    curve = rounds.drop_nulls("roughness")
    curves = np.stack(permuted)[rounds["roughness"].is_not_null().to_numpy()]
    return History(
        behaviour=behaviour,
        is_density=is_density(model.action_space),
        neighbours=neighbours,
        rounds=rounds,
        phases=tuple(
            _make_phase(curve[start:end], level, moments)
            for start, end, level in split_curve(curve["roughness"].to_numpy())
        ),
        permuted_patterns=tuple(
            name_pattern([segment.level for segment in split_curve(each)]) for each in curves.T if len(each)
        ),
    )


def _measure_roughness(
    scores: Float[np.ndarray, " n"],
    embeddings: Float[np.ndarray, "n d"],
    neighbours: int,
    permutations: int,
    generator: np.random.Generator,
) -> tuple[dict[str, Any], Float[np.ndarray, " p"]]:
    """Return a round's roughness and that of permuted scores; NaN if fewer than three records score above 0."""
    positive = np.flatnonzero(scores > 0)
    nodes = spread_evenly(positive, LARGEST)
    if len(nodes) < _LEAST:
        return {"nodes": len(positive), "roughness": None}, np.full(permutations, np.nan)
    values = scores[nodes] / scores[nodes].max()
    graph = link_similar(embeddings[nodes], neighbours)
    roughness, expected = compute_roughness(graph, values), expect_roughness(values)
    permuted = np.array([compute_roughness(graph, generator.permutation(values)) for _ in range(permutations)])
    return {
        **{"nodes": len(positive), "roughness": roughness, "expected": expected},
        **{"low": float(permuted.min()), "high": float(permuted.max())},
        "relative": roughness / expected if expected > 0 else None,
    }, permuted


def _rate(target: Action, policy: Any, records: RecordBatch) -> float:
    """Return a behaviour's mean log-probability under a policy."""
    view = actor_critic_view(policy)
    with torch.no_grad(), eval_mode(policy.modules()):
        return float(target(view, view.parameters(), records))


_SCHEMA = {
    **dict.fromkeys(("round", "nodes"), pl.Int64),
    **dict.fromkeys(("log_prob", "log_prob_after", "roughness", "expected", "low", "high", "relative"), pl.Float64),
}
_UNDEFINED: Mapping[str, Any] = dict.fromkeys(_SCHEMA)


def _make_phase(rows: pl.DataFrame, roughness: float, moments: Sequence[tuple[int, Moment]]) -> Phase:
    first, last = rows["round"][0], rows["round"][-1]
    inside = [(number, moment) for number, moment in moments if first <= number <= last]
    return Phase(
        first=first,
        last=last,
        roughness=roughness,
        relative=rows.select(pl.col("relative").mean()).item(),
        log_prob=rows["log_prob"][0],
        log_prob_after=rows["log_prob_after"][-1],
        moments=tuple(sorted(inside, key=lambda pair: (-pair[1].score, pair[1].record_id))[:_MOMENTS]),
    )


_VERDICTS = {
    "three phases": "LDA's three phases appear (roughness falls twice)",
    "one fall": "LDA's three phases do not appear (roughness ends lower, but does not fall twice)",
    "no fall": "LDA's three phases do not appear (roughness does not end lower)",
}


def describe_history(history: History) -> list[str]:
    """Return sentences: when the behaviour arose, which phases its roughness has, and how permuted scores compare."""
    rise = _describe_rise(history)
    if history.pattern is None:
        return [rise, "No round has three records with a positive score, so there is no roughness."]
    levels = ", ".join(f"{phase.roughness:.2g} in rounds {phase.first}–{phase.last}" for phase in history.phases)
    count = len(history.permuted_patterns)
    same = history.permuted_patterns.count(history.pattern)
    permuted = f"With the scores permuted over the same records, {same} of {count} histories show the same"
    # What permuted scores show as well needs no likeness of similar states.
    if history.pattern != "no fall":
        is_chance = same > count / 20
        permuted += ": the scores' spread alone "
        permuted += "can make it, even if similar states do not score alike" if is_chance else "does not make it"
    return [rise, f"{_VERDICTS[history.pattern]}: {levels}.", f"{permuted}."]


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


def summarise_history(history: History, labels: Sequence[str] | None = None) -> dict[str, Any]:
    """Return a history in JSON types, as `write_history` stores it.

    Args:
        history: the history.
        labels: names of the environment's discrete actions.
    """
    behaviour = history.behaviour
    names = ("episode_id", "step", "first_step", "last_step", "records", "score", "advantage", "reward")
    phases = [
        vars(phase)
        | {
            "moments": [
                {"round": number, "record": moment.record_id, "action": name_action(moment.action, labels)}
                | {name: getattr(moment, name) for name in names}
                for number, moment in phase.moments
            ]
        }
        for phase in history.phases
    ]
    return {
        **{"format": FORMAT, "version": VERSION, "sentences": describe_history(history)},
        "behaviour": {"name": behaviour.name, "round": behaviour.round, "records": list(behaviour.record_ids)},
        **{"is_density": history.is_density, "neighbours": history.neighbours, "pattern": history.pattern},
        "permuted_patterns": dict(Counter(history.permuted_patterns)),
        **{"phases": phases, "preference": read_preference(history)},
        "rounds": history.rounds.to_dict(as_series=False),
    }


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
