"""The canvas of all pictures: colours, text, rendering."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whence.errors import Unsupported, WhenceError
from whence.guards import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI = 1200, 100
"""Pixels across, and pixels an inch."""

HELP, HARM, GREY, INK, LINE = "#2f74e6", "#d1495b", "#7d8590", "#1f2328", "#d0d7de"


def check_libraries() -> None:
    """Refuse to draw without Matplotlib or Pillow.

    Raises:
        Unsupported: one is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
        import PIL.Image  # noqa: F401
    except ImportError as missing:
        raise Unsupported(
            f"Pictures need {missing.name}, which is not installed: pip install '.[report]'."
        ) from missing


def check_picture_name(path: Path, *endings: str) -> None:
    """Refuse a file name that does not end as a picture's that can be drawn.

    Raises:
        WhenceError: it does not.
    """
    if path.suffix.lower() not in endings:
        raise WhenceError(f"--out is {path}; its name has to end in {' or '.join(endings)}.")


def render(figure: "Figure") -> Any:
    """Return a figure as a Pillow image, drawn by Agg whatever backend the user has chosen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def write_text(
    figure: "Figure",
    x: float,
    y: float,
    text: str,
    size: float,
    colour: str,
    *,
    weight: str = "normal",
    vertical: str = "center",
) -> None:
    """Write text into a figure, left-aligned, at a place from (0, 0) to (1, 1): as it is, never as mathematics."""
    drawable = keep_drawable(text)
    figure.text(
        x, y, drawable, fontsize=size, color=colour, fontweight=weight, va=vertical, ha="left", parse_math=False
    )


def keep_drawable(text: str) -> str:
    """Return text with a box for each character that the font lacks, of which Matplotlib would warn."""
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont("DejaVu Sans")).get_charmap()
    return "".join(char if char == "\n" or (char.isprintable() and ord(char) in known) else "□" for char in text)


def shorten(text: str, most: int) -> str:
    """Return text on one line, cut off after so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def wrap(text: str, width: int, most: int = 8) -> str:
    """Return text in at most so many lines of so many characters."""
    import textwrap

    return keep_drawable("\n".join(textwrap.wrap(text, width)[:most]))


def draw_frame(
    figure: "Figure",
    frame: NDArray[np.uint8],
    box: tuple[float, float, float, float],
    edge: tuple[str, float] = (LINE, 1),
    caption: str = "",
    **style: Any,
) -> None:
    """Draw a picture into a figure.

    Args:
        figure: the figure.
        frame: (height, width, 3).
        box: left, bottom, width and height, as shares of the figure's.
        edge: the frame's colour and width.
        caption: what stands above.
        style: of the caption.
    """
    axes = figure.add_axes(box)
    axes.imshow(frame, aspect="equal", interpolation="antialiased")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(color=edge[0], linewidth=edge[1])
    axes.set_title(keep_drawable(caption), color=INK, parse_math=False, **style)


def style_axes(axes: "Axes") -> None:
    """Leave of the frame around curves the left and the lower edge."""
    axes.tick_params(labelsize=10, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LINE)


def save_png(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG, atomically."""
    image = render(figure)
    with write_atomically(path) as temporary:
        image.save(temporary, format="PNG")
