"""Phases of a behaviour: its probability, its influence's roughness, and the records of each phase (LDA §4.2)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Float
from scipy.spatial.distance import cdist

from whence.attribution import attribute
from whence.diagnosis.behaviours import Behaviour, embed_records, is_density
from whence.diagnosis.roughness import (
    LARGEST,
    NEIGHBOURS,
    Pattern,
    compute_roughness,
    expect_roughness,
    link_similar,
    name_pattern,
    permute_roughness,
    split_curve,
    spread_evenly,
)
from whence.errors import WhenceError
from whence.experiments import AnyEnv, load_model, load_policy, read_records
from whence.guards import eval_mode
from whence.moments import Moment, find_moments
from whence.records import RecordBatch
from whence.runs import RunDirectory
from whence.sb3.base.objective import model_objective
from whence.sb3.policy import actor_critic_view
from whence.targets import Action

PERMUTATIONS = 20
"""Permutations of the scores that roughness is compared with."""

TOP = 20
"""The highest records of a round, of which it is told what they share."""

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
        association: see `History`; the mean over the rounds, or None.
        nearness: see `History`; the mean over the rounds, or None.
        moments: the rounds and moments of the highest scores among the records that trained, the highest first.
    """

    first: int
    last: int
    roughness: float
    relative: float | None
    log_prob: float
    log_prob_after: float | None
    association: float | None
    nearness: float | None
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
            scores the `expected` roughness, and the `low` and `high` of all permutations; `relative`, roughness over
            expected; of the `TOP` highest records, `association`, the share that took the behaviour's discrete action
            with a normalised advantage above 0 or another with one below 0, and `nearness`, the mean share of the
            round's records that are farther from the behaviour's state. What is not defined is null.
        phases: in the order of time; none if no round has a roughness.
        relative_phases: the same of `relative`, each by its first and last round and its level.
        permuted_patterns: the pattern of each permutation's roughness over the rounds; see `name_pattern`.
    """

    behaviour: Behaviour
    is_density: bool
    neighbours: int
    rounds: pl.DataFrame
    phases: tuple[Phase, ...]
    relative_phases: tuple[tuple[int, int, float], ...]
    permuted_patterns: tuple[Pattern, ...]

    @property
    def pattern(self) -> Pattern | None:
        """What roughness does over the phases; None if there are none."""
        return name_pattern([phase.roughness for phase in self.phases]) if self.phases else None


def trace_phases(
    run: RunDirectory,
    behaviours: Sequence[Behaviour],
    *,
    neighbours: int = NEIGHBOURS,
    permutations: int = PERMUTATIONS,
    engine: str = "auto",
    env: AnyEnv = None,
    seed: int = 0,
    on_round: Callable[[int, int], None] = lambda done, rounds: None,
) -> list[History]:
    """Trace how behaviours arose over a run's rounds (LDA §4.2, C.2).

    Each round's records are scored for the behaviour (target `Action`) at the policy that collected them. The records
    with a positive score are the nodes of a graph that links similar states, by the last policy's penultimate layer.
    Roughness says how much linked records' scores, over the largest, differ. Permuting the scores over the nodes tells
    how much they would differ if similarity did not matter.

    Args:
        run: the run, of `whence train` or a callback.
        behaviours: from `find_behaviours`, `behaviour_of_records` or `behaviour_by_hand`.
        neighbours: nearest neighbours that each node is linked with.
        permutations: of the scores.
        engine: see `attribute`.
        env: see `load_round`.
        seed: seeds the permutations.
        on_round: called after each round with the number of rounds that are done, and of all.

    Returns:
        The behaviours' histories, in their order.

    Raises:
        WhenceError: there are no rounds, or `neighbours` or `permutations` is below 1.
        RunDirectoryError: a round or a policy is missing, or cannot be built again.
    """
    numbers, policies = run.rounds(), set(run.rounds("policies"))
    if not numbers or not policies:
        raise WhenceError(f"{run.path} holds no rounds, or no policies, yet. Train at least one round into it.")
    for name, value in (("neighbours", neighbours), ("permutations", permutations)):
        if value < 1:
            raise WhenceError(f"{name} is {value}; at least 1 is needed.")
    model, final = (load_model(run, number, env=env) for number in (numbers[0], max(policies)))
    traces = [_Trace(behaviour, [], [], []) for behaviour in behaviours]
    for done, number in enumerate(numbers, start=1):
        load_policy(run, number, model)
        round = _read_round(run, number, model, final, env)
        scores = _score(model, round.records, [trace.behaviour.target for trace in traces], engine)
        for place, trace in enumerate(traces):
            generator = np.random.default_rng([seed, number, place])
            row, permuted = _measure_roughness(scores[place], round.embeddings, neighbours, permutations, generator)
            row |= {"round": number, "log_prob": _rate(trace.behaviour.target, model.policy, round.records)}
            trace.rows.append(row | _describe_top(trace.behaviour.target, scores[place], round, final.policy))
            trace.permuted.append(permuted)
            moments = find_moments(_make_table(round, scores[place]), lowest=False, most=_MOMENTS)
            trace.moments.extend((number, moment) for moment in moments)
        on_round(done, len(numbers))
    # The policy after the last round is missing if training was stopped in that round.
    is_whole = max(policies) > numbers[-1]
    return [
        _make_history(
            trace,
            _rate(trace.behaviour.target, final.policy, round.records) if is_whole else None,
            neighbours,
            is_density(model.action_space),
        )
        for trace in traces
    ]


@dataclass(frozen=True)
class _Trace:
    """What was measured of a behaviour so far: a row, the permutations' roughness and the moments of each round."""

    behaviour: Behaviour
    rows: list[dict[str, Any]]
    permuted: list[Float[np.ndarray, " p"]]
    moments: list[tuple[int, Moment]]


