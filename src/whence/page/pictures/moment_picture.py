"""Pictures of a moment: frames above strips of reward, value, advantage and score, as PNG or GIF."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whence.guards import write_atomically
from whence.moments import name_action
from whence.page.moment_view import MomentView, format_number
from whence.page.pictures.canvas import (
    DPI,
    GREY,
    HARM,
    HELP,
    INK,
    LINE,
    WIDTH,
    check_libraries,
    check_picture_name,
    draw_frame,
    keep_drawable,
    render,
    shorten,
    style_axes,
    wrap,
    write_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BEFORE, AFTER = "#b4b9c2", "#e27411"
_STRIPS = (("reward", "reward"), ("value", "value"), ("advantage", "advantage"), ("score", "score"))
POLICY_ROWS = 8
"""Actions whose probabilities are drawn at most."""
_SECONDS = 0.12  # of a GIF's frame; the face's stays longer


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
    check_libraries()
    animated = path.suffix.lower() == ".gif" and bool(view.frames)
    images, durations = _animate(view) if animated else ([render(_lay_out(view)[0])], [0])
    with write_atomically(path) as temporary:
        _save(images, durations, temporary, "GIF" if path.suffix.lower() == ".gif" else "PNG")


def _save(images: Sequence[Any], durations: Sequence[int], path: Path, kind: str) -> None:
    if len(images) == 1:
        images[0].save(path, format=kind)
        return
    from PIL import Image

    # One palette for all frames, else viewers show plain areas flickering; from several, for colours that come and go.
    several = np.concatenate([np.asarray(image) for image in images[:: max(1, len(images) // 6)]])
    palette = Image.fromarray(several).quantize(256)
    frames = [image.quantize(palette=palette, dither=0) for image in images]
    frames[0].save(
        path, format=kind, save_all=True, append_images=frames[1:], duration=list(durations), loop=0, optimize=False
    )


def _lay_out(view: MomentView, *, animated: bool = False) -> tuple["Figure", Any, list["Axes"]]:
    """Return the figure, the place of the animated frame, and the strips."""
    from matplotlib.figure import Figure

    steps = sorted(view.frames)
    height = 8.6 if steps else 6.4
    figure = Figure(figsize=(WIDTH / DPI, height), dpi=DPI, facecolor="white")
    top = _write_heading(figure, view, height)
    bottom = 0.55 / height
    split = top
    place = None
    if steps and animated:
        split = top - 3.4 / height
        place = figure.add_axes((0.06, split + 0.3 / height, 0.6, top - split - 0.35 / height))
        place.set_axis_off()
    elif steps:
        split = top - _draw_frames(figure, view, steps, top, height)
    strips = _draw_strips(figure, view, (bottom, split - 0.25 / height), height)
    _draw_policy(figure, view, (bottom, (top if animated and steps else split) - 0.25 / height), height)
    return figure, place, strips


def _write_heading(figure: "Figure", view: MomentView, height: float) -> float:
    """Write the lines on top and return where they end."""
    moment = view.moment
    headline, colour = _make_headline(view)
    write_text(figure, 0.02, 1 - 0.3 / height, headline, 17, colour, weight="bold")
    where = "" if moment.step is None else f", episode {moment.episode_id}, step {moment.step}"
    fate = "" if view.row.get("keep") is None else "; trained" if view.row["keep"] else "; dropped"
    write_text(figure, 0.02, 1 - 0.62 / height, f"{view.env or view.run}, round {view.round}{where}{fate}", 12, GREY)
    fresh = f" (by fresh rollouts {view.estimate[0]:.3g} ± {view.estimate[1]:.2g})" if view.estimate else ""
    numbers = [
        f"action: {view.action}",
        f"advantage {format_number(moment.advantage)}{fresh}",
        f"value {format_number(moment.value)}",
        f"return {format_number(moment.return_)}",
        f"reward {format_number(moment.reward)}",
    ]
    write_text(figure, 0.02, 1 - 0.92 / height, "   ·   ".join(numbers), 12, INK)
    if view.frames_note is None:
        return 1 - 1.15 / height
    write_text(figure, 0.02, 1 - 1.2 / height, shorten(view.frames_note, 150), 10.5, GREY)
    return 1 - 1.4 / height


def _draw_frames(figure: "Figure", view: MomentView, steps: Sequence[int], top: float, height: float) -> float:
    """Draw frames side by side below `top` and return the height that they take, as a share of the figure's."""
    gap, left, right = 0.008, 0.02, 0.985
    width = (right - left - gap * (len(steps) - 1)) / max(len(steps), 4)
    rows, columns = next(iter(view.frames.values())).shape[:2]
    tall: float = min(width * WIDTH / DPI * rows / columns, 2.6)
    actions = dict(_column(view, "step", "action"))
    start = left + (right - left - len(steps) * width - (len(steps) - 1) * gap) / 2
    for place, step in enumerate(steps):
        box = (start + place * (width + gap), top - (tall + 0.3) / height, width, tall / height)
        is_face = step == view.moment.step
        action = name_action(actions[step], view.action_labels) if step in actions else ""
        edge = (_score_colour(view), 4) if is_face else (LINE, 1)
        weight = "bold" if is_face else "normal"
        caption = shorten(f"step {step}: {action}", 30)
        draw_frame(figure, view.frames[step], box, edge, caption, fontsize=11, pad=6, fontweight=weight)
    return (tall + 0.35) / height


