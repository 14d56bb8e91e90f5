"""Rounds as they are embedded in the offline file: compressed, with frames that fit its budget."""

import base64
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from whence.errors import WhenceError, first_line
from whence.page.explorer import opening
from whence.page.explorer.columns import round_numbers
from whence.page.explorer.detail import (
    NOT_EMBEDDED,
    Frames,
    build_detail,
    list_curves,
    pick_frames,
    replay_steps,
)
from whence.page.explorer.explored_run import ExploredRun
from whence.page.explorer.frames import choose_steps, make_thumb
from whence.page.explorer.responses import list_groups
from whence.page.explorer.rounds import build_round, order_strip

FRAMED = 3
"""Moments at either end of a round that have frames."""

COMPARED_ROUNDS = 12
"""Rounds of each run that a comparison's file holds at most."""

BUDGET = 19_000_000
"""Bytes of all embedded rounds together that frames may fill up: with Plotly and the grid a file stays below 25 MB."""

DIGITS = 4
"""Significant digits of a number in the file."""

CURVE_DIGITS, ERROR_DIGITS = 3, 2
"""Those of the curves around moments, which are drawn and not read: they are of every record."""

_ENCODINGS = (
    {"width": 300, "quality": 50},
    {"width": 300, "quality": 25},
    {"width": 240, "quality": 25},
    {"width": 200, "quality": 20},
)
"""Encodings of frames, in the order in which they are tried until a round fits its share of the budget."""

OnRound = Callable[[int, int], None]
"""Called with the number of rounds that are done, and of all."""


class EmbeddedRound(NamedTuple):
    """A round in the file: the id of its script element, and its text."""

    id: str
    text: str


