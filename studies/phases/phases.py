"""Phases of a behaviour: its probability and its influence's roughness over a run's rounds (LDA §4.2, C.2; v2 B.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from gymnasium import spaces
from jaxtyping import Float

from studies.phases.roughness import (
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
from whence import Action, RecordBatch, RunDirectory, attribute
from whence.core import WhenceError, eval_mode, to_numpy
from whence.lab.visits import number_states
from whence.sb3 import model_objective
from whence.sb3.policy import actor_critic_view, predict
from whence.stored.agents import AnyEnv, load_agent, load_policy, read_records

CANDIDATES = 512
"""States of the last round among which a behaviour is looked for, evenly spread."""

PERMUTATIONS = 20
"""Permutations of the scores that roughness is compared with."""

_LEAST = 3  # nodes of a graph
_CHUNK = 4096


@dataclass(frozen=True)
class Phase:
    """The rounds `first` to `last`, between two changes of the roughness, with the means over these rounds.

    `log_prob` is log π(a|s), of a box's action a log-density, before the first round, and `log_prob_after` after the
    last; it is None if that policy is not stored. `relative` is roughness over that of permuted scores, if defined.
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


def read_behaviour(run: RunDirectory, record: int, *, env: AnyEnv = None) -> Action:
    """Return what was done in the state of a record, of any round."""
    for number in reversed(run.require_rounds()):
        if record in run.round("records", number)["record_id"]:
            model = load_agent(run, number, env=env)
            return _make_behaviour(read_records(run, number, model, env=env, ids=[record]))
    raise WhenceError(f"No round of {run.path} holds record {record}. `whence show` lists the moments of a round.")


def _make_behaviour(state: RecordBatch, action: int | None = None) -> Action:
    """Return a record's action in its state, or another action."""
    return Action(state.observations, state.actions if action is None else [action], state.action_masks, state)


def find_behaviour(run: RunDirectory, *, env: AnyEnv = None) -> Action:
    """Return the behaviour that training raised most and most steadily, of a run with at least three stored policies.

    Candidates are states of the last round: each discrete action there, or for other actions the one that was taken.
    They are ranked by `rank_rises` of π(a|s), of a box's log-density, over all stored policies.
    """
    numbers, rounds = run.rounds("policies"), run.require_rounds()
    if len(numbers) < 3:
        raise WhenceError(f"{run.path} holds {len(numbers)} policies; 3 are needed to see what rose. Train on.")
    model = load_agent(run, numbers[0], env=env)
    records = read_records(run, rounds[-1], model, env=env)
    states = records.take(torch.linspace(0, len(records) - 1, min(CANDIDATES, len(records))).long())
    inputs = actor_critic_view(model.policy).prepare(states)
    curves = []
    for number in numbers:
        load_policy(run, number, model)
        curves.append(_rate_actions(model.policy, inputs))
    worth = rank_rises(np.stack(curves))
    place, action = (int(at) for at in np.unravel_index(worth.argmax(), worth.shape))
    if not worth[place, action] > 0:
        raise WhenceError(f"No action in round {rounds[-1]} became more probable. Name a behaviour with --record.")
    space = model.action_space
    chosen = action + int(space.start) if isinstance(space, spaces.Discrete) else None
    return _make_behaviour(states.take(slice(place, place + 1)), chosen)


def rank_rises(curves: Float[np.ndarray, "k ..."]) -> Float[np.ndarray, "..."]:
    """Return how much curves (k, ...) over k policies rise, times how steadily: rise · |rise| / Σ|steps|.

    That is the rise itself where no step falls, below 0 where the last value is below the first, 0 if all are equal.
    """
    rise = curves[-1] - curves[0]
    steps = np.abs(np.diff(curves, axis=0)).sum(axis=0)
    worth: Float[np.ndarray, ...] = np.divide(rise * np.abs(rise), steps, out=np.zeros_like(rise), where=steps > 0)
    return worth


