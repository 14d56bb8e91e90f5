"""Pictures of judged advantages: how far they were off by influence, and where on the map (LDA Fig. 3, 8)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl

from whence.diagnosis import BANDS, GridMap
from whence.page.pictures.canvas import (
    DPI,
    GREY,
    HARM,
    HELP,
    INK,
    LINE,
    check_libraries,
    keep_drawable,
    save_png,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 1500, 420
"""Pixels across, and down for each round."""

RIGHT, WRONG, SHADE = "#1a7f4b", "#d1495b", {"top": "#1a7f4b", "middle": "#7d8590", "bottom": "#d1495b"}
CELLS = {"wall": "#8b949e", "hole": "#39424e", "goal": "#8fd19e", "start": "#f3e6b3", "lava": "#e2703a"}
"""Colours of cells; all others are white."""

LEGEND = "Arrows: blue, the advantage praised the action; red, it blamed it; dashed, most of them had the wrong sign."
"""What the maps' colours say."""

_STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # right, down, left, up


class JudgedRound(NamedTuple):
    """A round to draw.

    Attributes:
        number: the round.
        judged: from `judge_advantages`.
        spearman: of influence with the product of the advantages; None if there is none.
        map: its records on the map, or None.
    """

    number: int
    judged: pl.DataFrame
    spearman: float | None
    map: GridMap | None


def draw_judgements(name: str, rounds: Sequence[JudgedRound], path: Path) -> None:
    """Write a picture with a row of panels for each round, as PNG.

    Args:
        name: the run's, for the heading.
        rounds: at least one.
        path: the file.

    Raises:
        Unsupported: Matplotlib or Pillow is not installed.
    """
    check_libraries()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / DPI, HEIGHT * len(rounds) / DPI), dpi=DPI, facecolor="white", layout="constrained")
    figure.suptitle(keep_drawable(name), fontsize=14, x=0.01, ha="left", color=INK, parse_math=False)
    columns = 4 if any(judged.map is not None for judged in rounds) else 2
    grid = figure.subplots(len(rounds), columns, squeeze=False)
    for axes, judged in zip(grid, rounds, strict=True):
        _draw_distances(axes[0], judged)
        _draw_products(axes[1], judged)
        for place, side in zip(axes[2:], ("worst", "best"), strict=False):
            if judged.map is None:
                place.set_axis_off()
            else:
                _draw_map(place, judged.map, side)
    if columns == 4:
        figure.supxlabel(LEGEND, fontsize=9.5, color=GREY, x=0.99, ha="right")
    save_png(figure, path)


def _draw_distances(axes: "Axes", shown: JudgedRound) -> None:
    """Draw how far the advantages were off, by the rank of the score."""
    table = shown.judged
    _shade_bands(axes)
    distance = (table["mc_advantage"] - table["advantage"]).abs().to_numpy()
    wrong = table["mismatch"].to_numpy()
    for mask, colour, text in ((~wrong, RIGHT, "same sign"), (wrong, WRONG, "other sign")):
        axes.plot(
            table["position"].to_numpy()[mask], distance[mask], ".", color=colour, markersize=3.5, alpha=0.6, label=text
        )
    axes.legend(fontsize=9, frameon=False, loc="upper center")
    axes.set_ylim(bottom=0)
    how = table["measured"][0] if len(table) else "nothing"
    _finish(axes, f"Round {shown.number}: |measured − trained advantage| by {how}")


def _draw_products(axes: "Axes", shown: JudgedRound) -> None:
    """Draw the product of measured and trained advantage, by the rank of the score."""
    table = shown.judged
    _shade_bands(axes)
    axes.axhline(0, color=LINE, linewidth=0.8)
    product = (table["mc_advantage"] * table["advantage"]).to_numpy()
    axes.plot(table["position"].to_numpy(), product, ".", color=HELP, markersize=3.5, alpha=0.6)
    # A few records have advantages a hundred times those of most.
    reach = float(np.quantile(np.abs(product), 0.98)) if product.size else 0.0
    axes.set_yscale("symlog", linthresh=max(reach / 30, 1e-12))
    known = "" if shown.spearman is None else f" (Spearman {shown.spearman:.2f})"
    _finish(axes, f"measured × trained advantage{known}")


def _shade_bands(axes: "Axes") -> None:
    for band, (start, end) in zip(BANDS, ((0, 0.2), (0.2, 0.8), (0.8, 1)), strict=True):
        axes.axvspan(start, end, color=SHADE[band], alpha=0.08, linewidth=0)


def _finish(axes: "Axes", title: str) -> None:
    axes.set_title(title, fontsize=10.5, color=INK, loc="left")
    axes.set_xlim(0, 1)
    axes.set_xticks([0.1, 0.5, 0.9], ["top 20%", "by influence", "bottom 20%"], fontsize=9)
    style_axes(axes)
    axes.tick_params(labelsize=9)
    axes.tick_params(axis="x", length=0)


def _draw_map(axes: "Axes", grid: GridMap, side: str) -> None:
    """Draw the grid and what was done there in the records of one side."""
    from matplotlib.patches import Rectangle

    for place, cell in enumerate(grid.cells):
        row, column = divmod(place, grid.cols)
        square = Rectangle((column, row), 1, 1, facecolor=CELLS.get(cell, "white"), edgecolor=LINE, linewidth=0.8)
        axes.add_patch(square)
    arrows = grid.arrows.filter(pl.col("side") == side)
    most = max(arrows["count"].to_list(), default=1)
    for arrow in arrows.iter_rows(named=True):
        _draw_arrow(axes, arrow, grid.cols, most)
    axes.set_xlim(0, grid.cols)
    axes.set_ylim(grid.rows, 0)
    axes.set_aspect("equal")
    axes.set_axis_off()
    count = int(arrows["count"].sum())
    axes.set_title(f"{count} {'most harmful' if side == 'worst' else 'most helpful'}", fontsize=10.5, color=INK)


def _draw_arrow(axes: "Axes", arrow: dict[str, Any], cols: int, most: int) -> None:
    """Draw an arrow from the middle of its cell; a turn bends off it, and any other action is a dot."""
    row, column = divmod(arrow["cell"], cols)
    colour = HELP if arrow["praised"] >= 0.5 else HARM
    width = 0.8 + 2.4 * (arrow["count"] / most) ** 0.5
    middle = (column + 0.5, row + 0.5)
    if arrow["direction"] is None or arrow["turn"] is None:
        axes.plot(*middle, "o", color=colour, markersize=2 + 1.5 * width)
        return
    x, y = _STEPS[arrow["direction"]]
    tip = (middle[0] + 0.42 * x, middle[1] + 0.42 * y)
    bend = "arc3"
    if arrow["turn"]:
        side_x, side_y = _STEPS[(arrow["direction"] + arrow["turn"]) % 4]
        tip = (middle[0] + 0.3 * x + 0.26 * side_x, middle[1] + 0.3 * y + 0.26 * side_y)
        bend = f"arc3,rad={-0.55 * arrow['turn']}"
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "connectionstyle": bend, "shrinkA": 0}
    if (arrow["wrong"] or 0) > 0.5:
        style["linestyle"] = (0, (2, 1))
    axes.annotate("", tip, middle, arrowprops=style | {"shrinkB": 0, "mutation_scale": 6 + 2 * width})
