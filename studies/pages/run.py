"""How fast the pages are, in a browser: `python -m studies.pages.run`.

One run is trained, 150 rounds of LunarLander. Headless Chromium opens its offline file and the page that `whence view`
serves, without a network. Larger runs are made of its rounds: what is measured on them is measured on a small one, too.
Times are taken in the page, from the navigation or the click to the first painted frame that shows what was asked for.
"""

import datetime
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from playwright.sync_api import Browser, Page
from rich.progress import track

from studies.pages.browser import measure, open_browser, open_page
from studies.pages.runs import TRAINING, call_whence, choose_record, serve_page, tile_run
from studies.pages.tables import SHAPES, describe_seconds, write_figures
from whence.guards import write_atomically
from whence.runs import RunDirectory

PARTS = ("file", "served", "sizes")

Times = dict[str, list[float]]


def measure_file(browser: Browser, file: Path, run: RunDirectory, repeats: int, problems: list[str]) -> dict[str, Any]:
    """Return how large the offline file is, and how fast it opens, turns to other rounds and opens moments."""
    times: Times = {"usable": [], "round": [], "moment": []}
    generator = np.random.default_rng(0)
    for _ in track(range(repeats), "file"):
        with open_page(browser, file.resolve().as_uri(), problems, served=False) as page:
            times["usable"].append(measure(page, "usable"))
            for number in choose_rounds(run, 5, generator):
                times["round"].append(measure(page, "slide", number, run.rounds().index(number)))
                times["moment"].append(open_moment(page, "card")["seconds"])
    return {"bytes": file.stat().st_size, **describe_all(times)}


def measure_served(
    browser: Browser, run: RunDirectory, moments: int, repeats: int, problems: list[str]
) -> dict[str, Any]:
    """Return how fast a served page opens, its rounds, and the frames of their records, every other one a late step.

    A record is opened as soon as the one before has its frames, so its advantage is still being measured then; of every
    fourth record the advantage is waited for.
    """
    times: Times = {name: [] for name in ("page", "again", "round", "frames", "late", "advantage")}
    generator = np.random.default_rng(1)
    unframed = 0
    for _ in range(repeats):
        with serve_page(run.path) as address:
            with open_page(browser, address, problems, served=True) as page:
                times["page"].append(measure(page, "usable"))
                for place, number in enumerate(track(choose_rounds(run, moments, generator), "served")):
                    times["round"].append(measure(page, "slide", number, run.rounds().index(number)))
                    late = place % 2 == 1
                    record = choose_record(run.round("records", number), generator, late=late)
                    shown = open_moment(page, "record", number, record, wait=place % 4 == 3, times=times)
                    times["frames"].append(shown["seconds"])
                    if late:
                        times["late"].append(shown["seconds"])
                    unframed += not shown["framed"]
            with open_page(browser, address, problems, served=True) as page:
                times["again"].append(measure(page, "usable"))
    return {"without_frames": unframed, **describe_all(times)}


def open_moment(
    page: Page, way: str, *arguments: Any, wait: bool = False, times: Times | None = None
) -> dict[str, Any]:
    """Open a record's panel, and close it again; return its seconds, and whether it had frames."""
    shown: dict[str, Any] = measure(page, way, *arguments)
    if wait and times is not None:
        advantage = measure(page, "advantage")
        if advantage["measured"]:
            times["advantage"].append(advantage["seconds"])
    page.keyboard.press("Escape")
    return shown


def measure_sizes(
    browser: Browser, run: RunDirectory, work: Path, repeats: int, problems: list[str]
) -> dict[str, dict[str, Any]]:
    """Return how fast served pages of runs of several sizes open, turn to rounds, and sort and filter the grid."""
    all_times: dict[str, Times] = {
        name: {key: [] for key in ("page", "again", "round", "sort", "filter")} for name in SHAPES
    }
    generator = np.random.default_rng(2)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        tiled = {}
        for number, (name, (rounds, records)) in enumerate(track(SHAPES.items(), "larger runs")):
            tile_run(run, Path(folder) / str(number), rounds=rounds, records=records)
            tiled[name] = RunDirectory.open(Path(folder) / str(number))
        for name in track([name for _ in range(repeats) for name in SHAPES], "sizes"):
            measure_size(browser, tiled[name], all_times[name], generator, problems)
    return {name: describe_all(times) for name, times in all_times.items()}


