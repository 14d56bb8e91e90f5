"""Each page of the gallery says first what the gallery says of it, and that is the fault that was planted."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMED = {
    "swapped": ("wrong", "Actions left and right are swapped in environment 7"),
    "late": ("wrong", "Rewards look late by a step or more"),
    "stale": ("wrong", "An old observation is shown again in 50"),
    "aborted": ("wrong", "Episodes end early without a sign"),
    "unlimited": ("wrong", "A time limit is reported as an end"),
    "gamed": ("unusual", "A reward of 0.2 is collected again and again at the same place"),
    "collapse": ("wrong", "It worked, then it broke"),
}
"""The rank and the beginning of each page's first finding; the sound one has none."""


def read_run(name: str) -> dict[str, Any]:
    """Return what a built page knows of its run."""
    page = (ROOT / f"out/site/gallery/{name}.html").read_text(encoding="utf-8")
    (run,) = json.loads(re.search(r'id="page-data">(.*?)</script>', page)[1])["runs"]
    return run


def read_entries() -> dict[str, str]:
    """Return the gallery's quotes, by the names of the pages."""
    text = (ROOT / "out/gallery/list.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^## \[[^]]+\]\(gallery/(\w+)\.html\)\n.*?^> (.*?)$", text, re.DOTALL | re.MULTILINE))


@pytest.mark.site
def test_the_gallery_has_a_link_to_each_page() -> None:
    links = re.findall(r'href="gallery/(\w+)\.html"', (ROOT / "out/site/gallery.html").read_text(encoding="utf-8"))
    assert {*links} == {"sound", *NAMED} == read_entries().keys()


@pytest.mark.site
@pytest.mark.parametrize("name", NAMED)
def test_a_page_names_its_fault_first(name: str) -> None:
    first = read_run(name)["findings"][0]
    rank, title = NAMED[name]
    assert (first["rank"], first["title"][: len(title)]) == (rank, title)
    assert read_entries()[name] == f"**{rank}**: {first['title']}."


@pytest.mark.site
def test_nothing_is_wrong_with_the_sound_training() -> None:
    run = read_run("sound")
    assert [finding["rank"] for finding in run["findings"] if finding["rank"] == "wrong"] == []
    first = [f"**{one['rank']}**: {one['title']}." for one in run["findings"]] or [run["looked"]["silence"]]
    assert read_entries()["sound"] == first[0]
