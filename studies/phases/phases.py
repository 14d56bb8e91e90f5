"""Phases of a behaviour: its probability and its influence's roughness over a run's rounds (LDA §4.2, C.2; v2 B.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import torch
from jaxtyping import Float

from studies.phases import roughness
from studies.phases.roughness import Pattern, name_pattern, split_curve
from whence import Action, RecordBatch, RunDirectory, attribute
from whence.core import WhenceError, eval_mode, to_numpy
from whence.lab.rules import number_states
from whence.sb3 import model_objective
from whence.sb3.policy import actor_critic_view, predict
from whence.stored.agents import load_agent, load_policy, read_records

CANDIDATES = 512
"""States of the last round among which a behaviour is looked for, evenly spread."""

PERMUTATIONS = 20
"""Permutations of the scores that roughness is compared with."""

CHUNK = 4096
"""Records that the policy reads at a time."""


class Phase(NamedTuple):
    """The rounds `first` to `last`, between two changes of the roughness, with the means over these rounds.

    `log_prob` is log π(a|s) before the first round, and `log_prob_after` after the last; it is None if that policy is
    not stored. `relative` is roughness over that of permuted scores, if defined.
    """

    first: int
    last: int
    roughness: float
    relative: float | None
    log_prob: float
    log_prob_after: float | None


@dataclass(frozen=True, eq=False)
class History:
    """How a behaviour arose.

    Attributes:
        rounds: a row for each round: `round`; `log_prob` and `log_prob_after`, the behaviour's under the policy that
            collected the round and under the next; `nodes`, records with a positive score; `roughness`; `expected`,
            the mean over permuted scores; and `relative`, roughness over expected. What is not defined is null.
        phases: in the order of time; none if no round has a roughness.
        permuted_patterns: the pattern of each permutation's roughness over the rounds; see `name_pattern`.
    """

    rounds: pl.DataFrame
    phases: tuple[Phase, ...]
    permuted_patterns: tuple[Pattern, ...]

    @property
    def pattern(self) -> Pattern | None:
        """What roughness does over the phases; None if there are none."""
        return name_pattern([phase.roughness for phase in self.phases]) if self.phases else None


def read_behaviour(run: RunDirectory, record: int) -> Action:
    """Return what was done in the state of a record, of any round."""
    for number in reversed(run.require_rounds()):
        if record in run.round("records", number)["record_id"]:
            state = read_records(run, number, load_agent(run, number), ids=[record])
            return Action(state.observations, state.actions, state.action_masks, state)
    raise WhenceError(f"No round of {run.path} holds record {record}. `whence show` lists the moments of a round.")


def find_behaviour(run: RunDirectory) -> Action:
    """Return the behaviour that training raised most and most steadily, of a run with at least three stored policies.

    Candidates are states of the last round and each discrete action there. They are ranked by `rank_rises` of π(a|s)
    over all stored policies.
    """
    numbers, rounds = run.rounds("policies"), run.require_rounds()
    if len(numbers) < 3:
        raise WhenceError(f"{run.path} holds {len(numbers)} policies; 3 are needed to see what rose. Train on.")
    model = load_agent(run, numbers[0])
    records = read_records(run, rounds[-1], model)
    states = records.take(torch.linspace(0, len(records) - 1, min(CANDIDATES, len(records))).long())
    inputs = actor_critic_view(model.policy).prepare(states)
    curves = []
    for number in numbers:
        load_policy(run, number, model)
        with torch.no_grad(), eval_mode(model.policy.modules()):
            distribution: Any = predict(model.policy, inputs)[0].distribution
        curves.append(np.asarray(to_numpy(distribution.probs), np.float64))
    worth = rank_rises(np.stack(curves))
    place, action = (int(at) for at in np.unravel_index(worth.argmax(), worth.shape))
    if not worth[place, action] > 0:
        raise WhenceError(f"No action in round {rounds[-1]} became more probable. Name a behaviour with --record.")
    state = states.take(slice(place, place + 1))
    return Action(state.observations, [action + int(model.action_space.start)], state.action_masks, state)


def rank_rises(curves: Float[np.ndarray, "k ..."]) -> Float[np.ndarray, "..."]:
    """Return how much curves (k, ...) over k policies rise, times how steadily: rise · |rise| / Σ|steps|.

    That is the rise itself where no step falls, below 0 where the last value is below the first, 0 if all are equal.
    """
    rise = curves[-1] - curves[0]
    steps = np.abs(np.diff(curves, axis=0)).sum(axis=0)
    worth: Float[np.ndarray, ...] = np.divide(rise * np.abs(rise), steps, out=np.zeros_like(rise), where=steps > 0)
    return worth


def trace_phases(
    run: RunDirectory, behaviour: Action, *, neighbours: int = roughness.NEIGHBOURS, seed: int = 0
) -> History:
    """Trace how a behaviour arose over a run's rounds.

    Each round's records are scored for the behaviour at the policy that collected them. The records with a positive
    score are the nodes of a graph that links similar states, by the last policy's penultimate layer. Roughness says
    how much linked records' scores, over the largest, differ. Permuting the scores over the nodes tells how much they
    would differ if similarity did not matter; `seed` seeds the permutations.
    """
    numbers, policies = run.require_rounds(), run.rounds("policies")
    model, final = (load_agent(run, number) for number in (numbers[0], policies[-1]))
    rows, permuted = [], []
    for number in numbers:
        load_policy(run, number, model)
        records = read_records(run, number, model)
        influence = attribute(model.policy, records, target=behaviour, objective=model_objective(model))
        scores, embeddings = influence.scores.double().numpy(), embed_records(final.policy, records)
        row, of_permuted = _measure_roughness(scores, embeddings, neighbours, np.random.default_rng([seed, number, 0]))
        rows.append({**row, "round": number, "log_prob": _rate(behaviour, model.policy, records)})
        permuted.append(of_permuted)
    # The policy after the last round is missing if training was stopped in that round.
    last = _rate(behaviour, final.policy, records) if policies[-1] > numbers[-1] else None
    after = pl.Series("log_prob_after", [*(row["log_prob"] for row in rows[1:]), last], dtype=pl.Float64)
    rounds = pl.DataFrame(rows, schema=_SCHEMA).with_columns(after)
    curve = rounds.drop_nulls("roughness")
    curves = np.stack(permuted)[rounds["roughness"].is_not_null().to_numpy()]
    return History(
        rounds=rounds,
        phases=tuple(
            _make_phase(curve[at.start : at.end], at.level) for at in split_curve(curve["roughness"].to_numpy())
        ),
        permuted_patterns=tuple(
            name_pattern([segment.level for segment in split_curve(each)]) for each in curves.T if len(each)
        ),
    )


def embed_records(policy: Any, records: RecordBatch) -> Float[np.ndarray, "n d"]:
    """Return the activations of a policy's penultimate layer for each record, (n, d); equal states have equal ones."""
    view, parts = actor_critic_view(policy), []
    # Rows of one minibatch may differ in the last bits though their inputs are equal.
    _, first, place = np.unique(number_states(records), return_index=True, return_inverse=True)
    distinct = records.take(torch.from_numpy(first))
    with torch.no_grad(), eval_mode(policy.modules()):
        for start in range(0, len(distinct), CHUNK):
            inputs = view.prepare(distinct.take(slice(start, start + CHUNK)))
            parts.append(policy.mlp_extractor.forward_actor(policy.pi_features_extractor(inputs["observations"])))
    embeddings: Float[np.ndarray, "n d"] = to_numpy(torch.cat(parts)).astype(np.float64)[place]
    return embeddings


