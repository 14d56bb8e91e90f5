"""Pictures of judged advantages: how far they were off, by influence (LDA Fig. 3)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from whence.diagnosis import BANDS
from whence.page.pictures.canvas import (
    HELP,
    INK,
    LINE,
    keep_drawable,
    make_figure,
    render,
    save_picture,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHADE = {"top": "#1a7f4b", "middle": "#7d8590", "bottom": "#d1495b"}
"""Colours of the fifth that helps most, of the rest, and of the fifth that harms most."""

Judged = tuple[int, pl.DataFrame, float | None]
"""A round, its records from `judge_advantages`, and Spearman's correlation of influence with the product of the
advantages; None if there is none."""


def draw_judgements(name: str, rounds: Sequence[Judged], path: Path) -> None:
    """Write a picture with a row of panels for each round, as PNG.

    Args:
        name: the run's, for the heading.
        rounds: at least one.
        path: the file.

    Raises:
        Unsupported: Matplotlib or Pillow is not installed.
    """
    figure = make_figure(4.2 * len(rounds), layout="constrained")
    figure.suptitle(keep_drawable(name), fontsize=14, x=0.01, ha="left", color=INK, parse_math=False)
    grid = figure.subplots(len(rounds), 2, squeeze=False)
    for (distances, products), (number, table, spearman) in zip(grid, rounds, strict=True):
        how = table["measured"][0] if len(table) else "nothing"
        _draw_distances(distances, table)
        _finish(distances, f"Round {number}: |measured − trained advantage| by {how}")
        _draw_products(products, table)
        known = "" if spearman is None else f" (Spearman {spearman:.2f})"
        _finish(products, f"measured × trained advantage{known}")
    save_picture(render(figure), path)


def _draw_distances(axes: "Axes", table: pl.DataFrame) -> None:
    """Draw how far the advantages were off, by the rank of the score."""
    places, wrong = table["position"].to_numpy(), table["mismatch"].to_numpy()
    distance = (table["mc_advantage"] - table["advantage"]).abs().to_numpy()
    for mask, colour, text in ((~wrong, SHADE["top"], "same sign"), (wrong, SHADE["bottom"], "other sign")):
        axes.plot(places[mask], distance[mask], ".", color=colour, markersize=3.5, alpha=0.6, label=text)
    axes.legend(fontsize=9, frameon=False, loc="upper center")
    axes.set_ylim(bottom=0)


def _draw_products(axes: "Axes", table: pl.DataFrame) -> None:
    """Draw the product of measured and trained advantage, by the rank of the score."""
    axes.axhline(0, color=LINE, linewidth=0.8)
    product = (table["mc_advantage"] * table["advantage"]).to_numpy()
    axes.plot(table["position"].to_numpy(), product, ".", color=HELP, markersize=3.5, alpha=0.6)
    # A few records have advantages a hundred times those of most.
    reach = float(np.quantile(np.abs(product), 0.98)) if product.size else 0.0
    axes.set_yscale("symlog", linthresh=max(reach / 30, 1e-12))


def _finish(axes: "Axes", title: str) -> None:
    for band, (start, end) in zip(BANDS, ((0, 0.2), (0.2, 0.8), (0.8, 1)), strict=True):
        axes.axvspan(start, end, color=SHADE[band], alpha=0.08, linewidth=0)
    axes.set_title(title, fontsize=10.5, color=INK, loc="left")
    style_axes(axes)
    axes.set_xlim(0, 1)
    axes.set_xticks([0.1, 0.5, 0.9], ["top 20%", "by influence", "bottom 20%"], fontsize=9)
    axes.tick_params(axis="x", length=0)
