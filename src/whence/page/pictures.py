"""Pictures of a moment and of what taught a decision: frames with their numbers below a heading, as PNG or GIF."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.core import Unsupported, WhenceError, write_atomically
from whence.page.content import SCORED, CauseView, MomentView, PolicyChange, choose_frames, format_number
from whence.scores import name_action

if TYPE_CHECKING:
    from PIL.Image import Image

WIDTH, MARGIN, ACROSS = 1200, 24, 5
"""Pixels across, pixels around everything, and frames next to each other."""

HELP, HARM, GREY, INK, LINE = "#2f74e6", "#d1495b", "#7d8590", "#1f2328", "#d0d7de"

_NUMBERS = ("reward", "value", "advantage", "score")
_IN_FONT = str.maketrans({"–": "-", "−": "-"})  # Pillow's font lacks these
_MILLISECONDS, _FACE_MILLISECONDS = 120, 1200  # how long a frame of a GIF is shown

Line = tuple[str, int, str]
"""A paragraph with its letters' height in pixels and its colour."""


class Cell(NamedTuple):
    """A frame (height, width, 3), or none, with the text below it and its edge's colour and width."""

    frame: NDArray[np.uint8] | None
    text: str
    edge: tuple[str, int] = (LINE, 1)


Section = tuple[Sequence[Line], Sequence[Cell]]
"""Paragraphs, and the cells below them."""


def check_picture_name(path: Path, *endings: str) -> None:
    """Refuse a file name that does not end as a picture's that can be drawn."""
    if path.suffix.lower() not in endings:
        raise WhenceError(f"--out is {path}; its name has to end in {' or '.join(endings)}.")


def draw_moment(view: MomentView, path: Path) -> None:
    """Write a moment's picture: PNG, frames side by side; GIF, one after the other."""
    moment, facts = view.moment, view.facts
    colour = HARM if moment.score < 0 else HELP
    rollouts = [f"Fresh rollouts: {facts.pop('fresh rollouts')}"] if "fresh rollouts" in facts else []
    heading = [
        (f"Record {moment.record_id}: score {facts.pop('score')}", 24, colour),
        (view.place, 17, GREY),
        ("   ·   ".join(f"{name}: {text}" for name, text in facts.items()), 17, INK),
    ]
    if view.policy is not None:
        changes = "; ".join(_list_largest_changes(view.policy))
        heading.append((f"The policy in this state, before and after the round: {changes}", 17, INK))
    heading += [(note, 15, GREY) for note in (*rollouts, view.policy_note, view.frames_note) if note]
    steps = [*view.frames] or choose_frames(view.window, moment)
    cells = [
        Cell(view.frames.get(step), _describe_step(view, step), (colour, 5) if step == moment.step else (LINE, 1))
        for step in steps
    ]
    if path.suffix.lower() == ".png" or not view.frames:
        _save([_draw([(heading, cells)])], path)
    else:
        durations = [_FACE_MILLISECONDS if step == moment.step else _MILLISECONDS for step in steps]
        _save([_draw([(heading, [cell])], across=2) for cell in cells], path, duration=durations, loop=0)


def _list_largest_changes(change: PolicyChange) -> list[str]:
    """Return the four actions whose probabilities, or means, changed most, before and after."""
    order = sorted(zip(change.names, change.before, change.after, strict=True), key=lambda one: -abs(one[2] - one[1]))
    return [f"{name} {before:.3g} to {after:.3g}" for name, before, after in order[:4]]


def _describe_step(view: MomentView, step: int) -> str:
    row = view.window.row(by_predicate=pl.col("step") == step, named=True)
    numbers = [f"{name} {format_number(row[name])}" for name in _NUMBERS if name in row]
    return "\n".join([f"step {step}: {name_action(row.get('action'), view.action_labels)}", *numbers])


def draw_causes(view: CauseView, path: Path) -> None:
    """Write a picture, PNG: the decision's frame, and those of the moments that speak for it and against it most."""
    about = ". ".join([f"{view.env or view.run}; scored by {SCORED[view.by]}", *view.notes])
    heading = [(f"What taught this? {view.decision.text}", 22, INK), (view.text, 17, INK), (about, 15, GREY)]
    decision = [] if view.decision.frame is None else [Cell(view.decision.frame, "", (INK, 4))]
    sections: list[Section] = [(heading, decision)]
    for rows, colour, side in ((view.raised, HELP, "for"), (view.lowered, HARM, "against")):
        cells = [Cell(view.frames.get(row["record"]), _describe_cause(row)) for row in rows[:ACROSS]]
        sections += [([(f"These moments speak {side} it most", 19, colour)], cells)] if cells else []
    _save([_draw(sections)], path)


def _describe_cause(row: Mapping[str, Any]) -> str:
    where = "" if row["step"] is None else f", episode {row['episode']}, step {row['step']}"
    numbers = [f"{name} {format_number(row[name])}" for name in ("advantage", "score")]
    return "\n".join([f"round {row['round']}{where}: {row['action']}", *numbers])


def _draw(sections: Sequence[Section], across: int = ACROSS) -> "Image":
    """Return a picture of sections below each other, with so many cells in a row."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as missing:
        raise Unsupported("Pictures need Pillow, which is not installed: pip install '.[report]'.") from missing
    sheet, y = Image.new("RGB", (WIDTH, 5 * WIDTH), "white"), MARGIN
    pen, width = ImageDraw.Draw(sheet), (WIDTH - MARGIN) // across - MARGIN
    for lines, cells in sections:
        for text, size, colour in lines:
            y = _write(pen, text, (MARGIN, y), size, colour, WIDTH - 2 * MARGIN) + size // 2
        for start in range(0, len(cells), across):
            ends = [y]
            for place, cell in enumerate(cells[start : start + across]):
                x, below = MARGIN + place * (width + MARGIN), y
                if cell.frame is not None:
                    frame = Image.fromarray(np.ascontiguousarray(cell.frame)).convert("RGB")
                    frame = frame.resize((width, round(width * frame.height / frame.width)))
                    sheet.paste(frame, (x, y))
                    pen.rectangle((x, y, x + width - 1, y + frame.height - 1), outline=cell.edge[0], width=cell.edge[1])
                    below += frame.height + 6
                ends.append(_write(pen, cell.text, (x, below), 16, INK, width))
            y = max(ends) + MARGIN
    return sheet.crop((0, 0, WIDTH, y))


def _write(pen: Any, text: str, place: tuple[int, int], size: int, colour: str, width: int) -> int:
    """Write text in lines of at most so many pixels, and return where they end."""
    letters = int(width / (0.5 * size))  # letters are about half as wide as high
    lines = [
        line
        for part in text.translate(_IN_FONT).split("\n")
        for line in textwrap.wrap(part, letters, max_lines=3, placeholder="…")
    ]
    for number, line in enumerate(lines):
        pen.text((place[0], place[1] + number * size * 1.25), line, fill=colour, font_size=size)
    return place[1] + round(len(lines) * size * 1.25)


def _save(images: Sequence["Image"], path: Path, **settings: Any) -> None:
    """Write pictures to one file, atomically, in the format that its name says; all as high as the highest."""
    from PIL import ImageOps

    height = max(image.height for image in images)
    first, *others = [ImageOps.expand(image, (0, 0, 0, height - image.height), "white") for image in images]
    settings |= {"save_all": True, "append_images": others} if others else {}
    with write_atomically(path) as temporary:
        first.save(temporary, format=path.suffix[1:].upper(), **settings)
