"""A round's scores and moments for TensorBoard, and for what reads along, such as Weights & Biases."""

import importlib.util
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from stable_baselines3.common.logger import Image, Logger

from whence.errors import Unsupported
from whence.moments import find_moments, name_action

TEXT_FORMATS = ("stdout", "log", "json", "csv")
"""SB3's output formats that take neither pictures nor tables."""

MOMENTS = 10
"""Rows of the table of moments."""


def check_can_draw() -> None:
    """Refuse to log images without Matplotlib.

    Raises:
        Unsupported: it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise Unsupported(
            "log_images=True draws with Matplotlib, which is not installed: pip install 'whence[report]'. Or leave "
            "log_images out."
        )


def log_moments(logger: Logger, table: pl.DataFrame, number: int) -> None:
    """Log a round's scores as an image, and its most harmful moments as a table; nothing if it was not scored.

    They go to `influence/scores` and `influence/moments`, and to those of the logger's formats that show them.

    Args:
        logger: the model's logger.
        table: the round's records with scores.
        number: the round.
    """
    if "score" not in table.columns:
        return
    logger.record("influence/scores", Image(draw_scores(table, number), "HWC"), exclude=TEXT_FORMATS)
    logger.record("influence/moments", format_moments(table, number), exclude=TEXT_FORMATS)


def draw_scores(table: pl.DataFrame, number: int) -> NDArray[np.uint8]:
    """Return a histogram of a round's scores, split by whether the record trained, (height, width, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: its figures, backend and style are the user's.
    figure = Figure(figsize=(6.4, 3.6), dpi=100, facecolor="white")
    canvas: Any = FigureCanvasAgg(figure)
    axes = figure.subplots()
    scores = table["score"].cast(pl.Float64).fill_null(0.0).to_numpy()
    trained = table["keep"].to_numpy() if "keep" in table.columns else np.ones(len(scores), dtype=bool)
    low, high = float(scores.min()), float(scores.max())
    room = max(abs(low), abs(high), 1e-30) * 1e-6  # equal scores have a bin, too
    edges = np.linspace(low - room, high + room, 61)
    parts = [scores[trained], scores[~trained]]
    labels = [f"trained: {trained.sum():,}", f"dropped: {(~trained).sum():,}"]
    axes.hist(parts, bins=edges.tolist(), stacked=True, color=["#2f74e6", "#d1495b"], label=labels)
    axes.axvline(0, color="#1f2328", linewidth=0.8)
    axes.set(yscale="symlog", xlabel="score (above 0: training on it raises the target)", ylabel="records")
    axes.set_title(f"Influence of the records of round {number}", fontsize=11)
    axes.legend(frameon=False)
    figure.tight_layout()
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def format_moments(table: pl.DataFrame, number: int) -> str:
    """Return the most harmful moments of a round as a Markdown table."""
    rows = []
    for moment in find_moments(table, lowest=True, most=MOMENTS):
        steps = str(moment.step) if moment.records == 1 else f"{moment.first_step}–{moment.last_step}"
        score = f"{moment.score:.3g}" + ("" if moment.error is None else f" ± {moment.error:.2g}")
        advantage = "" if moment.advantage is None else f"{moment.advantage:.3g}"
        action = name_action(moment.action)
        cells = (moment.record_id, moment.episode_id, steps, action, score, advantage, moment.dropped)
        rows.append(f"| {' | '.join('' if cell is None else str(cell) for cell in cells)} |")
    if not rows:
        return f"Round {number}: no record scores below 0."
    names = ("record", "episode", "steps", "action", "score", "advantage", "dropped")
    head = f"| {' | '.join(names)} |\n|{' --- |' * len(names)}"
    return f"Most harmful moments of round {number}\n\n{head}\n" + "\n".join(rows)
