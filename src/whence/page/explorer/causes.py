"""What taught an opened record's action: the strip over all rounds and the moments that raised or lowered it most."""

from collections.abc import Callable, Mapping
from typing import Any

from whence.diagnosis.causes import RankedMoment
from whence.errors import WhenceError
from whence.page.cause_view import CauseView, gather_causes, read_decision, replay_faces, tell_causes, tell_decision
from whence.page.explored_run import ExploredRun
from whence.page.explorer.columns import round_number, round_numbers
from whence.page.explorer.frames import make_thumb
from whence.page.explorer.rounds import describe_moment

MOMENTS = 6
"""Moments at either end that the page shows."""


def build_causes(
    run: ExploredRun,
    number: int,
    record: int,
    *,
    by: str = "influence",
    on_round: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Return in JSON types what taught the policy the action of a record, with thumbnails of the moments.

    Args:
        run: the run of an agent.
        number: the round.
        record: the record's id.
        by: a key of `BY`.
        on_round: see `gather_causes`.

    Raises:
        RunDirectoryError: the round or the record is not there, or the policy cannot be built again.
        WhenceError: the run is a language model's, or its actions are continuous and `by` asks which are the same.
    """
    if run.is_language:
        raise WhenceError("Language models' responses have no such answer yet: only agents' runs have.")
    target, decision = read_decision(run, number, record)
    view = gather_causes(run, target, decision, by=by, most=MOMENTS, on_round=on_round)
    frames, note = replay_faces(run, [*view.raised, *view.lowered])
    thumbs = {key: make_thumb(frame) for key, frame in frames.items()}
    return describe_causes(view, thumbs) | {"record": record, "round": number, "note": note}


def describe_causes(view: CauseView, thumbs: Mapping[int, str]) -> dict[str, Any]:
    """Return what taught a decision in JSON types.

    Args:
        view: what taught it.
        thumbs: pictures of the moments' faces as data URIs, by record.
    """

    def describe(entry: RankedMoment) -> dict[str, Any]:
        about = describe_moment(entry.moment, view.action_labels)
        return about | {"round": entry.round, "thumb": thumbs.get(entry.moment.record_id)}

    decision = view.decision
    return {
        "decision": tell_decision(decision),
        "log_prob_first": decision.before,
        "log_prob": decision.after,
        "by": view.by,
        "text": tell_causes(view),
        "rounds": view.rounds["round"].to_list(),
        "sums": {name: round_numbers(view.rounds[name].to_list()) for name in ("raised", "lowered")},
        "raised": [describe(entry) for entry in view.raised],
        "lowered": [describe(entry) for entry in view.lowered],
        "total": {name: round_number(view.rounds[name].sum()) for name in ("raised", "lowered")},
    }
