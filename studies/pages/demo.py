"""Draw the README's picture from a finished comparison.

Run: `python -m studies.pages.demo out/demo docs/frozenlake.svg`. Needs a Chromium or Chrome, which Kaleido
drives.
"""

from pathlib import Path
from typing import Annotated

import typer

from whence import lab
from whence.page.figures import over_rounds


def main(
    comparison: Annotated[Path, typer.Argument(help="A directory written by whence compare.")],
    picture: Annotated[Path, typer.Argument(help="The file to write: .svg, .png or .pdf.")],
) -> None:
    """Write the learning curves."""
    evaluations = lab.load_comparison(comparison).table("evaluations")
    figure = over_rounds(evaluations, "test_return", "mean test return")
    figure.update_layout(template="plotly_white", width=760, height=320, font_family="sans-serif")
    figure.write_image(picture)


if __name__ == "__main__":
    typer.run(main)
