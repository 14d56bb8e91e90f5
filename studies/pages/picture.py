"""Draw the README's picture: the page of a run, as `whence view` serves it, with a moment open.

Run: `python -m studies.pages.picture out/lander docs/page.png --round 45 --record 90625 --height 720`.
The run is of `whence train LunarLander-v3 --selection iif --drop 0.125 --rounds 150 --record-rounds 10-150:10 --seed 0
--run out/lander`. Needs a Chromium.
"""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from playwright.sync_api import sync_playwright

PATIENCE = 300_000
"""Milliseconds after which the page counts as broken."""

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
    with serve_page(run) as address, sync_playwright() as driver:
        # Root, as in a container, has no sandbox to offer.
        browser = driver.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": height}, device_scale_factor=SCALE)
        page.set_default_timeout(PATIENCE)
        page.goto(f"{address}#run=0&round={round}&record={record}")
        page.locator("#moment figure img").wait_for()
        page.locator("#moment").get_by_text("Being measured").wait_for(state="detached")
        page.wait_for_timeout(500)  # the panel comes in
        page.screenshot(path=picture)
        browser.close()


def find_chromium() -> str:
    """Return where a Chromium is."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (path := shutil.which(name)) is not None:
            return path
    raise SystemExit("Chromium is not installed: apt-get install chromium")


@contextmanager
def serve_page(run: Path) -> Iterator[str]:
    """Yield the address at which `whence view` serves a run."""
    command = [sys.executable, "-u", "-m", "whence.cli", "view", str(run), "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split(" ")[0].strip()
        server.send_signal(signal.SIGINT)


if __name__ == "__main__":
    typer.run(main)
