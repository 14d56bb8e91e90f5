"""Scores of a rollout's rows, in one process or several."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from whence.attribution import Summed, attribute
from whence.errors import WhenceError
from whence.influence import Influence
from whence.layers import Layers
from whence.llm.processes import ONE, Processes
from whence.llm.targets import SequenceReturn, TokenReturn, ValidationLoss, target_share
from whence.llm.view import language_view
from whence.objectives import Objective
from whence.records import RecordBatch
from whence.targets import Target, target_name

log = logging.getLogger("whence")


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
        layers: the layers to score by; see `whence.attribute`.
    """

    target: Target
    objective: Objective
    temperature: float
    engine: str
    memory: int | None
    chunk_size: int
    processes: Processes = ONE
    layers: Layers | None = None


def score(model: Any, rows: RecordBatch, scoring: Scoring) -> Influence:
    """Return the influence of every row on a target, in every process.

    Args:
        model: the model; its parameters that train are scored.
        rows: all rows of the rollout, in every process.
        scoring: how they are scored.
    """
    processes, target = scoring.processes, scoring.target
    local_rows, local_target, reduce = split_work(rows, target, processes)
    limits: Any = {"chunk_size": scoring.chunk_size} if scoring.memory is None else {"memory": scoring.memory}
    influence = attribute(
        language_view(model, temperature=scoring.temperature),
        local_rows,
        target=local_target,
        objective=scoring.objective,
        engine=scoring.engine,
        summed=reduce,
        layers=scoring.layers,
        **limits,
    )
    if processes.number == 1:
        return influence
    device = next(iter(model.parameters())).device
    return Influence(
        processes.gather(influence.scores.to(device), len(rows)).cpu(),
        rows.ids.cpu().clone(),
        replace(influence.provenance, target=target_name(target), records=rows.fingerprint),
    )


def split_work(rows: RecordBatch, target: Target, processes: Processes) -> tuple[RecordBatch, Target, Summed | None]:
    """Return a process's rows, its share of the target, and what sums gradients; None: there is one process."""
    if processes.number == 1:
        return rows, target, None
    share = target_share(target, rows, processes.rank, processes.number)
    return rows.take(processes.part(len(rows))), share, processes.sum_tensors


def held_out_target(target: Target, rows: RecordBatch) -> Target:
    """Return the target over held-out rows instead of the scored ones."""
    assert isinstance(target, SequenceReturn | TokenReturn)
    return replace(target, rows=rows)


def check_held_out(
    target: Target,
    held_out: Sequence[Sequence[int]] | None,
    prompts: Sequence[Sequence[int]],
    processes: Processes = ONE,
) -> None:
    """Refuse held-out prompts that the target cannot use, and warn of prompts that train as well.

    Args:
        target: the trainer's target.
        held_out: token ids of the held-out prompts; None: there are none.
        prompts: token ids of the prompts that train.
        processes: the processes, each of which answers a part; the first logs the warning.

    Raises:
        WhenceError: the target reads no drawn responses, or has rows already; or held-out prompts are
            fewer than the processes.
    """
    if held_out is not None:
        if not isinstance(target, SequenceReturn | TokenReturn) or target.rows is not None:
            raise WhenceError(
                f"held_out gives prompts for a target over drawn responses, and {target_name(target)} reads none of "
                "them: use SequenceReturn() or TokenReturn(), without rows."
            )
        if not held_out:
            raise WhenceError("held_out is empty; give at least one prompt, or None.")
        if len(held_out) < processes.number:
            raise WhenceError(f"{len(held_out)} held-out prompts are fewer than the processes; give one for each.")
    kind, validation = "held-out prompts", held_out
    if isinstance(target, ValidationLoss):
        kind, validation = "prompts of the demonstrations", target.prompts()
    trained = {tuple(ids) for ids in prompts}
    if processes.rank == 0 and validation and (shared := sum(tuple(ids) in trained for ids in validation)):
        log.warning(
            "%d of %d %s also train, so the target is not one of unseen prompts.", shared, len(validation), kind
        )
