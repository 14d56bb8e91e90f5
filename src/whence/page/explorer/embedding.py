"""Rounds as they are embedded in the offline file: compressed, with frames that fit its budget."""

import base64
import gzip
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from whence.moments import Moment
from whence.page.explored_run import ExploredRun
from whence.page.explorer.detail import NOT_EMBEDDED, choose_steps, describe_view, encode_view, list_curves, make_thumb
from whence.page.explorer.responses import list_groups
from whence.page.explorer.rounds import build_round, list_moments
from whence.page.moment_view import Frames, MomentView, gather_moment, pick_frames

FRAMED = 3
"""Moments at either end of a round that have frames."""

COMPARED_ROUNDS = 12
"""Rounds of each run that a comparison's file holds at most."""

BUDGET = 19_000_000
"""Bytes of all embedded rounds together that frames may fill up: with Plotly and the grid a file stays below 25 MB."""

DIGITS = 4
"""Significant digits of a number in the file."""

CURVE_DIGITS = 3
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
            parts, views = _build_content(run, number, continuations)
            # The next round most likely needs as small frames as this one.
            text, level = _fit(parts, views, budget // max(1, total), max(0, level - (number % 8 == 0)))
            yield EmbeddedRound(f"round-{index}-{number}", text)
            done += 1
            if on_round is not None:
                on_round(done, total)


def _build_content(run: ExploredRun, number: int, continuations: int) -> tuple[dict[str, Any], dict[int, MomentView]]:
    """Return a round before its frames are encoded, and by record the moments that have frames."""
    shown = build_round(run, number, rows=True)
    records = run.round(number)
    moments = [list_moments(records, [], lowest=lowest) for lowest in (True, False)]
    framed = [] if run.is_language else [moment for listed in moments for moment in listed[:FRAMED]]
    replays = _replay_moments(run, framed)
    views, details = {}, {}
    for moment in itertools.chain(*moments):
        record = moment.record_id
        view = gather_moment(run, number, moment, rollouts=continuations if moment in framed else 0)
        frames, note = replays.get(record, ({}, NOT_EMBEDDED))
        view = replace(view, frames=frames, frames_note=None if run.is_language else note)
        details[str(record)] = describe_view(replace(view, frames={}), run)
        if frames:
            views[record] = view
    wanted = pl.DataFrame({"record_id": shown["strip"]["record_ids"]}, schema={"record_id": pl.Int64})
    order = wanted.join(records.table, on="record_id", how="left", maintain_order="left")
    curves = list_curves(order, run, CURVE_DIGITS)
    shown["strip"]["scores"] = curves["scores"]
    for listed in (shown["worst"], shown["best"]):
        for about in listed:
            if about["record"] in views:
                about |= {"framed": True, "thumb": make_thumb(views[about["record"]].frames[about["step"]])}
    columns = {name: values for name, values in curves.items() if name not in ("record_ids", "scores", "dropped")}
    parts: dict[str, Any] = {"round": shown, "details": details, "columns": columns}
    if run.is_language:
        # Once for all of a prompt's responses, since each of them shows the others.
        parts["groups"] = list_groups(records, [int(record) for record in details])
    return parts, views


def _replay_moments(run: ExploredRun, moments: Sequence[Moment]) -> dict[int, tuple[Frames, str | None]]:
    """Replay each episode of some moments once; return frames and a note by record."""
    steps = {moment.record_id: choose_steps(moment.step or 0) for moment in moments}
    chosen: dict[int, set[int]] = {}
    for moment in moments:
        if moment.episode_id is not None and moment.step is not None:
            chosen.setdefault(moment.episode_id, set()).update(steps[moment.record_id])
    replays = {episode: run.replay(episode, sorted(wanted)) for episode, wanted in chosen.items()}
    return {moment.record_id: pick_frames(replays, moment, steps[moment.record_id]) for moment in moments}


def _fit(parts: dict[str, Any], views: Mapping[int, MomentView], budget: int, level: int) -> tuple[str, int]:
    """Return a round's text, with the best encoding of frames by which it fits, and the encoding's place.

    Args:
        parts: the round.
        views: by record the moments that have frames.
        budget: bytes of the text.
        level: the place of the first encoding that is tried.
    """
    for place in range(level, len(_ENCODINGS)):
        for record, view in views.items():
            parts["details"][str(record)]["frames"] = encode_view(view, **_ENCODINGS[place])
        text = compress(shorten_numbers(parts))
        if len(text) <= budget or not views:
            break
    return text, place


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