def _rate_actions(policy: Any, inputs: Any) -> Float[np.ndarray, "n a"]:
    """Return each discrete action's probability, or of other actions the log-density or probability of the taken."""
    with torch.no_grad(), eval_mode(policy.modules()):
        distribution, _ = predict(policy, inputs)
        if isinstance(policy.action_space, spaces.Discrete):
            inner: Any = distribution.distribution
            return np.asarray(to_numpy(inner.probs), np.float64)
        log_probs = to_numpy(distribution.log_prob(inputs["actions"])).astype(np.float64)[:, None]
    return log_probs if isinstance(policy.action_space, spaces.Box) else np.exp(log_probs)


def trace_phases(
    run: RunDirectory,
    behaviour: Action,
    *,
    neighbours: int = NEIGHBOURS,
    permutations: int = PERMUTATIONS,
    env: AnyEnv = None,
    seed: int = 0,
) -> History:
    """Trace how a behaviour arose over a run's rounds.

    Each round's records are scored for the behaviour at the policy that collected them. The records with a positive
    score are the nodes of a graph that links similar states, by the last policy's penultimate layer. Roughness says
    how much linked records' scores, over the largest, differ. Permuting the scores over the nodes tells how much they
    would differ if similarity did not matter; `seed` seeds the permutations.
    """
    numbers, policies = run.require_rounds(), run.rounds("policies")
    model, final = (load_agent(run, number, env=env) for number in (numbers[0], policies[-1]))
    rows, permuted = [], []
    for number in numbers:
        load_policy(run, number, model)
        records = read_records(run, number, model, env=env)
        influence = attribute(model.policy, records, target=behaviour, objective=model_objective(model))
        scores, embeddings = influence.scores.double().numpy(), embed_records(final.policy, records)
        generator = np.random.default_rng([seed, number, 0])
        row, of_permuted = _measure_roughness(scores, embeddings, neighbours, permutations, generator)
        rows.append({**_UNDEFINED, **row, "round": number, "log_prob": _rate(behaviour, model.policy, records)})
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
    view = actor_critic_view(policy)
    # Rows of one minibatch may differ in the last bits though their inputs are equal.
    _, first, place = np.unique(number_states(records), return_index=True, return_inverse=True)
    distinct = records.take(torch.from_numpy(first))
    parts = []
    with torch.no_grad(), eval_mode(policy.modules()):
        for start in range(0, len(distinct), _CHUNK):
            inputs = view.prepare(distinct.take(slice(start, start + _CHUNK)))
            if "raw" in inputs:
                features = policy.extract_features(inputs["raw"])
                features = features[0] if isinstance(features, tuple) else features
            else:
                features = policy.pi_features_extractor(inputs["observations"])
            parts.append(policy.mlp_extractor.forward_actor(features))
    embeddings: Float[np.ndarray, "n d"] = to_numpy(torch.cat(parts)).astype(np.float64)[place]
    return embeddings


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
    relative = roughness / expected if expected > 0 else None
    return {"nodes": len(positive), "roughness": roughness, "expected": expected, "relative": relative}, permuted


def _rate(target: Action, policy: Any, records: RecordBatch) -> float:
    """Return a behaviour's log-probability under a policy."""
    view = actor_critic_view(policy)
    with torch.no_grad(), eval_mode(policy.modules()):
        return float(target(view, view.parameters(), records))


_SCHEMA = {
    **dict.fromkeys(("round", "nodes"), pl.Int64),
    **dict.fromkeys(("log_prob", "log_prob_after", "roughness", "expected", "relative"), pl.Float64),
}
_UNDEFINED: Mapping[str, Any] = dict.fromkeys(_SCHEMA)


def _make_phase(rows: pl.DataFrame, roughness: float) -> Phase:
    relative, before, after = rows.select(pl.col("relative").mean()).item(), rows["log_prob"], rows["log_prob_after"]
    return Phase(rows["round"][0], rows["round"][-1], roughness, relative, before[0], after[-1])


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
