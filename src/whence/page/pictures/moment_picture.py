"""Pictures of a moment: frames above strips of reward, value, advantage and score, as PNG or GIF."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whence.influence import is_significant
from whence.moments import Moment, name_action
from whence.page.moment_view import MomentView, PolicyChange, describe_score, format_number
from whence.page.pictures.canvas import (
    GREY,
    HARM,
    HELP,
    INK,
    LINE,
    add_axes,
    check_picture_name,
    draw_frame,
    make_figure,
    render,
    save_picture,
    style_axes,
    wrap,
    write_lines,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BEFORE, AFTER = "#b4b9c2", "#e27411"
_STRIPS = ("reward", "value", "advantage", "score")
POLICY_ROWS = 8
"""Actions whose probabilities are drawn at most."""
_MILLISECONDS, _FACE_MILLISECONDS = 120, 1200  # how long a frame of a GIF is shown


def draw_moment(view: MomentView, path: Path) -> None:
    """Write a moment's picture: PNG, frames side by side; GIF, frames one after the other and a cursor on the strips.

    Args:
        view: the moment. Its frames may be missing; then its note stands in their place.
        path: the file; its name ends in .png or .gif.

    Raises:
        WhenceError: the name ends otherwise.
        Unsupported: Matplotlib or Pillow is not installed.
    """
    check_picture_name(path, ".png", ".gif")
    is_animated = path.suffix.lower() == ".gif" and bool(view.frames)
    height = 8.6 if view.frames else 6.4
    figure = make_figure(height)
    top = _write_heading(figure, view)
    actions = dict(zip(_read(view, "step"), _read(view, "action"), strict=True))
    captions = {step: f"step {step}: {name_action(actions.get(step, '–'), view.action_labels)}" for step in view.frames}
    split = top + (3.4 if is_animated else 2.1 if view.frames else 0)
    frames = add_axes(figure, 1, 1 if is_animated else len(view.frames), top + 0.3, split) if view.frames else []
    colour = _choose_colour(view.moment)
    images = []
    for axes, step in zip(frames, view.frames, strict=False):
        edge = (colour, 4) if step == view.moment.step and not is_animated else (LINE, 1)
        images.append(draw_frame(axes, view.frames[step], captions[step], edge))
    strips = _draw_strips(figure, view, split + 0.3, height - 0.6)
    _draw_policy(figure, view, split + 0.3, height - 0.6)
    if not is_animated:
        save_picture(render(figure), path)
        return
    cursors = [axes.axvline(0, color=AFTER, linewidth=2) for axes in strips]
    pictures = []
    for step, frame in view.frames.items():
        images[0].set_data(frame)
        frames[0].set_title(wrap(captions[step], 60), fontsize=10, loc="left", parse_math=False)
        for cursor in cursors:
            cursor.set_xdata([step, step])
        pictures.append(render(figure))
    durations = [_FACE_MILLISECONDS if step == view.moment.step else _MILLISECONDS for step in view.frames]
    save_picture(pictures[0], path, save_all=True, append_images=pictures[1:], duration=durations, loop=0)


def _write_heading(figure: "Figure", view: MomentView) -> float:
    """Write the lines on top and return where they end."""
    moment, estimate = view.moment, view.estimate
    headline = f"Record {moment.record_id}: score {describe_score(moment.score, moment.error)}"
    colour = GREY if is_significant(moment.score, moment.error) is False else _choose_colour(moment)
    fate = "" if view.row.get("keep") is None else "; trained" if view.row["keep"] else "; dropped"
    is_measured = estimate is not None and estimate.mean is not None
    fresh = f" (by fresh rollouts {estimate.mean:.3g} ± {estimate.error:.2g})" if is_measured and estimate else ""
    numbers = [
        f"action: {view.action}",
        f"advantage {format_number(moment.advantage)}{fresh}",
        f"value {format_number(moment.value)}",
        f"return {format_number(moment.return_)}",
        f"reward {format_number(moment.reward)}",
    ]
    lines = [(headline, 17.0, colour), (f"{view.place}{fate}", 12.0, GREY), ("   ·   ".join(numbers), 12.0, INK)]
    return write_lines(figure, [*lines, *([(view.frames_note, 10.5, GREY)] if view.frames_note else [])])


def _draw_strips(figure: "Figure", view: MomentView, top: float, bottom: float) -> list["Axes"]:
    """Draw the curves between two heights, the first on top."""
    names = [name for name in _STRIPS if name in view.window.columns]
    strips = list(add_axes(figure, len(names), 1, top, bottom, left=0.085, right=0.67, hspace=0.15)) if names else []
    for axes, name in zip(strips, names, strict=True):
        _draw_strip(axes, view, name)
        axes.set_ylabel(name, fontsize=11, color=INK)
        axes.tick_params(labelbottom=axes is strips[-1])
    if strips:
        is_pale = "keep" in view.window.columns and not view.window["keep"].all()
        text = "record" if view.moment.step is None else "step of the episode"
        strips[-1].set_xlabel(f"{text}   (pale: dropped)" if is_pale else text, fontsize=11, color=INK)
        figure.align_ylabels(strips)
    return strips


def _draw_strip(axes: "Axes", view: MomentView, name: str) -> None:
    moment, colour = view.moment, _choose_colour(view.moment)
    steps, values = np.array(_read(view, "step"), float), np.array(_read(view, name), float)
    if moment.first_step is not None and moment.last_step is not None and moment.step is not None:
        axes.axvspan(moment.first_step - 0.5, moment.last_step + 0.5, color=colour, alpha=0.1, linewidth=0)
        axes.axvline(moment.step, color=colour, linewidth=1.2, alpha=0.7)
    axes.axhline(0, color=LINE, linewidth=0.8, zorder=0, visible=name in ("advantage", "score"))
    if name == "score":
        bars = axes.bar(steps, values, width=0.75, color=[HARM if value < 0 else HELP for value in values])
        for bar, keep in zip(bars, _read(view, "keep"), strict=True):
            bar.set_alpha(0.4 if keep is False else 1.0)
        errors = np.array(_read(view, "error"), float)
        axes.errorbar(steps, values, yerr=errors, fmt="none", ecolor=INK, elinewidth=0.9, capsize=1.5)
    else:
        axes.plot(steps, values, color=INK, linewidth=1.4, marker="o", markersize=2.6)
        is_face = steps == (moment.step or 0)
        axes.plot(steps[is_face], values[is_face], color=colour, marker="o", markersize=7, linestyle="none")
    style_axes(axes)
    axes.locator_params(axis="y", nbins=4)
    axes.margins(y=0.15)
    axes.set_xlim(steps.min() - 1, steps.max() + 1)


def _draw_policy(figure: "Figure", view: MomentView, top: float, bottom: float) -> None:
    """Draw the action probabilities, or means, before and after the round."""
    height = figure.get_figheight()
    change = view.policy
    if change is None:
        text = wrap(view.policy_note or "", 44)
        figure.text(0.71, 1 - top / height, text, fontsize=10.5, color=GREY, va="top", parse_math=False)
        return
    names = change.names[:POLICY_ROWS]
    bottom = min(bottom, top + 0.9 + 0.62 * len(names))
    (axes,) = add_axes(figure, 1, 1, top + 0.6, bottom, left=0.8, right=0.96)
    value = f"value of the state: {format_number(change.values[0])} → {format_number(change.values[1])}"
    axes.set_xlabel(value, fontsize=10.5, color=INK)
    _draw_bars(axes, change, len(names))
    for at, label in enumerate(axes.set_yticklabels([wrap(name, 14) for name in names], fontsize=10.5)):
        label.set_parse_math(False)
        is_chosen = not change.spreads and at == view.moment.action
        label.set(color=_choose_colour(view.moment) if is_chosen else INK, fontweight="bold" if is_chosen else "normal")
    legend = axes.legend(
        title="Policy in this state", loc="lower right", bbox_to_anchor=(1.1, 1), ncols=2, frameon=False
    )
    legend.get_title().set(fontsize=12, fontweight="bold", color=INK)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(LINE)


def _draw_bars(axes: "Axes", change: PolicyChange, rows: int) -> None:
    """Draw probabilities as bars, or means with their standard deviations, each with its number."""
    places = np.arange(rows)
    sides = ((-0.19, BEFORE, "before the round"), (0.19, AFTER, "after it"))
    for at, (offset, colour, text) in enumerate(sides):
        numbers = np.array((change.before, change.after)[at][:rows])
        if change.spreads:
            spreads = change.spreads[at][:rows]
            axes.errorbar(numbers, places + offset, xerr=spreads, fmt="o", color=colour, capsize=3, label=text)
        else:
            bars = axes.barh(places + offset, numbers, 0.36, color=colour, label=text)
            shares = [f"{number:.0%}" if number >= 0.095 else f"{number:.1%}" for number in numbers]
            axes.bar_label(bars, shares, padding=4)
    axes.set_yticks(places)
    axes.invert_yaxis()
    axes.tick_params(labelsize=10, length=0)
    if not change.spreads:
        axes.set_xlim(0, 1)
        axes.set_xticks([])


def _read(view: MomentView, name: str) -> list[Any]:
    """Return a column of the window; without steps, the record's position stands for them."""
    table = view.window
    if name in table.columns and (name != "step" or table[name].null_count() == 0):
        return table[name].to_list()
    return list(range(len(table))) if name == "step" else [None] * len(table)


def _choose_colour(moment: Moment) -> str:
    return HARM if moment.score < 0 else HELP
