"""Scores of a rollout's rows, in one process or several."""

from dataclasses import dataclass, replace
from typing import Any

from whence.attribution import name_target, open_problem, score_targets
from whence.core import Objective, RecordBatch, Target, Unit, Unsupported
from whence.engines import Gradient, Summed, target_gradients
from whence.influence import Influence
from whence.llm.base import ONE, Processes, language_view
from whence.llm.scores.language_targets import target_share
from whence.selection import SelectionRule, score_for


@dataclass(frozen=True, eq=False)
class Scoring:
    """How the rows of a rollout are scored.

    Attributes:
        target: the target.
        objective: the objective of a row's training.
        temperature: the sampling temperature of the responses.
        engine: see `whence.attribute`.
        memory: bytes that scoring may hold at a time, in each process; None: those that `chunk_size` rows take.
        chunk_size: rows that are scored at a time if no memory is given.
        processes: the processes; each scores a part of the rows.
    """

    target: Target
    objective: Objective
    temperature: float
    engine: str
    memory: int | None
    chunk_size: int
    processes: Processes = ONE


def score(
    model: Any,
    rows: RecordBatch,
    scoring: Scoring,
    rule: SelectionRule | None = None,
    *,
    leave_one_out: Unit | None = None,
) -> Influence:
    """Return the scores of a rollout's rows in every process, which has all rows; a rule may bring its own.

    Without a rule, a row's own unit may leave its target: `leave_one_out`.
    """

    def attribute(rows: RecordBatch, *, leave_one_out: Unit | None = leave_one_out, **settings: Any) -> Influence:
        return _score_rows(model, rows, replace(scoring, **settings), leave_one_out)

    if rule is None:
        return attribute(rows)
    return score_for(rule, rows, attribute, target=scoring.target, objective=scoring.objective)


def _score_rows(model: Any, rows: RecordBatch, scoring: Scoring, leave_one_out: Unit | None) -> Influence:
    # Of fewer rows than processes, each process scores all.
    processes = scoring.processes if len(rows) >= scoring.processes.number else ONE
    if processes.number > 1 and "group" in (leave_one_out, getattr(scoring.target, "unit", None)):
        raise Unsupported(
            "The mean over groups, or over other groups, needs all responses to a prompt in one process: score by rows "
            "(unit='row'), or train in one process."
        )
    local_rows, local_target, reduce = split_work(rows, scoring.target, processes)
    limits: Any = {"chunk_size": scoring.chunk_size} if scoring.memory is None else {"memory": scoring.memory}
    influence = score_targets(
        language_view(model, temperature=scoring.temperature),
        local_rows,
        {"": local_target},
        objective=scoring.objective,
        engine=scoring.engine,
        summed=reduce,
        leave_one_out=leave_one_out,
        **limits,
    )[""]
    if processes.number == 1:
        return influence
    device = next(iter(model.parameters())).device
    return Influence(
        processes.gather(influence.scores.to(device), len(rows)).cpu(),
        rows.ids.cpu().clone(),
        replace(influence.provenance, target=name_target(scoring.target, leave_one_out), records=rows.fingerprint),
    )


def compute_target_gradient(model: Any, rows: RecordBatch, scoring: Scoring) -> Gradient:
    """Return the gradient of the scoring's target by the parameters' names, in every process; see `score`."""
    local_rows, local_target, reduce = split_work(rows, scoring.target, scoring.processes)
    with open_problem(
        language_view(model, temperature=scoring.temperature),
        local_rows,
        targets=[local_target],
        objective=scoring.objective,
        chunk_size=scoring.chunk_size,
        summed=reduce,
    ) as problem:
        return target_gradients(problem)[0]


def split_work(rows: RecordBatch, target: Target, processes: Processes) -> tuple[RecordBatch, Target, Summed | None]:
    """Return a process's rows, its share of the target, and what sums gradients; None: there is one process."""
    if processes.number == 1:
        return rows, target, None
    share = target_share(target, rows, processes.rank, processes.number)
    return rows.take(processes.part(len(rows))), share, processes.sum_tensors
