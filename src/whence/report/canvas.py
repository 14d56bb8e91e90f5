"""What pictures that Matplotlib draws share: colours, and figures as images."""

from typing import TYPE_CHECKING, Any

import numpy as np

from whence.errors import Unsupported

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 100
"""Pixels an inch."""

HELP, HARM, GREY, INK = "#2f74e6", "#d1495b", "#7d8590", "#1f2328"


def check_drawing_installed() -> None:
    """Refuse to draw without the libraries that it needs.

    Raises:
        Unsupported: Matplotlib or Pillow is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
        import PIL.Image  # noqa: F401
    except ImportError as missing:
        raise Unsupported(
            f"Pictures need {missing.name}, which is not installed: pip install '.[report]'."
        ) from missing


def render_figure(figure: "Figure") -> Any:
    """Return a figure as a Pillow image, drawn by Agg whatever backend the user has chosen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def replace_unprintable(text: str) -> str:
    """Return text with a box for each character that the font lacks, of which Matplotlib would warn."""
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont("DejaVu Sans")).get_charmap()
    return "".join(char if char == "\n" or (char.isprintable() and ord(char) in known) else "□" for char in text)
