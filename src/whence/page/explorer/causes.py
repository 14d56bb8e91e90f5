"""What taught an opened record's action: the strip over all rounds and the moments that raised or lowered it most."""

from collections.abc import Callable
from typing import Any

import polars as pl

from whence.diagnosis.causes import RankedMoment
from whence.errors import RunDirectoryError, WhenceError
from whence.page.cause_view import BY, CauseView, Decision, gather_causes, place_record, tell_causes, tell_decision
from whence.page.explorer import opening, parts
from whence.page.explorer.columns import name_action, round_number, round_numbers
from whence.page.explorer.explored_run import ExploredRun
from whence.page.explorer.frames import make_thumb
from whence.page.explorer.rounds import describe_moment

MOMENTS = 6
"""Moments at either end that the page shows."""


def build_causes(
    run: ExploredRun, number: int, record: int, *, by: str = "influence", go_on: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Return in JSON types what taught the policy the action of a record.

    Args:
        run: the run of an agent.
        number: the round.
        record: the record's id.
        by: a key of `BY`.
        go_on: called before each round is scored; what it raises ends the work.

    Raises:
        RunDirectoryError: the round or the record is not there, or the policy cannot be built again.
        WhenceError: the run is a language model's, or its actions are continuous and `by` asks which are the same.
    """
    if run.is_language:
        raise WhenceError("Language models' responses have no such answer yet: only agents' runs have.")
    row = find_row(run, number, record)
    go_on()
    target, (before, after, is_discrete) = parts.read_decision(run.directory, number, record, env=run.env)
    tables = []
    for table in parts.iterate_causes(run.directory, target, method=BY[by], env=run.env):
        tables.append(table)
        go_on()
    action = name_action(row.get("action"), run.labels()) or "–"
    decision = Decision(action, place_record(number, row), before, after, is_discrete)
    view = gather_causes(
        run.directory,
        pl.concat(tables, how="diagonal_relaxed"),
        decision,
        env_name=run.find_env(),
        method=BY[by],
        action_labels=run.labels(),
        most=MOMENTS,
    )
    return describe_causes(run, view) | {"record": record, "round": number, "by": by}


def find_row(run: ExploredRun, number: int, record: int) -> dict[str, Any]:
    """Return a record's row.

    Raises:
        RunDirectoryError: the round or the record is not there, or the file is damaged.
    """
    with opening.explain_parquet(opening.locate_records(run.directory, number)):
        rows = opening.scan_records(run.directory, number).filter(pl.col("record_id") == record).collect()
    if rows.is_empty():
        raise RunDirectoryError(f"Round {number} of {run.directory.path} has no record {record}.")
    return rows.row(0, named=True)


def describe_causes(run: ExploredRun, view: CauseView) -> dict[str, Any]:
    """Return what taught a decision in JSON types, with thumbnails of the moments."""
    frames, note = parts.replay_faces(run.directory, [*view.raised, *view.lowered], env=run.env)
    thumbs = {key: make_thumb(frame) for key, frame in frames.items()}

    def describe(entry: RankedMoment) -> dict[str, Any]:
        about = describe_moment(entry.moment, run.labels())
        return about | {"round": entry.round, "thumb": thumbs.get(entry.moment.record_id)}

    return {
        "decision": tell_decision(view.decision),
        "text": tell_causes(view),
        "rounds": view.rounds["round"].to_list(),
        "sums": {name: round_numbers(view.rounds[name].to_list()) for name in ("raised", "lowered")},
        "raised": [describe(entry) for entry in view.raised],
        "lowered": [describe(entry) for entry in view.lowered],
        "total": {name: round_number(view.rounds[name].sum()) for name in ("raised", "lowered")},
        "note": note,
    }