@dataclass(frozen=True, eq=False)
class _Round:
    """A round's records; their advantages as the objective normalises them; embeddings; and whether each trained."""

    records: RecordBatch
    advantages: Float[np.ndarray, " n"]
    embeddings: Float[np.ndarray, "n d"]
    trained: pl.DataFrame | None


def _read_round(run: RunDirectory, number: int, model: Any, final: Any, env: AnyEnv) -> _Round:
    table = run.round("records", number)
    records = read_records(run, table, model, env=env)
    return _Round(
        records=records,
        advantages=model_objective(model).prepare(records).advantages.numpy(),
        embeddings=embed_records(final.policy, records),
        trained=table.select("record_id", "keep") if "keep" in table.columns else None,
    )


def _score(model: Any, records: RecordBatch, targets: Sequence[Action], engine: str) -> list[Float[np.ndarray, " n"]]:
    """Return the records' scores for each target, from one pass over the records."""
    by_place = {str(place): target for place, target in enumerate(targets)}
    influences = attribute(model.policy, records, target=by_place, objective=model_objective(model), engine=engine)
    return [influences[place].scores.double().numpy() for place in by_place]


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
    permuted = permute_roughness(graph, values, permutations, generator)
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


def _describe_top(
    target: Action, scores: Float[np.ndarray, " n"], round: _Round, final: Any
) -> dict[str, float | None]:
    """Return what the highest records share: `association` and `nearness` of `History.rounds`."""
    top = np.argsort(-scores, kind="stable")[:TOP]
    top = top[scores[top] > 0]
    if len(top) == 0:
        return {"association": None, "nearness": None}
    states, association = target.as_records(round.records), None
    actions, wanted = (batch.actions.reshape(len(batch), -1).numpy() for batch in (round.records, states))
    if np.issubdtype(actions.dtype, np.integer) and (wanted == wanted[0]).all():  # one action, that others can equal
        same, advantages = (actions[top] == wanted[0]).all(axis=1), round.advantages[top]
        association = float(np.where(same, advantages > 0, advantages < 0).mean())
    distances = cdist(round.embeddings, embed_records(final, states)).min(axis=1)
    farther, equal = (compare(distances, distances[top, None]).mean() for compare in (np.greater, np.equal))
    return {"association": association, "nearness": float(farther + equal / 2)}


def _make_table(round: _Round, scores: Float[np.ndarray, " n"]) -> pl.DataFrame:
    """Return the records with a behaviour's scores; those that did not train, and so taught nothing, score 0."""
    table = round.records.to_polars().with_columns(score=pl.Series(scores))
    if round.trained is None:
        return table
    joined = table.join(round.trained, on="record_id", how="left", maintain_order="left")
    return joined.with_columns(score=pl.when(pl.col("keep").fill_null(True)).then("score").otherwise(0.0))


def _make_history(trace: _Trace, last: float | None, neighbours: int, is_density: bool) -> History:
    after = [*(row["log_prob"] for row in trace.rows[1:]), last]
    rows = [{**_UNDEFINED, **row, "log_prob_after": value} for row, value in zip(trace.rows, after, strict=True)]
    rounds = pl.DataFrame(rows, schema=_SCHEMA)
    with_roughness, with_relative = (rounds.drop_nulls(name) for name in ("roughness", "relative"))
    permuted = np.stack(trace.permuted)[rounds["roughness"].is_not_null().to_numpy()]
    return History(
        behaviour=trace.behaviour,
        is_density=is_density,
        neighbours=neighbours,
        rounds=rounds,
        phases=tuple(
            _make_phase(with_roughness[start:end], level, trace.moments)
            for start, end, level in split_curve(with_roughness["roughness"].to_numpy())
        ),
        relative_phases=tuple(
            (with_relative["round"][start], with_relative["round"][end - 1], level)
            for start, end, level in split_curve(with_relative["relative"].to_numpy())
        ),
        permuted_patterns=tuple(
            name_pattern([segment.level for segment in split_curve(curve)]) for curve in permuted.T if len(curve)
        ),
    )


_SCHEMA = {
    **dict.fromkeys(("round", "nodes"), pl.Int64),
    **dict.fromkeys(("log_prob", "log_prob_after", "roughness", "expected", "low", "high", "relative"), pl.Float64),
    **dict.fromkeys(("association", "nearness"), pl.Float64),
}
_UNDEFINED: Mapping[str, Any] = dict.fromkeys(_SCHEMA)


def _make_phase(rows: pl.DataFrame, roughness: float, moments: Sequence[tuple[int, Moment]]) -> Phase:
    first, last, after = rows["round"][0], rows["round"][-1], rows["log_prob_after"][-1]
    inside = [(number, moment) for number, moment in moments if first <= number <= last]
    return Phase(
        first=first,
        last=last,
        roughness=roughness,
        relative=_mean(rows["relative"]),
        log_prob=rows["log_prob"][0],
        log_prob_after=after,
        association=_mean(rows["association"]),
        nearness=_mean(rows["nearness"]),
        moments=tuple(sorted(inside, key=lambda pair: (-pair[1].score, pair[1].record_id))[:_MOMENTS]),
    )


def _mean(column: pl.Series) -> float | None:
    mean = column.mean()
    return None if mean is None else float(mean)  # type: ignore[arg-type]
