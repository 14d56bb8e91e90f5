"""The canvas of all pictures: colours, text, frames, rendering."""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whence.core import Unsupported, WhenceError, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI = 1200, 100
"""Pixels across, and pixels an inch."""

HELP, HARM, GREY, INK, LINE = "#2f74e6", "#d1495b", "#7d8590", "#1f2328", "#d0d7de"


def check_picture_name(path: Path, *endings: str) -> None:
    """Refuse a file name that does not end as a picture's that can be drawn.

    Raises:
        WhenceError: it does not.
    """
    if path.suffix.lower() not in endings:
        raise WhenceError(f"--out is {path}; its name has to end in {' or '.join(endings)}.")


def make_figure(height: float, width: float = WIDTH / DPI, **settings: Any) -> "Figure":
    """Return an empty figure of so many inches.

    Raises:
        Unsupported: Matplotlib or Pillow is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise Unsupported(
            f"Pictures need {missing.name}, which is not installed: pip install '.[report]'."
        ) from missing
    return Figure(figsize=(width, height), dpi=DPI, facecolor="white", **settings)


def write_lines(figure: "Figure", lines: Iterable[tuple[str, float, str]], *, start: float = 0.2) -> float:
    """Write a heading's paragraphs (text, points, colour) below each other, never as mathematics; the first is bold.

    Returns:
        The inches from the upper edge to their end.
    """
    height = figure.get_figheight()
    for place, (text, size, colour) in enumerate(lines):
        # A letter is about half as wide as its size; a bold one is wider.
        paragraph = wrap(text, int(WIDTH / DPI * 72 / size / (0.54 if place else 0.66)), 2)
        style: dict[str, Any] = {
            "fontsize": size,
            "color": colour,
            "fontweight": "normal" if place else "bold",
            "va": "top",
        }
        figure.text(0.02, 1 - start / height, paragraph, parse_math=False, **style)
        start += (paragraph.count("\n") + 1) * size * 1.25 / 72 + 0.1
    return start


def keep_drawable(text: str) -> str:
    """Return text with a box for each character that the font lacks, of which Matplotlib would warn."""
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont("DejaVu Sans")).get_charmap()
    return "".join(char if char == "\n" or (char.isprintable() and ord(char) in known) else "□" for char in text)


def wrap(text: str, width: int, most: int = 8) -> str:
    """Return text in at most so many lines of so many characters."""
    return keep_drawable("\n".join(textwrap.wrap(text, width, max_lines=most, placeholder="…")))


def add_axes(figure: "Figure", rows: int, columns: int, top: float, bottom: float, **place: Any) -> Sequence["Axes"]:
    """Return axes in rows and columns between two heights, in inches from the upper edge; see Matplotlib's GridSpec."""
    height = figure.get_figheight()
    place = {"left": 0.02, "right": 0.98, "wspace": 0.05} | place
    grid = figure.add_gridspec(rows, columns, top=1 - top / height, bottom=1 - bottom / height, **place)
    return [figure.add_subplot(grid[row, column]) for row in range(rows) for column in range(columns)]


def draw_frame(
    axes: "Axes", frame: NDArray[np.uint8] | None, caption: str = "", edge: tuple[str, float] = (LINE, 1)
) -> Any:
    """Draw a picture (height, width, 3), or none, with an edge and a caption above; return Matplotlib's image."""
    axes.set_title(wrap(caption, 34, 3), fontsize=9.5, color=INK, loc="left", parse_math=False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set(color=edge[0], linewidth=edge[1], visible=frame is not None)
    axes.set_anchor("NW")
    return None if frame is None else axes.imshow(frame, aspect="equal", interpolation="antialiased")


def style_axes(axes: "Axes") -> None:
    """Leave of the frame around curves the left and the lower edge."""
    axes.tick_params(labelsize=10, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)


def render(figure: "Figure") -> Any:
    """Return a figure as a Pillow image, drawn by Agg whatever backend the user has chosen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def save_picture(image: Any, path: Path, **settings: Any) -> None:
    """Write a Pillow image atomically, in the format that the file's name says."""
    with write_atomically(path) as temporary:
        image.save(temporary, format=path.suffix[1:].upper(), **settings)