def measure_size(
    browser: Browser, run: RunDirectory, times: Times, generator: np.random.Generator, problems: list[str]
) -> None:
    """Add to `times` those of one server's page."""
    with serve_page(run.path) as address:
        with open_page(browser, address, problems, served=True) as page:
            times["page"].append(measure(page, "usable"))
            for number in choose_rounds(run, 5, generator):
                times["round"].append(measure(page, "slide", number, run.rounds().index(number)))
                times["sort"].append(measure(page, "sort", "advantage"))
                times["filter"].append(measure(page, "filter", "score", "<0"))
        with open_page(browser, address, problems, served=True) as page:
            times["again"].append(measure(page, "usable"))


def choose_rounds(run: RunDirectory, count: int, generator: np.random.Generator) -> list[int]:
    """Return rounds that a page does not open with, in a random order."""
    return [int(number) for number in generator.permutation(run.rounds()[:-1])[:count]]


def describe_all(times: Times) -> dict[str, Any]:
    """Return what each of several lists of seconds says; empty ones are left out."""
    return {name: describe_seconds(seconds) for name, seconds in times.items() if seconds}


def describe_machine(browser: Browser) -> dict[str, Any]:
    """Return on what is measured, and what else the machine does."""
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "load_before": round(os.getloadavg()[0], 2),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "chromium": browser.version,
    }


def check_parts(parts: str) -> list[str]:
    """Return the parts that a list with commas names.

    Raises:
        typer.BadParameter: one is unknown.
    """
    names = [name.strip() for name in parts.split(",")]
    if unknown := [name for name in names if name not in PARTS]:
        raise typer.BadParameter(f"--parts has {', '.join(unknown)}; there are {', '.join(PARTS)}.")
    return names


def write_summary(out: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Put parts into summary.json, next to those that are there; return all of it."""
    file = out / "summary.json"
    summary: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    summary |= changes
    with write_atomically(file) as temporary:
        temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def main(
    run: Annotated[Path, typer.Option(help="The run; trained first if it is not there.")] = Path("out/lander"),
    work: Annotated[Path, typer.Option(help="Where the offline file and the larger runs go.")] = Path("out/pages"),
    out: Annotated[Path, typer.Option(help="The directory of summary.json and README.md.")] = Path("results/pages"),
    parts: Annotated[str, typer.Option(help="What to measure; the other figures stay.")] = ",".join(PARTS),
    repeats: Annotated[int, typer.Option(help="How often each page is opened.", min=1)] = 5,
    moments: Annotated[int, typer.Option(help="Rounds, and records, that each served page opens.", min=4)] = 20,
    rewrite: Annotated[bool, typer.Option(help="Write the offline file anew.")] = True,
) -> None:
    """Measure what whence promises of its pages."""
    names = check_parts(parts)
    if not (out / "README.md").exists():
        raise typer.BadParameter(f"{out} holds no README.md for the figures. Copy the one of results/pages.")
    work.mkdir(parents=True, exist_ok=True)
    if not (run / "config.json").exists():
        call_whence(*TRAINING, "--run", str(run))
    directory, file = RunDirectory.open(run), work / "lander.html"
    problems: list[str] = []
    changes: dict[str, Any] = {"problems": problems}
    if "file" in names and (rewrite or not file.exists()):
        start = time.perf_counter()
        call_whence("report", str(run), "--out", str(file))
        changes["seconds_to_write_the_file"] = round(time.perf_counter() - start, 1)
    with open_browser() as browser:
        changes |= describe_machine(browser)
        measurements: dict[str, Callable[[], Any]] = {
            "file": lambda: measure_file(browser, file, directory, repeats, problems),
            "served": lambda: measure_served(browser, directory, moments, max(1, repeats // 2), problems),
            "sizes": lambda: measure_sizes(browser, directory, work, repeats, problems),
        }
        for name in names:  # what was measured stays if a later part is interrupted
            changes[name] = measurements[name]()
            write_figures(write_summary(out, changes), out / "README.md")


if __name__ == "__main__":
    typer.run(main)
