"""One record, opened: its surroundings, state, policy, advantage and frames in JSON types."""

from typing import Any

import polars as pl

from whence.moments import find_moment
from whence.page.explored_run import ExploredRun
from whence.page.explorer.columns import name_action, round_number, round_numbers, short_text
from whence.page.explorer.frames import choose_steps, encode_frames
from whence.page.explorer.responses import describe_response, list_group, name_target
from whence.page.moment_view import GAUSSIANS, MomentView, PolicyChange, gather_moment

STATE = 64
"""Entries of a state that are shown at most."""

NOT_EMBEDDED = "This file has frames of the three worst and the three best moments of a round."


def build_detail(run: ExploredRun, number: int, record: int) -> dict[str, Any]:
    """Return a record and what surrounds it in JSON types, as the page's contract has it; rollouts are not made.

    Args:
        run: the run.
        number: the round.
        record: the record's id.

    Raises:
        RunDirectoryError: the round or the record is not there.
    """
    row = run.record(number, record)
    step = row.get("step")
    moment = find_moment(run.round(number).table, record)
    view = gather_moment(run, number, moment, steps=[0] if step is None else choose_steps(step))
    detail = describe_view(view, run, with_window=True)
    return detail | {"group": list_group(run.round(number), row.get("prompt"))} if run.is_language else detail


def describe_view(view: MomentView, run: ExploredRun, *, with_window: bool = False) -> dict[str, Any]:
    """Return a moment's record in JSON types.

    Args:
        view: the moment.
        run: its run.
        with_window: whether the numbers of the records around it are included.
    """
    row = view.row
    detail = {
        "record": view.moment.record_id,
        "round": view.round,
        "episode": row.get("episode_id"),
        "env": row.get("env_index"),
        "step": row.get("step"),
        "action": name_action(row.get("action"), run.labels) or "–",
        "dropped": row.get("keep") is False,
        "weight": round_number(row.get("weight")),
        "reason": None if row.get("reason") is None else short_text(row["reason"]),
        "window": _describe_window(view, run) if with_window else None,
        "advantage": round_number(row.get("advantage")),
        "targets": _list_targets(view, run),
    }
    # A response has nothing of what only steps in an environment have.
    detail |= {"state": [], "state_size": len(view.state), "policy": None, "value_before": None, "value_after": None}
    detail |= {"frames": None, "frames_note": view.frames_note}
    if run.is_language:
        return detail | {"mc_advantage": None, "mc_error": None, "mc_text": None} | describe_response(row)
    values = (row.get("value"), None) if view.policy is None else view.policy.values
    return detail | {
        "state": [
            {"name": name, "value": short_text(entry) if isinstance(entry, str) else round_number(entry)}
            for name, entry in view.state[:STATE]
        ],
        "policy": None if view.policy is None else _describe_policy(view.policy),
        "value_before": round_number(values[0]),
        "value_after": round_number(values[1]),
        **describe_advantage(view.estimate, view.estimate_note, view.run),
        "frames": encode_view(view),
    }


def describe_advantage(estimate: tuple[float, float] | None, note: str, run: str) -> dict[str, Any]:
    """Return in JSON types the advantage that fresh rollouts measured, or why they did not; see `measure_advantage`."""
    mean, error = estimate or (None, None)
    text = f"Measured by {note}, from the same state." if estimate else f"Not measured by fresh rollouts: {note}"
    text = text if note else f"`whence view {run}` measures it by fresh rollouts when a record is opened."
    return {"mc_advantage": round_number(mean), "mc_error": round_number(error), "mc_text": text}


def encode_view(view: MomentView, **encoding: int) -> dict[str, Any] | None:
    """Return a moment's frames in JSON types, encoded as `encode_frames` does; None if there are none."""
    if not view.frames or view.moment.step is None:
        return None
    images, width, height = encode_frames(list(view.frames.values()), **encoding)
    steps = list(view.frames)
    return {"steps": steps, "face": steps.index(view.moment.step), "width": width, "height": height, "images": images}


def _describe_window(view: MomentView, run: ExploredRun) -> dict[str, Any]:
    return {"record_ids": view.window["record_id"].to_list(), **list_curves(view.window, run, digits=6)}


def list_curves(table: pl.DataFrame, run: ExploredRun, digits: int) -> dict[str, Any]:
    """Return records' numbers as arrays in the table's order; a column that is not there holds nulls."""

    def read(name: str) -> list[Any]:
        return table[name].to_list() if name in table.columns else [None] * len(table)

    names = {"steps": "step", "rewards": "reward", "values": "value", "advantages": "advantage", "scores": "score"}
    return {
        **{key: round_numbers(read(name), digits) for key, name in (names | {"errors": "error"}).items()},
        "dropped": [int(kept is False) for kept in read("keep")],
        "actions": [name_action(action, run.labels) or "–" for action in read("action")],
    }


def _list_targets(view: MomentView, run: ExploredRun) -> list[dict[str, Any]]:
    score = view.row.get("score")
    if score is None:
        return []
    target = run.directory.config.get("target")
    name = name_target(target) if run.is_language else "return" if target in (None, "Return()") else target
    numbers = {"score": round_number(score), "error": round_number(view.row.get("error"))}
    return [{"name": short_text(name, 80), **numbers, "significant": view.is_significant}]


def _describe_policy(change: PolicyChange) -> dict[str, Any]:
    before, after = round_numbers(change.before, 4), round_numbers(change.after, 4)
    policy: dict[str, Any] = {"kind": change.kind, "labels": list(change.names)}
    if change.kind != GAUSSIANS:
        return policy | {"before": before, "after": after}
    spreads = [round_numbers(spread, 4) for spread in change.spreads]
    return policy | {"mean_before": before, "std_before": spreads[0], "mean_after": after, "std_after": spreads[1]}
