"""Pictures of what taught a decision."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whence.diagnosis import RankedMoment
from whence.moments import name_action
from whence.page.cause_view import SCORED, CauseView, tell_causes, tell_decision
from whence.page.pictures.canvas import (
    DPI,
    GREY,
    HARM,
    HELP,
    INK,
    WIDTH,
    check_libraries,
    check_picture_name,
    draw_frame,
    save_png,
    shorten,
    style_axes,
    wrap,
    write_text,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 5
"""Moments at either end that a picture shows."""

Frame = NDArray[np.uint8]


def draw_causes(view: CauseView, path: Path) -> None:
    """Write a picture: the decision's frame, influence over rounds, and the top moments' frames.

    Args:
        view: what taught the decision; frames may be missing.
        path: the file; its name ends in .png.

    Raises:
        WhenceError: the name ends otherwise.
        Unsupported: Matplotlib or Pillow is not installed.
    """
    check_picture_name(path, ".png")
    check_libraries()
    from matplotlib.figure import Figure

    ends = {"These moments raised it most": view.raised, "These moments lowered it most": view.lowered}
    rows = [(name, entries[:SHOWN]) for name, entries in ends.items() if entries]
    tall = [_measure_row(view, entries) for _, entries in rows]
    height = 4.75 + sum(tall)
    figure = Figure(figsize=(WIDTH / DPI, height), dpi=DPI, facecolor="white")
    top = _write_heading(figure, view, height)
    left = 0.08
    if view.decision.frame is not None:
        draw_frame(figure, view.decision.frame, (0.02, top - 2.35 / height, 0.25, 2.3 / height), (INK, 3))
        left = 0.36
    _draw_rounds(figure, view, (left, top - 2.3 / height, 0.98 - left, 2.1 / height))
    top -= 2.95 / height
    for (name, entries), size in zip(rows, tall, strict=True):
        _draw_row(figure, view, name, entries, (top, size), height)
        top -= size / height
    save_png(figure, path)


def _write_heading(figure: "Figure", view: CauseView, height: float) -> float:
    """Write the lines on top and return where they end."""
    decision = wrap(f"What taught this? {tell_decision(view.decision)}", 96, 2)
    lines = decision.count("\n") + 1
    write_text(figure, 0.02, 1 - 0.2 / height, decision, 15, INK, weight="bold", vertical="top")
    answer = wrap(tell_causes(view), 140, 2)
    write_text(figure, 0.02, 1 - (0.3 + 0.3 * lines) / height, answer, 11.5, INK, vertical="top")
    lines += answer.count("\n") + 1
    scored = SCORED[view.by]
    about = f"{view.env or view.run}; scored by {scored}" + (f". {view.frames_note}" if view.frames_note else "")
    write_text(figure, 0.02, 1 - (0.35 + 0.27 * lines) / height, shorten(about, 170), 10.5, GREY, vertical="top")
    return 1 - (0.75 + 0.27 * lines) / height


def _draw_rounds(figure: "Figure", view: CauseView, box: tuple[float, float, float, float]) -> None:
    """Draw what each round did: bars upwards for what raised the decision, downwards for what lowered it."""
    axes = figure.add_axes(box)
    numbers = view.rounds["round"].to_numpy()
    axes.bar(numbers, view.rounds["raised"].to_numpy(), width=0.85, color=HELP, linewidth=0)
    axes.bar(numbers, view.rounds["lowered"].to_numpy(), width=0.85, color=HARM, linewidth=0)
    axes.axhline(0, color=INK, linewidth=0.8)
    for entries, colour, marker, y in ((view.raised, HELP, "v", 1.04), (view.lowered, HARM, "^", 0.02)):
        rounds = sorted({entry.round for entry in entries[:SHOWN]})
        place = axes.get_xaxis_transform()
        ys = [y] * len(rounds)
        axes.plot(rounds, ys, marker, color=colour, markersize=6, clip_on=False, transform=place)
    axes.set_xlim(numbers.min() - 0.7, numbers.max() + 0.7)
    axes.set_xlabel("round   (▼ ▲: rounds of the moments below)", fontsize=10.5, color=INK, labelpad=8)
    axes.set_ylabel("sum of scores", fontsize=10.5, color=INK)
    style_axes(axes)
    axes.locator_params(axis="x", integer=True)
    axes.margins(y=0.08)


def _measure_row(view: CauseView, entries: Sequence[RankedMoment]) -> float:
    """Return the height of a row of moments, in inches."""
    shapes = [view.frames[entry.moment.record_id].shape for entry in entries if entry.moment.record_id in view.frames]
    if not shapes:
        return 1.1
    return 1.05 + min(_WIDTH * WIDTH / DPI * float(shapes[0][0] / shapes[0][1]), 2.2)


_GAP = 0.01
_WIDTH = (0.96 - _GAP * (SHOWN - 1)) / SHOWN


def _draw_row(
    figure: "Figure",
    view: CauseView,
    name: str,
    entries: Sequence[RankedMoment],
    place: tuple[float, float],
    height: float,
) -> None:
    """Draw moments side by side; `place`: the row's upper edge, as a share of the figure, and its height in inches."""
    top, size = place
    colour = HARM if entries[0].moment.score < 0 else HELP
    write_text(figure, 0.02, top, name, 12, colour, weight="bold", vertical="top")
    tall = size - 1.05
    for column, entry in enumerate(entries):
        left = 0.02 + column * (_WIDTH + _GAP)
        moment = entry.moment
        under = top - 0.3 / height
        if (frame := view.frames.get(moment.record_id)) is not None:
            draw_frame(figure, frame, (left, under - tall / height, _WIDTH, tall / height))
            under -= tall / height
        where = "" if moment.step is None else f", episode {moment.episode_id}, step {moment.step}"
        advantage = "–" if moment.advantage is None else f"{moment.advantage:+.3g}"
        lines = [
            shorten(f"round {entry.round}{where}", 36),
            shorten(f"{name_action(moment.action, view.action_labels)}, advantage {advantage}", 38),
            f"score {moment.score:+.3g}",
        ]
        for line, text in enumerate(lines):
            write_text(figure, left, under - (0.12 + 0.18 * line) / height, text, 9.5, INK if line else GREY)