def _make_headline(view: MomentView) -> tuple[str, str]:
    """Return what the score says, and its colour: that a record harmed or helped only if it can be told from 0."""
    moment = view.moment
    if math.isnan(moment.score):
        return f"Record {moment.record_id} was not scored", INK
    error = "" if moment.error is None else f" ± {moment.error:.2g}"
    if view.is_significant is False:
        return f"Record {moment.record_id}: score {moment.score:.3g}{error}, cannot be told from 0", GREY
    harms = moment.score < 0
    verb = "lowers" if harms else "raises"
    doubt = "" if view.is_significant else " (error not known)"
    text = f"Record {moment.record_id}: training on it {verb} the target, score {moment.score:.3g}{error}{doubt}"
    return text, HARM if harms else HELP


def _draw_strips(figure: "Figure", view: MomentView, span: tuple[float, float], height: float) -> list["Axes"]:
    """Draw the strips between two heights, the first on top."""
    bottom, top = span
    names = [(name, text) for name, text in _STRIPS if name in view.window.columns]
    gap = 0.12 / height
    tall = (top - bottom - gap * (len(names) - 1)) / max(len(names), 1)
    strips: list[Axes] = []
    for place, (name, text) in enumerate(names):
        low = top - (place + 1) * tall - place * gap
        axes = figure.add_axes((0.085, low, 0.585, tall), sharex=strips[0] if strips else None)
        _draw_strip(axes, view, name)
        axes.set_ylabel(text, fontsize=11, color=INK)
        is_last = place == len(names) - 1
        axes.tick_params(labelbottom=is_last)
        if is_last:
            is_pale = "keep" in view.window.columns and not view.window["keep"].all()
            text = "record" if view.moment.step is None else "step of the episode"
            axes.set_xlabel(f"{text}   (pale: dropped)" if is_pale else text, fontsize=11, color=INK)
        strips.append(axes)
    figure.align_ylabels(strips)
    return strips


def _draw_strip(axes: "Axes", view: MomentView, name: str) -> None:
    pairs = [(step, value) for step, value in _column(view, "step", name) if value is not None]
    steps = np.array([step for step, _ in pairs], float)
    values = np.array([value for _, value in pairs], float)
    moment = view.moment
    if moment.first_step is not None and moment.last_step is not None:
        axes.axvspan(moment.first_step - 0.5, moment.last_step + 0.5, color=_score_colour(view), alpha=0.1, linewidth=0)
    if moment.step is not None:
        axes.axvline(moment.step, color=_score_colour(view), linewidth=1.2, alpha=0.7)
    if name in ("advantage", "score"):
        axes.axhline(0, color=LINE, linewidth=0.8, zorder=0)
    if name == "score":
        _draw_scores(axes, view, steps, values)
    else:
        axes.plot(steps, values, color=INK, linewidth=1.4, marker="o", markersize=2.6)
        at = steps == (moment.step if moment.step is not None else 0)
        axes.plot(steps[at], values[at], color=_score_colour(view), marker="o", markersize=7, linestyle="none")
    style_axes(axes)
    axes.locator_params(axis="y", nbins=4)
    axes.margins(x=0.02, y=0.15)
    least = 0.2 * float(np.abs(values).max(initial=0.0))  # a smaller change is noise and is to look like it
    if name != "score" and values.size and np.ptp(values) < least:
        middle = float(values.min() + values.max()) / 2
        axes.set_ylim(middle - least / 2, middle + least / 2)


def _draw_scores(axes: "Axes", view: MomentView, steps: NDArray[Any], values: NDArray[Any]) -> None:
    kept = dict(_column(view, "step", "keep")) if "keep" in view.window.columns else {}
    errors = dict(_column(view, "step", "error")) if "error" in view.window.columns else {}
    bars = axes.bar(steps, values, width=0.75, color=[HARM if value < 0 else HELP for value in values])
    for bar, step in zip(bars, steps, strict=True):
        bar.set_alpha(1.0 if kept.get(int(step), True) else 0.4)
    sizes = [errors.get(int(step)) for step in steps]
    if steps.size and all(size is not None for size in sizes):
        axes.errorbar(steps, values, yerr=np.array(sizes, float), fmt="none", ecolor=INK, elinewidth=0.9, capsize=1.5)