def _measure_roughness(
    scores: Float[np.ndarray, " n"], embeddings: Float[np.ndarray, "n d"], neighbours: int, generator: Any
) -> tuple[dict[str, Any], Float[np.ndarray, " p"]]:
    """Return a round's roughness and that of permuted scores; NaN if fewer than three records score above 0."""
    positive = np.flatnonzero(scores > 0)
    nodes = roughness.spread_evenly(positive, roughness.LARGEST)
    if len(nodes) < 3:
        return {"nodes": len(positive)}, np.full(PERMUTATIONS, np.nan)
    values = scores[nodes] / scores[nodes].max()
    graph = roughness.link_similar(embeddings[nodes], neighbours)
    measured, expected = roughness.compute_roughness(graph, values), roughness.expect_roughness(values)
    permuted = [roughness.compute_roughness(graph, generator.permutation(values)) for _ in range(PERMUTATIONS)]
    row = {"nodes": len(positive), "roughness": measured, "expected": expected}
    return row | {"relative": measured / expected if expected > 0 else None}, np.array(permuted)


def _rate(target: Action, policy: Any, records: RecordBatch) -> float:
    """Return a behaviour's log-probability under a policy."""
    view = actor_critic_view(policy)
    with torch.no_grad(), eval_mode(policy.modules()):
        return float(target(view, view.parameters(), records))


_SCHEMA = {
    **dict.fromkeys(("round", "nodes"), pl.Int64),
    **dict.fromkeys(("log_prob", "log_prob_after", "roughness", "expected", "relative"), pl.Float64),
}


def _make_phase(rows: pl.DataFrame, level: float) -> Phase:
    first, last = rows.row(0, named=True), rows.row(-1, named=True)
    relative = rows["relative"].mean()
    return Phase(first["round"], last["round"], level, relative, first["log_prob"], last["log_prob_after"])


_VERDICTS = {
    "three phases": "LDA's three phases appear (roughness falls twice)",
    "one fall": "LDA's three phases do not appear (roughness ends lower, but does not fall twice)",
    "no fall": "LDA's three phases do not appear (roughness does not end lower)",
}


def describe_history(history: History) -> Sequence[str]:
    """Return sentences: which phases the roughness has, and how permuted scores compare."""
    if history.pattern is None:
        return ["No round has three records with a positive score, so there is no roughness."]
    count, same = len(history.permuted_patterns), history.permuted_patterns.count(history.pattern)
    permuted = f"With the scores permuted over the same records, {same} of {count} histories show the same"
    # What permuted scores show as well needs no likeness of similar states.
    if history.pattern != "no fall":
        makes = "can make it, even if similar states do not score alike" if same > count / 20 else "does not make it"
        permuted += f": the scores' spread alone {makes}"
    return [f"{_VERDICTS[history.pattern]}.", f"{permuted}."]
