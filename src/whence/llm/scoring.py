"""Scores of a rollout's rows, also where several processes hold the model."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from whence.attribution import attribute
from whence.errors import WhenceError
from whence.influence import Influence
from whence.llm.processes import Processes
from whence.llm.targets import SequenceReturn, TokenReturn, ValidationLoss, share
from whence.llm.view import language_view
from whence.objectives import Objective
from whence.records import RecordBatch
from whence.targets import Target, target_name

log = logging.getLogger("whence")


def score(
    model: Any,
    rows: RecordBatch,
    target: Target,
    objective: Objective,
    temperature: float,
    engine: str,
    memory: int | None,
    chunk_size: int,
    processes: Processes,
) -> Influence:
    """Return the influence of every row on a target, in every process.

    Args:
        model: of which the parameters that train are scored.
        rows: all rows of the rollout, in every process.
        target: what is to be raised.
        objective: what a row's training raises.
        temperature: responses were drawn at.
        engine: see `whence.attribute`.
        memory: bytes that scoring may hold at a time, in each process; None: `chunk_size` says how much that is.
        chunk_size: rows that are scored at a time, where no memory is given.
        processes: of which each scores a part of the rows.
    """
    view, whole = language_view(model, temperature=temperature), target
    summed, mine = None, rows
    if processes.number > 1:
        mine, summed = rows.take(processes.own(len(rows))), processes.summed
        target = share(whole, rows, processes.rank, processes.number)
    how: Any = {"chunk_size": chunk_size} if memory is None else {"memory": memory}
    own = attribute(view, mine, target=target, objective=objective, engine=engine, summed=summed, **how)
    if processes.number == 1:
        return own
    device = next(iter(model.parameters())).device
    return Influence(
        processes.gathered(own.scores.to(device), len(rows)).cpu(),
        rows.ids.cpu().clone(),
        replace(own.provenance, target=target_name(whole), records=rows.fingerprint),
    )


def held_out_target(target: Target, rows: RecordBatch) -> Target:
    """Return a target as it is over held-out rows instead of the scored ones."""
    assert isinstance(target, SequenceReturn | TokenReturn)
    return replace(target, rows=rows)


def check_held_out(
    target: Target, held_out: Sequence[Sequence[int]] | None, prompts: Sequence[Sequence[int]], *, warn: bool = True
) -> None:
    """Refuse held-out prompts that the target has no use for, and warn of prompts that train as well.

    Args:
        target: as the trainer was given it.
        held_out: token ids of the held-out prompts; None: there are none.
        prompts: token ids of the prompts that train.
        warn: whether this process is the one to do so.

    Raises:
        WhenceError: the target takes no responses, or has rows already; or there is no held-out prompt.
    """
    if held_out is not None:
        if not isinstance(target, SequenceReturn | TokenReturn) or target.rows is not None:
            raise WhenceError(
                f"held_out gives prompts whose responses the target is taken over, and {target_name(target)} is not "
                "taken over responses drawn in training: use SequenceReturn() or TokenReturn(), without rows."
            )
        if not held_out:
            raise WhenceError("held_out is empty; give at least one prompt, or None.")
    kind, validation = "held-out prompts", held_out
    if isinstance(target, ValidationLoss):
        kind, validation = "prompts of the demonstrations", target.prompts()
    trained = {tuple(ids) for ids in prompts}
    if warn and validation and (shared := sum(tuple(ids) in trained for ids in validation)):
        log.warning(
            "%d of %d %s also train, so the target is not one of unseen prompts.", shared, len(validation), kind
        )