def _draw_policy(figure: "Figure", view: MomentView, span: tuple[float, float], height: float) -> None:
    """Draw the action probabilities, or means, before and after the round."""
    bottom, top = span
    change = view.policy
    if change is None:
        if view.policy_note:
            write_text(figure, 0.71, top, wrap(view.policy_note, 44), 10.5, GREY, vertical="top")
        return
    names = change.names[:POLICY_ROWS]
    top -= 0.6 / height
    tall = min(top - bottom, (0.62 * len(names) + 0.2) / height)
    axes = figure.add_axes((0.80, top - tall, 0.155, tall))
    write_text(figure, 0.71, top + 0.42 / height, "Policy in this state", 12, INK, weight="bold")
    write_text(figure, 0.71, top + 0.16 / height, "before the round", 10.5, GREY)
    write_text(figure, 0.83, top + 0.16 / height, "after it", 10.5, AFTER)
    places = np.arange(len(names))
    probabilities = not change.spreads[0]
    for at, (offset, colour, values) in enumerate(((-0.19, BEFORE, change.before), (0.19, AFTER, change.after))):
        numbers = np.array(values[:POLICY_ROWS])
        if probabilities:
            axes.barh(places + offset, numbers, 0.36, color=colour)
        else:
            spreads = change.spreads[at][:POLICY_ROWS]
            axes.errorbar(numbers, places + offset, xerr=spreads, fmt="o", color=colour, capsize=3)
        for place, number in zip(places, numbers, strict=True):
            text = f"{number:.2g}" if not probabilities else f"{number:.0%}" if number >= 0.095 else f"{number:.1%}"
            x = number if probabilities else axes.get_xlim()[1]
            axes.annotate(text, (x, place + offset), (4, 0), textcoords="offset points", va="center", fontsize=10)
    axes.set_yticks(places)
    chosen = view.moment.action
    for at, label in enumerate(axes.set_yticklabels([wrap(name, 14) for name in names], fontsize=10.5)):
        label.set_parse_math(False)
        is_chosen = probabilities and at == chosen
        label.set(color=_score_colour(view) if is_chosen else INK, fontweight="bold" if is_chosen else "normal")
    axes.invert_yaxis()
    axes.tick_params(labelsize=10, length=0)
    if probabilities:
        axes.set_xlim(0, 1)
        axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(LINE)
    value = f"value of the state: {format_number(change.values[0])} → {format_number(change.values[1])}"
    write_text(figure, 0.71, top - tall - 0.22 / height, value, 10.5, INK)


def _animate(view: MomentView) -> tuple[list[Any], list[int]]:
    """Return a GIF's images and how long each is shown, in milliseconds.

    The strips are drawn once; each image gets its frame and its cursor.
    """
    from PIL import Image, ImageDraw

    figure, place, strips = _lay_out(view, animated=True)
    background = render(figure)
    box = place.get_window_extent()
    height = background.height
    corner = (round(box.x0), round(height - box.y1))
    size = (round(box.width), round(box.height))
    actions = dict(_column(view, "step", "action"))
    images, durations = [], []
    for step, frame in sorted(view.frames.items()):
        image = background.copy()
        picture = Image.fromarray(frame)
        scale = min(size[0] / picture.width, size[1] / picture.height)
        picture = picture.resize((round(picture.width * scale), round(picture.height * scale)))
        left = corner[0] + (size[0] - picture.width) // 2
        image.paste(picture, (left, corner[1]))
        draw = ImageDraw.Draw(image)
        is_face = step == view.moment.step
        edge = (left - 2, corner[1] - 2, left + picture.width + 1, corner[1] + picture.height + 1)
        draw.rectangle(edge, outline=_score_colour(view) if is_face else LINE, width=4 if is_face else 1)
        action = name_action(actions[step], view.action_labels) if step in actions else ""
        caption = keep_drawable(shorten(f"step {step}: {action}", 60)).encode("latin-1", "replace").decode("latin-1")
        draw.text((left, corner[1] + picture.height + 6), caption, fill=INK, font_size=15)
        for strip in strips:
            x, y0 = strip.transData.transform((step, strip.get_ylim()[0]))
            y1 = strip.transData.transform((step, strip.get_ylim()[1]))[1]
            draw.line((x, height - y0, x, height - y1), fill=AFTER, width=2)
        images.append(image)
        durations.append(1200 if is_face else round(_SECONDS * 1000))
    return images, durations


def _column(view: MomentView, key: str, name: str) -> list[tuple[Any, Any]]:
    """Return pairs of two columns of the window; without steps, the record's position stands for them."""
    table = view.window
    keys = table[key].to_list() if key in table.columns and table[key].null_count() == 0 else range(len(table))
    return list(zip(keys, table[name].to_list(), strict=True))


def _score_colour(view: MomentView) -> str:
    return HARM if view.moment.score < 0 else HELP
