"""One record, opened: its surroundings, state, policy, advantage and frames, and what taught its action, as JSON."""

import base64
import io
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.diagnosis import RankedMoment
from whence.errors import WhenceError
from whence.moments import find_moment
from whence.page.cause_view import CauseView, gather_causes, read_decision, replay_faces, tell_causes, tell_decision
from whence.page.explored_run import ExploredRun
from whence.page.explorer.grid import name_action, round_number, round_numbers, short_text
from whence.page.explorer.responses import describe_response, list_group, name_target
from whence.page.explorer.rounds import describe_moment
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
        "window": list_curves(view.window, run, digits=6) if with_window else None,
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


def list_curves(table: pl.DataFrame, run: ExploredRun, digits: int) -> dict[str, Any]:
    """Return records' numbers as arrays in the table's order; a column that is not there holds nulls."""

    def read(name: str) -> list[Any]:
        return table[name].to_list() if name in table.columns else [None] * len(table)

    names = {"steps": "step", "rewards": "reward", "values": "value", "advantages": "advantage", "scores": "score"}
    return {
        "record_ids": table["record_id"].to_list(),
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


WIDTH = 300
"""Pixels of a frame's width at most."""

QUALITY = 50
"""Of lossy WebP; edges of drawn environments stay legible."""

THUMB = 96
"""Pixels of a thumbnail's width."""

BEFORE, AFTER = 8, 3
"""Frames before and after a moment's face."""


def choose_steps(step: int) -> list[int]:
    """Return the steps whose frames show the moment around a step, from 0 on."""
    return list(range(max(0, step - BEFORE), step + AFTER + 1))


def encode_frames(
    frames: Collection[NDArray[np.uint8]], *, width: int = WIDTH, quality: int = QUALITY
) -> tuple[list[str], int, int]:
    """Return frames as data URIs, each lossless or lossy, whichever is smaller; and their width and height.

    Args:
        frames: (height, width, 3) each, of one size.
        width: the most pixels of width; smaller frames stay as they are.
        quality: of lossy WebP, from 0 to 100.
    """
    size = (0, 0)
    images = []
    for frame in frames:
        image = _shrink(frame, width)
        size = image.size
        images.append(_encode_smallest(image.tobytes(), size, quality))
    return images, *size


def make_thumb(frame: NDArray[np.uint8]) -> str:
    """Return a thumbnail of a frame as a data URI."""
    return _as_uri(_encode(_shrink(frame, THUMB), lossless=False, quality=40))


def _shrink(frame: NDArray[np.uint8], width: int) -> Any:
    from PIL import Image

    pixels = np.asarray(frame)
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[..., None], 3, axis=2)
    image = Image.fromarray(np.ascontiguousarray(pixels[..., :3].astype(np.uint8)))
    if image.width > width:
        image = image.resize((width, max(1, round(image.height * width / image.width))), Image.Resampling.BOX)
    return image


@lru_cache(maxsize=64)  # moments overlap, and in a small world the same frames come again and again
def _encode_smallest(pixels: bytes, size: tuple[int, int], quality: int) -> str:
    from PIL import Image

    image = Image.frombytes("RGB", size, pixels)
    encodings = _encode(image, lossless=True, quality=40), _encode(image, lossless=False, quality=quality)
    return _as_uri(min(encodings, key=len))


def _encode(image: Any, *, lossless: bool, quality: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", lossless=lossless, quality=quality, method=3)
    return buffer.getvalue()


def _as_uri(data: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(data).decode("ascii")
