"""Pictures of what taught a decision."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence.page.cause_view import SCORED, CauseView
from whence.page.pictures.canvas import (
    GREY,
    HARM,
    HELP,
    INK,
    add_axes,
    check_picture_name,
    draw_frame,
    make_figure,
    render,
    save_picture,
    style_axes,
    write_lines,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 5
"""Moments at either end that a picture shows."""


def draw_causes(view: CauseView, path: Path) -> None:
    """Write a picture: the decision's frame, sums of scores over rounds, and the top moments' frames.

    Args:
        view: what taught the decision; frames may be missing.
        path: the file; its name ends in .png.

    Raises:
        WhenceError: the name ends otherwise.
        Unsupported: Matplotlib or Pillow is not installed.
    """
    check_picture_name(path, ".png")
    ends = {"raised": view.raised[:SHOWN], "lowered": view.lowered[:SHOWN]}
    ends = {name: rows for name, rows in ends.items() if rows}
    row = 2.4 if view.frames else 1.1
    figure = make_figure(5 + row * len(ends))
    about = ". ".join([f"{view.env or view.run}; scored by {SCORED[view.by]}", *view.notes])
    question = f"What taught this? {view.decision.text}"
    top = write_lines(figure, [(question, 15, INK), (view.text, 11.5, INK), (about, 10.5, GREY)])
    frame = view.decision.frame
    if frame is not None:
        draw_frame(add_axes(figure, 1, 1, top + 0.2, top + 2.5, right=0.27)[0], frame, edge=(INK, 3))
    (rounds,) = add_axes(figure, 1, 1, top + 0.2, top + 2.5, left=0.08 if frame is None else 0.36)
    _draw_rounds(rounds, view, ends)
    top += 3.2
    for name, rows in ends.items():
        colour, side = (HELP, "for") if name == "raised" else (HARM, "against")
        place = 1 - top / figure.get_figheight()
        figure.text(0.02, place, f"These moments speak {side} it most", fontsize=12, color=colour, fontweight="bold")
        for axes, entry in zip_longest(add_axes(figure, 1, SHOWN, top + 0.75, top + row), rows):
            picture = None if entry is None else view.frames.get(entry["record"])
            draw_frame(axes, picture, "" if entry is None else _describe(entry))
        top += row + 0.15
    save_picture(render(figure), path)


def _draw_rounds(axes: "Axes", view: CauseView, ends: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw each round's sums: bars upwards for what speaks for the decision, downwards for what speaks against it."""
    numbers = view.rounds["round"].to_numpy()
    marks = {"raised": (HELP, "v", 1.04), "lowered": (HARM, "^", 0.02)}
    for name, (colour, marker, y) in marks.items():
        axes.bar(numbers, view.rounds[name].to_numpy(), width=0.85, color=colour, linewidth=0)
        rounds = sorted({entry["round"] for entry in ends.get(name, ())})
        place = axes.get_xaxis_transform()
        axes.plot(rounds, [y] * len(rounds), marker, color=colour, markersize=6, clip_on=False, transform=place)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xlim(numbers.min() - 0.7, numbers.max() + 0.7)
    axes.set_xlabel("round   (▼ ▲: rounds of the moments below)", fontsize=10.5, color=INK, labelpad=8)
    axes.set_ylabel("sum of scores", fontsize=10.5, color=INK)
    style_axes(axes)
    axes.locator_params(axis="x", integer=True)
    axes.margins(y=0.08)


def _describe(entry: Mapping[str, Any]) -> str:
    where = "" if entry["step"] is None else f", episode {entry['episode']}, step {entry['step']}"
    advantage = "–" if entry["advantage"] is None else f"{entry['advantage']:+.3g}"
    return f"round {entry['round']}{where}: {entry['action']}, advantage {advantage}, score {entry['score']:+.3g}"