def spread(numbers: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of some numbers: the first, the last, and others evenly between."""
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[at] for at in np.linspace(0, len(numbers) - 1, most).round().astype(int)]


def embed_rounds(
    runs: Sequence[ExploredRun],
    rounds: Sequence[Sequence[int]],
    *,
    continuations: int = 0,
    budget: int = BUDGET,
    on_round: OnRound | None = None,
) -> Iterator[EmbeddedRound]:
    """Yield each round of some runs as the file embeds it: JSON, compressed by gzip, as base64.

    Args:
        runs: the runs, in the order of their numbers on the page.
        rounds: of each run.
        continuations: rollouts by which the advantages of framed moments are measured; 0: they are not.
        budget: bytes of all rounds together.
        on_round: called after each round.
    """
    total = sum(map(len, rounds))
    done = level = 0
    for index, (run, numbers) in enumerate(zip(runs, rounds, strict=True)):
        for number in numbers:
            content = _build_content(run, number, continuations)
            # The next round most likely needs as small frames as this one.
            text, level = _fit(content, budget // max(1, total), max(0, level - (number % 8 == 0)))
            yield EmbeddedRound(f"round-{index}-{number}", text)
            done += 1
            if on_round is not None:
                on_round(done, total)


class _Content(NamedTuple):
    """A round before its frames are encoded: what is embedded, and the replays by record."""

    parts: dict[str, Any]
    replays: dict[int, tuple[Any, int, list[int]]]


def _build_content(run: ExploredRun, number: int, continuations: int) -> _Content:
    try:
        shown = build_round(run, number, rows=True)
    except (WhenceError, *opening.FOREIGN) as refusal:
        return _Content({"round": _make_empty_round(number, first_line(refusal)), "details": {}, "columns": {}}, {})
    framed = [moment for end in ("worst", "best") for moment in shown[end][:FRAMED]]
    replays, refusals = ({}, {}) if run.is_language else _replay_moments(run, framed)
    details: dict[str, Any] = {}
    measured = {moment["record"] for moment in framed} if continuations else set()
    for moment in [*shown["worst"], *shown["best"]]:
        record = moment["record"]
        frames = Frames(None, refusals[record]) if record in refusals else NOT_EMBEDDED
        details[str(record)] = build_detail(
            *(run, number, record),
            frames=frames,
            continuations=continuations if record in measured else 0,
            window=False,
            group=False,
        )
    table = run.round(number).table
    order = order_strip(table, []) if len(table) == len(shown["strip"]["record_ids"]) else None
    if order is None:
        wanted = shown["strip"]["record_ids"]
        places = {record: place for place, record in enumerate(table["record_id"].to_list())}
        order = table[[places[record] for record in wanted]]
    curves = list_curves(order, run, CURVE_DIGITS)
    if "error" in order.columns:  # rounded once: twice may be another number
        curves["errors"] = round_numbers(order["error"].to_list(), ERROR_DIGITS)
    shown["strip"]["scores"] = round_numbers(shown["strip"]["scores"], CURVE_DIGITS)
    columns = {name: values for name, values in curves.items() if name not in ("scores", "dropped")}
    parts: dict[str, Any] = {"round": shown, "details": details, "columns": columns}
    if run.is_language:
        # Once for all of a prompt's responses, since each of them shows the others.
        parts["groups"] = list_groups(run.round(number), [int(record) for record in details])
    return _Content(parts, replays)


def _replay_moments(
    run: ExploredRun, moments: Sequence[dict[str, Any]]
) -> tuple[dict[int, tuple[Any, int, list[int]]], dict[int, str]]:
    """Replay each episode of some moments once.

    Returns:
        By record: the replay, the face's step and the steps shown; and, by record, why there is no replay.
    """
    replays: dict[int, tuple[Any, int, list[int]]] = {}
    refusals: dict[int, str] = {}
    by_episode: dict[int, list[dict[str, Any]]] = {}
    for moment in moments:
        if moment["episode"] is None or moment["step"] is None:
            refusals[moment["record"]] = "The record's episode is not known, so it cannot be replayed."
        else:
            by_episode.setdefault(moment["episode"], []).append(moment)
    for episode, group in by_episode.items():
        steps = {moment["record"]: choose_steps(moment["step"]) for moment in group}
        replay, note = replay_steps(run, episode, sorted({step for chosen in steps.values() for step in chosen}))
        for moment in group:
            if replay is None:
                refusals[moment["record"]] = note or "The episode could not be replayed."
            else:
                replays[moment["record"]] = replay, moment["step"], steps[moment["record"]]
    return replays, refusals


def _fit(content: _Content, budget: int, level: int = 0) -> tuple[str, int]:
    """Return a round's text, with the best encoding of frames by which it fits, and the encoding's place.

    Args:
        content: the round.
        budget: bytes of the text.
        level: the place of the first encoding that is tried.
    """
    for place in range(level, len(_ENCODINGS)):
        _draw(content, _ENCODINGS[place])
        text = compress(shorten_numbers(content.parts))
        if len(text) <= budget or not content.replays:
            return text, place
    for _, step, steps in content.replays.values():  # too large still: every other frame
        steps[:] = [at for at in steps if (at - step) % 2 == 0]
    _draw(content, _ENCODINGS[-1])
    return compress(shorten_numbers(content.parts)), len(_ENCODINGS) - 1


def _draw(content: _Content, encoding: dict[str, int]) -> None:
    """Encode the frames of a round's moments into its details, and the faces' into the moments' thumbnails."""
    thumbs = {}
    for record, (replay, step, steps) in content.replays.items():
        shown = pick_frames(replay, step, steps, **encoding)
        content.parts["details"][str(record)] |= {"frames": shown.frames, "frames_note": shown.note}
        if shown.frames is not None:
            thumbs[record] = make_thumb(replay.frames[step])
    for end in ("worst", "best"):
        for moment in content.parts["round"][end]:
            if moment["record"] in thumbs:
                moment |= {"framed": True, "thumb": thumbs[moment["record"]]}


def compress(value: Any) -> str:
    """Return a value as JSON, compressed by gzip, as base64; equal values give equal text."""
    data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode("ascii")


def shorten_numbers(value: Any) -> Any:
    """Return JSON with its numbers rounded to `DIGITS` significant digits; those of integers stay."""
    if isinstance(value, float):
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short.is_integer() and abs(short) < 1e9 else short
    if isinstance(value, dict):
        return {key: shorten_numbers(entry) for key, entry in value.items()}
    return [shorten_numbers(entry) for entry in value] if isinstance(value, list) else value


def _make_empty_round(number: int, note: str) -> dict[str, Any]:
    strip: dict[str, Any] = {"episodes": [], "record_ids": [], "scores": [], "dropped": []}
    return {
        **{"round": number, "records": 0, "scored": False, "trust": [], "strip": strip},
        **{"worst": [], "best": [], "groups": {}, "changed": [], "rows": [], "notes": [note]},
    }
