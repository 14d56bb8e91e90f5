"""How large the page is, and how long it takes to open, on one core.

Run: `python -m studies.pages.speed results/pages [--run out/pages] [--repeats 5]`. It trains PPO on CartPole for 300
rounds of 256 records, where that run is not there. Needs a Chromium. The page is tables.md.
"""

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from playwright.sync_api import Page, sync_playwright

from studies.pages.picture import PATIENCE, find_chromium, serve_page
from studies.shared import Out, table, write_page

ROUNDS, RECORDS = 300, 256

FIRST_SCREEN = ".card"
"""What is there once the shown round's moments are."""


def train(run: Path) -> None:
    """Record PPO on CartPole, where that is not done."""
    from stable_baselines3 import PPO

    from whence.sb3 import InfluenceCallback

    if not run.exists():
        model = PPO("MlpPolicy", "CartPole-v1", n_steps=RECORDS, seed=0, device="cpu")
        model.learn(ROUNDS * RECORDS, callback=InfluenceCallback(run=run))


def measure_file(run: Path, rounds: str | None) -> tuple[float, Path]:
    """Write the page as a file; return its size, MB, and where it lies."""
    file = Path(tempfile.mkdtemp()) / "page.html"
    chosen = [] if rounds is None else ["--rounds", rounds]
    command = [sys.executable, "-m", "whence.cli", "report", str(run), "--out", str(file), *chosen]
    subprocess.run(command, check=True, capture_output=True)
    return file.stat().st_size / 1e6, file


def open_page(page: Page, address: str) -> float:
    """Return the seconds until the first screen is there."""
    start = time.perf_counter()
    page.goto(address)
    page.locator(FIRST_SCREEN).first.wait_for()
    return time.perf_counter() - start


def turn_round(page: Page) -> float:
    """Return the seconds until the round before is shown."""
    page.evaluate("() => document.querySelectorAll('.card').forEach((card) => card.setAttribute('data-old', ''))")
    start = time.perf_counter()
    page.get_by_role("button", name="Previous round").click()
    page.locator(".card:not([data-old])").first.wait_for()
    return time.perf_counter() - start


def search(page: Page) -> float:
    """Return the seconds until a condition on all rounds is answered."""
    page.select_option("#grid-scope", "all")
    page.wait_for_function("() => document.getElementById('grid-note').textContent.includes('300 rounds')")
    start = time.perf_counter()
    page.fill("#grid-where", "advantage < -1")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "() => /^(?!76,800)[\\d,]+ of the 76,800/.test(document.getElementById('grid-note').textContent)"
    )
    return time.perf_counter() - start


def main(
    out: Out,
    run: Annotated[Path, typer.Option(help="The run; it is trained where there is none.")] = Path("out/pages"),
    repeats: Annotated[int, typer.Option(help="How often each time is measured.")] = 5,
) -> None:
    """Measure, and write the page of the results."""
    train(run)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the server and the browser, too
    sizes = {"a file with one round": measure_file(run, "1")[0]}
    sizes["a file as whence report writes it"], file = measure_file(run, None)
    times: dict[str, list[float]] = {}

    def note(name: str, measure: Callable[..., float], *arguments: Any) -> None:
        times.setdefault(name, []).append(measure(*arguments))

    for _ in range(repeats):
        with serve_page(run) as address, sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.set_default_timeout(PATIENCE)
            note("served: the first screen, right after `whence view` has said its address", open_page, page, address)
            page.wait_for_load_state("networkidle")
            note("served: the first screen, again", open_page, page, address)
            page.wait_for_load_state("networkidle")
            note("served: another round", turn_round, page)
            note("served: a condition on all rounds", search, page)
            note("the file: the first screen", open_page, browser.new_page(), file.as_uri())
            browser.close()
    rows = [["what", "median", "largest", "times"]]
    rows += [[name, f"{size:.2f} MB", f"{size:.2f} MB", "1"] for name, size in sizes.items()]
    rows += [[name, f"{median(each):.2f} s", f"{max(each):.2f} s", str(len(each))] for name, each in times.items()]
    about = f"{platform.machine()}, one core; {date.today()}. CartPole, {ROUNDS} rounds of {RECORDS} records."
    write_page(out / "tables.md", "# The page", about, table(rows))


if __name__ == "__main__":
    typer.run(main)
