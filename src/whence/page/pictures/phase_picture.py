"""A behaviour's history as a PNG: sentences, curves over rounds, and a frame of the top moment of each phase."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whence.errors import WhenceError, first_line
from whence.experiments import AnyEnv
from whence.page.moment_view import format_number
from whence.page.pictures.canvas import (
    DPI,
    GREY,
    HELP,
    INK,
    LINE,
    WIDTH,
    check_libraries,
    save_png,
    shorten,
    style_axes,
    wrap,
    write_text,
)
from whence.runs import RunDirectory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROUGHNESS, RELATIVE = "#e27411", "#1ba764"
_PANELS = ((0.055, 0.26), (0.385, 0.26), (0.715, 0.26))  # left and width of the curves
_TALL = 2.6  # inches of the curves


class Still(NamedTuple):
    """The top moment of a phase, drawn.

    Attributes:
        caption: the phase and the moment in words.
        frame: (height, width, 3), or None.
        note: why there is no frame.
    """

    caption: str
    frame: NDArray[np.uint8] | None
    note: str


def draw_picture(run: RunDirectory, content: Mapping[str, Any], path: Path, *, env: AnyEnv = None) -> None:
    """Write the picture of a history.

    Args:
        run: the run, whose episodes are played again.
        content: a summary of `summarise_history`.
        path: the file, a PNG.
        env: see `replay_episode`.

    Raises:
        Unsupported: Matplotlib or Pillow is not installed.
    """
    check_libraries()
    stills = [replay_top(run, phase, env) for phase in content["phases"] if phase["moments"]]
    save_png(lay_out(content, stills), path)


def replay_top(run: RunDirectory, phase: Mapping[str, Any], env: AnyEnv = None) -> Still:
    """Return a phase's top moment with its frame, or why there is none."""
    from whence.experiments import replay_episode

    moment = phase["moments"][0]
    caption = (
        f"Rounds {phase['first']}–{phase['last']}, record {moment['record']} of round {moment['round']}: "
        f"{moment['action']}, raw advantage {format_number(moment['advantage'])}"
    )
    episode, step = moment["episode_id"], moment["step"]
    if episode is None or step is None:
        return Still(caption, None, "No frame: the record's episode or step is not known.")
    try:
        replay = replay_episode(run, episode, env=env, frames=[step], last_step=step)
    except WhenceError as missing:
        return Still(caption, None, f"No frame: {first_line(missing)}")
    note = replay.mismatch or replay.frames_note or "the replay ended before this step."
    return Still(caption, replay.frames.get(step), f"No frame: {note}")


def lay_out(content: Mapping[str, Any], stills: Sequence[Still]) -> "Figure":
    """Return the figure of a summary and its stills."""
    from matplotlib.figure import Figure

    sentences = [wrap(sentence, 130) for sentence in content["sentences"]]
    lines = sum(text.count("\n") + 1 for text in sentences)
    head = 0.75 + 0.235 * lines
    height = head + _TALL + 0.95 + (3.0 if stills else 0)
    figure = Figure(figsize=(WIDTH / DPI, height), dpi=DPI, facecolor="white")
    write_text(figure, 0.02, 1 - 0.32 / height, shorten(content["behaviour"]["name"], 90), 17, INK, weight="bold")
    top = 1 - 0.62 / height
    for text in sentences:
        write_text(figure, 0.02, top, text, 11.5, INK, vertical="top")
        top -= 0.235 * (text.count("\n") + 1) / height
    bottom = 1 - (head + 0.3 + _TALL) / height
    panels = [figure.add_axes((left, bottom, width, _TALL / height)) for left, width in _PANELS]
    _draw_curves(panels, content)
    for place, still in enumerate(stills):
        _draw_still(figure, still, (0.02 + 0.33 * place, 0.15 / height, 0.3, 2.2 / height))
    return figure


def _draw_curves(panels: "Sequence[Axes]", content: Mapping[str, Any]) -> None:
    """Draw the probability, the roughness with the band of permuted scores, and the one over the other."""
    rounds, numbers = content["rounds"], content["rounds"]["round"]
    after = [numbers[-1] + 1] * (len(content["preference"]) - len(numbers))
    kind = "log-density" if content["is_density"] else "π(a|s)"
    panels[0].plot([*numbers, *after], content["preference"], color=HELP, linewidth=1.6)
    if not content["is_density"]:
        panels[0].set_ylim(0, 1.03)
    columns = {name: np.array(rounds[name], float) for name in ("roughness", "expected", "low", "high", "relative")}
    panels[1].fill_between(numbers, columns["low"], columns["high"], color=GREY, alpha=0.3, linewidth=0)
    panels[1].plot(numbers, columns["expected"], color=GREY, linestyle=":", label="permuted scores")
    panels[1].plot(numbers, columns["roughness"], color=ROUGHNESS, linewidth=1.6, label="roughness")
    panels[1].legend(frameon=False, fontsize=10, labelcolor=INK)
    panels[2].axhline(1, color=GREY, linestyle=":")
    panels[2].plot(numbers, columns["relative"], color=RELATIVE, linewidth=1.6)
    for phase in content["phases"]:
        panels[1].hlines(phase["roughness"], phase["first"], phase["last"], color=ROUGHNESS, linewidth=5, alpha=0.35)
        if phase["relative"] is not None:
            panels[2].hlines(phase["relative"], phase["first"], phase["last"], color=RELATIVE, linewidth=5, alpha=0.35)
    for axes, title in zip(panels, (kind, "roughness", "roughness / permuted"), strict=True):
        axes.set_title(title, fontsize=12, color=INK, loc="left", parse_math=False)
        axes.set_xlabel("round", fontsize=11, color=INK)
        style_axes(axes)
        for phase in content["phases"][:-1]:
            axes.axvline(phase["last"] + 0.5, color=GREY, linestyle="--", linewidth=0.8)
    for axes in panels[1:]:
        axes.set_ylim(bottom=0)


def _draw_still(figure: "Figure", still: Still, box: tuple[float, float, float, float]) -> None:
    axes = figure.add_axes(box)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(LINE)
    axes.set_title(wrap(still.caption, 46), fontsize=10.5, color=INK, loc="left", parse_math=False)
    if still.frame is not None:
        axes.imshow(still.frame, aspect="equal", interpolation="antialiased")
        return
    text = wrap(still.note, 40)
    axes.text(0.05, 0.5, text, fontsize=10.5, color=GREY, va="center", transform=axes.transAxes, parse_math=False)
