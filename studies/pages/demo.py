"""Draw the picture of a finished comparison: `python -m studies.pages.demo out/demo docs/frozenlake.svg`.

Needs a Chromium or Chrome, which Kaleido drives.
"""

from pathlib import Path

import typer

from whence.lab import load_comparison
from whence.page.figures import over_rounds


def main(comparison: Path, picture: Path) -> None:
    """Write the learning curves of a directory of whence compare to a .svg, .png or .pdf."""
    figure = over_rounds(load_comparison(comparison).table("evaluations"), "test_return", "mean test return")
    figure.update_layout(template="plotly_white", width=760, height=320, font_family="sans-serif")
    figure.write_image(picture)


if __name__ == "__main__":
    typer.run(main)
