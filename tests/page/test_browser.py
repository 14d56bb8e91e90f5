"""The pages in a browser: what they load, and how they and their figures look."""

from pathlib import Path

import numpy as np
import pytest

from helpers.browsing import HOSTILE, TURNED, open_page, playwright
from helpers.compared_runs import by_hand, records_of, run_of
from whence.lab import write_comparison
from whence.lab.arms import ARMS
from whence.lab.comparison import run_path
from whence.page import write_report
from whence.runs import RunDirectory

ENV = f"{HOSTILE} {TURNED} {'x' * 300}"


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("pages")
    arms = list(ARMS)
    comparison = by_hand(path / "comparison", env=ENV, env_kwargs={HOSTILE: ENV}, arms=arms, scored=arms[1:2])
    for config in comparison.configs:
        directory = RunDirectory.open(run_path(comparison.path, config))
        scored = config.arm != "ppo"
        for number in (1, 2):
            observation = np.full((60, 30), number / 3)
            directory.write_round("records", number, records_of(scored=scored, observation=observation))
    write_comparison(comparison, path / "comparison.html")
    hostile = {"reason": f"{TURNED} {HOSTILE}", "observation": None, f"observation.{HOSTILE}": np.arange(60) / 7}
    write_report(run_of(path / "run", {"env": ENV, "rule": HOSTILE}, (1, 2, 7), **hostile), path / "run.html")
    write_report(run_of(path / "empty", {"env": ENV, "hyperparameters": {HOSTILE: ENV}}), path / "empty.html")
    return {name: path / f"{name}.html" for name in ("comparison", "run", "empty")}


def luminance(colour) -> float:
    red, green, blue = (float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


@pytest.mark.parametrize(
    ("name", "figures", "width", "colour_schemes"),
    [("comparison", 6, 390, ("light",)), ("run", 1, 1600, ("dark", "light"))],
)
def test_a_page_is_readable_and_follows_the_preference(browser, pages, name, figures, width, colour_schemes):
    with open_page(browser, pages[name], width=width, colour_scheme=colour_schemes[0]) as page:
        for colour_scheme in colour_schemes:
            page.emulate_media(color_scheme=colour_scheme)
            check_readable(page, figures, width, colour_scheme)


def check_readable(page, figures, width, colour_scheme):
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for figure in page.locator(".figure").all():  # drawn when the reader comes near
        figure.scroll_into_view_if_needed()
        playwright.expect(figure.locator(".main-svg .infolayer")).to_have_count(1)
    assert page.locator(".figure").count() == figures
    ground, ink = page.evaluate("(style => [style.backgroundColor, style.color])(getComputedStyle(document.body))")
    brighter, darker = (ground, ink) if colour_scheme == "light" else (ink, ground)
    assert luminance(brighter) > 0.8
    assert luminance(darker) < 0.2
    soft = page.locator("header p").evaluate("text => getComputedStyle(text).color")
    for figure in page.locator(".figure").all():
        figure.scroll_into_view_if_needed()
        playwright.expect(figure.locator(".xtick text").first).to_have_css("fill", soft)  # drawn in this scheme
        assert figure.bounding_box()["width"] <= width
        plot, legend = (figure.locator(part) for part in ("rect.nsewdrag", "g.legend"))
        if legend.count():
            box = legend.bounding_box()
            assert box["y"] + box["height"] <= plot.first.bounding_box()["y"] + 1
            assert plot.first.bounding_box()["height"] > 150


def test_hostile_text_is_shown_as_text_and_no_button_of_a_figure_sends_it_away(browser, pages):
    with open_page(browser, pages["run"]) as page:
        assert page.locator("h1").text_content() == f"{ENV}: {HOSTILE}"
        assert page.title() == f"{ENV}: {HOSTILE} · whence"
        assert page.locator("#facts dd").first.text_content() == ENV
        page.locator("#figure-0").scroll_into_view_if_needed()
        page.locator("#figure-0 rect.nsewdrag").hover()
        buttons = page.locator("#figure-0 .modebar-btn")
        playwright.expect(buttons.first).to_be_visible()
        titles = buttons.evaluate_all("all => all.map(one => one.dataset.title)")
        assert titles == ["Download plot as a PNG", "Zoom", "Pan", "Reset axes"]


def test_an_arm_that_is_switched_off_stays_so_in_other_colours(browser, pages):
    with open_page(browser, pages["comparison"]) as page:
        lines = page.locator("#figure-0 .scatterlayer .trace")
        for number in (5, 0):
            page.locator(f"#figure-{number}").scroll_into_view_if_needed()
            playwright.expect(page.locator(f"#figure-{number} .xtick text").first).to_be_attached()
        drawn = lines.count()
        page.locator("#figure-0 .legendtoggle").first.click()
        playwright.expect(lines).to_have_count(drawn - 3)  # a line and both edges of its band
        ticks = page.locator("#figure-0 .xtick text").first
        before = ticks.evaluate("text => getComputedStyle(text).fill")
        page.emulate_media(color_scheme="dark")
        playwright.expect(ticks).not_to_have_css("fill", before)
        playwright.expect(lines).to_have_count(drawn - 3)


def test_a_browser_that_cannot_unpack_the_page_says_which_ones_can(browser, pages):
    with open_page(browser, pages["run"], script="delete window.DecompressionStream") as page:
        playwright.expect(page.locator("#explorer-status")).to_contain_text("Open it in Chrome or Edge 80")
        page.locator("#figure-0").scroll_into_view_if_needed()
        playwright.expect(page.locator("#figure-0")).to_contain_text("Open it in Chrome or Edge 80")
