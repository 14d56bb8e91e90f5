"""Draw the README's picture: the page of a run, as `whence view` serves it, with a moment open.

Run: `python -m studies.pages.picture out/lander docs/page.png --round 45 --record 90625 --height 720`.
The run is that of results/pages. Needs a Chromium.
"""

from pathlib import Path
from typing import Annotated

import typer

from studies.pages.browser import PATIENCE, open_browser
from studies.pages.runs import serve_page

SCALE = 1.2
"""Pixels of the picture to one of the page's."""


def main(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    picture: Annotated[Path, typer.Argument(help="The file to write: .png.")],
    round: Annotated[int, typer.Option(help="The round, from 1.")],
    record: Annotated[int, typer.Option(help="The record whose moment is open.")],
    height: Annotated[int, typer.Option(help="The page's height; it is 1,000 wide.", min=400)] = 1000,
) -> None:
    """Open a record's moment, wait until its frames are there and its advantage is measured, and write what is seen."""
    with open_browser() as browser, serve_page(run) as address:
        context = browser.new_context(viewport={"width": 1000, "height": height}, device_scale_factor=SCALE)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(f"{address}#run=0&round={round}&record={record}")
        page.locator("#moment figure img").wait_for()
        page.locator("#moment").get_by_text("Being measured").wait_for(state="detached")
        page.wait_for_timeout(500)  # the panel comes in
        picture.parent.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=picture)
        context.close()


if __name__ == "__main__":
    typer.run(main)
