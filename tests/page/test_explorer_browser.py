"""The page's explorer in a browser: rounds, strip, moments, grid, links; the keyboard, narrow screens, hostile text."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from helpers import pages
from helpers.browsing import HOSTILE, TURNED, open_page, playwright
from helpers.pages import BEST, EPISODES, LENGTH, WORST, make_language_round, make_page, make_round, write_file
from whence.page.templates import read_library

expect = playwright.expect
LIVE = "http://whence.test"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("explorer")
    rounds = {f"round-{run}-{n}": make_round(n, first=1000 * n) for run in (0, 1) for n in (1, 2, 3, 4)}
    one = {name: content for name, content in rounds.items() if name.startswith("round-0")}
    hostile = make_page(rounds=1, label=f"{HOSTILE} {TURNED}")
    hostile["runs"][0]["columns"] = [
        column | {"name": f"{column['name']}{HOSTILE}", "about": HOSTILE} for column in pages.COLUMNS
    ]
    unscored, bare = make_page(rounds=1, commands={"view": "whence view RUN", "why": None}), make_round(1)
    bare["round"] |= {"scored": False, "worst": [], "best": []}
    bare["round"]["strip"] |= {"scores": [None] * EPISODES * LENGTH}
    language = make_page(rounds=2, kind="responses")
    flags = [{"round": 1, "record_id": 7, "note": HOSTILE}]
    vowels = {"key": "reward.vowels", "name": "vowels", "about": "", "kind": "number"}
    language["runs"][0]["columns"] = [*pages.COLUMNS, vowels]
    language["runs"][0] |= {"curves": [{"name": HOSTILE, "about": HOSTILE, "values": [0.5, 0.25]}], "flags": flags}
    pictures = {
        "one": (make_page(), one),
        "two": (make_page(runs=2), rounds),
        "hostile": (hostile, {"round-0-1": make_round(1, text=f"{HOSTILE} {TURNED}")}),
        "unscored": (unscored, {"round-0-1": bare}),
        "language": (language, {f"round-0-{n}": make_language_round(n, text=HOSTILE) for n in (1, 2)}),
    }
    answers = {"answers_json": pages.embed(pages.make_answers(HOSTILE))}
    return {
        name: write_file(path / f"{name}.html", page, contents, **(answers if name == "language" else {}))
        for name, (page, contents) in pictures.items()
    }


@pytest.fixture(scope="module")
def tab(browser, files) -> Iterator:
    with open_page(browser, files["one"]) as tab:
        yield tab


@pytest.fixture(scope="module")
def language_tab(browser, files) -> Iterator:
    with open_page(browser, files["language"]) as tab:
        yield tab


@pytest.fixture
def page(tab, files) -> Any:
    return reload(tab, files["one"].as_uri())


def reload(tab, address) -> Any:
    """Return a tab with its page as it opens: a tab for each test would take three times as long."""
    assert tab.evaluate("window.hacked") is None
    tab.goto("about:blank")
    tab.goto(address)
    expect(tab.locator(".card").first).to_be_visible()
    return tab


def expect_link(page, link):
    # A closed panel says so in a task of its own, so the address may follow a moment later.
    expect(page).to_have_url(re.compile(re.escape(link) + "$"))


def first_score(page):
    return page.locator("#grid .tabulator-row .tabulator-cell[tabulator-field=score]").first


def open_worst(page):
    page.locator(".card").first.click()
    expect(page.locator("#moment .story")).to_be_visible()
    return page.locator("#moment")


class TestRounds:
    def test_the_last_round_is_shown_and_says_which_moment_harmed_most(self, page):
        expect(page.locator("#explorer-round-name b")).to_have_text("Round 4 of 4")
        expect(page.locator(".answer").first).to_contain_text("“fire left” at step 17 of episode 11")
        expect(page.locator(".answer").first).to_contain_text("−0.9 ± 0.05. That is beyond two errors")
        assert page.locator(".column:visible .trust li").count() == 2
        expect(page.locator(".card .what").first).to_contain_text("in environment 1")  # where there are several

    def test_the_slider_and_the_buttons_turn_the_rounds(self, page):
        slider = page.locator("#explorer-round")
        slider.focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator(".card").first).to_have_attribute("data-record", str(3000 + WORST))
        expect(slider).to_have_attribute(
            "aria-valuetext", "Round 3 of 4, return −80, 13% dropped, 40% of the scores below 0"
        )
        page.get_by_role("button", name="Previous round").click()
        page.get_by_role("button", name="Previous round").click()
        expect(page.locator(".card").first).to_have_attribute("data-record", str(1000 + WORST))
        expect(page.get_by_role("button", name="Previous round")).to_be_disabled()
        expect_link(page, "#run=0&round=1")

    def test_two_runs_stand_side_by_side(self, browser, files):
        with open_page(browser, files["two"]) as page:
            expect(page.locator(".card").first).to_be_visible()
            page.select_option("#explorer-other", label="iif, seed 1")
            expect(page.locator(".column-name")).to_have_text(["iif, seed 0, round 4", "iif, seed 1, round 4"])
            left, right = (box.bounding_box() for box in page.locator(".column").all())
            assert left["y"] == right["y"]
            assert left["x"] + left["width"] <= right["x"]
            expect_link(page, "#run=0&round=4&other=1&otherround=4")
            page.reload()
            expect(page.locator(".column-name")).to_have_text(["iif, seed 0, round 4", "iif, seed 1, round 4"])

    def test_the_map_shows_what_was_done_where(self, page):
        expect(page.locator("#map h3")).to_have_text(["10 most harmful records", "4 most helpful records"])
        worst, best = page.locator("#map svg.map").all()  # which does not wait, so what waits comes first
        assert worst.locator("rect.cell").count() == 6
        arrows = worst.locator("g.arrow").all()
        assert [arrow.get_attribute("class") for arrow in arrows] == ["arrow low", "arrow high"]
        assert "“down” at row 1, column 2: 9 records, mean score −0.5" in arrows[0].locator("title").text_content()
        assert "the advantage praised it in 0%" in arrows[0].locator("title").text_content()
        # Down from the middle of its cell, and thicker than the single record's.
        assert arrows[0].locator("path").get_attribute("d") == "M90,30 L90,47"
        widths = [float(arrow.locator("path").get_attribute("stroke-width")) for arrow in arrows]
        assert widths[0] > 1.5 * widths[1]
        # It looks right and turns right: the arrow bends down.
        assert arrows[1].locator("path").get_attribute("d") == "M90,90 Q108,90 108,96"
        assert best.locator("g.arrow circle").count() == 1
        labels = page.locator("#map .map-legend i.cell").evaluate_all(
            "marks => marks.map((mark) => mark.parentNode.innerText)"
        )
        kinds = worst.locator("rect.cell").evaluate_all("cells => cells.map((cell) => cell.classList[1])")
        assert sorted(labels) == sorted({kind for kind in kinds if kind})
        page.locator("#map summary").first.click()
        rows = page.locator("#map table").first.locator("tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text("row 1, column 2")
        # A turn has the name of a direction as well: it is told where the agent looked, and that a step goes there.
        assert [row.locator("td.text").text_content() for row in rows.all()] == ["down", "right, facing right"]


class TestStrip:
    def test_the_mouse_reads_and_opens_a_cell(self, page):
        strip = page.locator(".strip").first
        box = strip.bounding_box()
        rows = 6
        cell = min(16, box["width"] / LENGTH)
        position = {"x": 17.5 * cell, "y": box["height"] / rows * 1.4}
        strip.hover(position=position)
        expect(page.locator(".strip-foot .readout").first).to_have_text(
            "Record 4,057 · episode 11 of environment 1, step 17 (rewards sum to −99) · score −0.9 · dropped"
        )
        strip.click(position=position)
        expect(page.locator("#moment-title")).to_have_text("Record 4,057")

    def test_colours_tell_harm_from_help_and_mark_what_was_dropped(self, page):
        colours = """(strip, places) => {
            const cell = Math.min(16, strip.clientWidth / 40) * (strip.width / strip.clientWidth);
            const { data } = strip.getContext("2d").getImageData(0, 0, strip.width, strip.height);
            return places.map((place) => [0.4, 0.78].map((share) => {
                const [x, y] = [((place % 40) + 0.4) * cell, (Math.floor(place / 40) + share) * (strip.height / 6)];
                return [...data.slice(4 * (Math.floor(y) * strip.width + Math.floor(x)))].slice(0, 3);
            }));
        }"""
        (worst, mark), (best, bare) = page.locator(".strip").first.evaluate(colours, [WORST, BEST])
        assert worst[0] > 200 > 50 > worst[2]
        assert best[2] > 200 > 50 > best[0]
        assert max(mark) < 60
        assert bare == best

    def test_the_keyboard_reads_and_opens_a_cell(self, page):
        strip = page.locator(".strip").first
        strip.focus()
        page.keyboard.press("Home")
        for key in ["ArrowDown", *["ArrowRight"] * 17]:
            page.keyboard.press(key)
        assert strip.get_attribute("aria-valuetext").startswith("Record 4,057 · episode 11 of environment 1, step 17")
        page.keyboard.press("Enter")
        expect(page.locator("#moment-title")).to_have_text("Record 4,057")
        page.keyboard.press("Escape")
        expect(page.locator("#moment")).to_be_hidden()
        expect(strip).to_be_focused()


class TestMoment:
    def test_it_says_what_happened_and_whether_the_advantage_was_right(self, page):
        moment = open_worst(page)
        story = moment.locator(".story")
        expect(story).to_contain_text(
            "At step 17 of episode 11 in environment 1 the agent chose fire left. The reward was −0.3."
        )
        expect(story).to_contain_text("The critic expected −62.6; what followed was estimated at +12.4.")
        expect(story).to_contain_text("The advantage is the difference, +75, so training makes the action more likely.")
        verdict = "Fresh rollouts from this state measured −21 ± 4. The advantage had the wrong sign."
        expect(story).to_contain_text(verdict)
        expect(story).to_contain_text("Score −0.9 ± 0.05. Harmful: training on it lowers the estimated return.")
        expect(story).to_contain_text("It was dropped, so the round did not train on it: too low.")
        expect(moment).to_contain_text(
            "The advantage had the wrong sign. Fresh rollouts from this state measured −21 ± 4. "
            "It praised an action that was worse than average."
        )
        expect(moment.locator(".probabilities tbody tr").nth(1)).to_contain_text("20%50%")

    def test_advantages_are_judged_by_their_errors(self, tab):
        for advantage, truth, error, words in (
            (75, -21, 4, "The advantage had the wrong sign."),
            (-3, 21, 4, "The advantage had the wrong sign."),
            (20, 21, 4, "The advantage was right."),
            (75, 21, 4, "The advantage had the right sign, but was too large."),
            (-5, -21, 4, "The advantage had the right sign, but was too small."),
            (75, -7, 4, "The advantage was too high."),
            (-75, -7, 4, "The advantage was too low."),
            (-9, -7, 4, "It cannot be told whether the advantage was right."),
            (75, None, None, "Not measured here."),
        ):
            assert tab.evaluate("args => Whence.judgeAdvantage(...args)[1]", [advantage, truth, error]) == words

    def test_values_are_no_finer_than_their_errors(self, tab):
        for value, error, text in (
            *((-22.3, 13.54, "−22 ± 14"), (-14.87, 9.993, "−15 ± 10"), (0.9792, 0.1746, "+0.98 ± 0.17")),
            *((-0.000968, 0.25, "0 ± 0.25"), (-0.9, 0.05, "−0.9 ± 0.05"), (12.3456, None, "+12.3"), (3, 0, "+3 ± 0")),
        ):
            assert tab.evaluate("args => Whence.withError(...args)", [value, error]) == text

    def test_frames_scrub_and_play(self, page):
        moment = open_worst(page)
        image, slider, stage = (moment.locator(name) for name in ("figure img", "input[type=range]", ".stage"))
        expect(stage).to_have_text("Step 17: the moment")
        first = image.get_attribute("src")
        x = moment.locator(".curves .cursor").get_attribute("x1")
        slider.focus()
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        expect(stage).to_have_text("Step 20: 3 steps after")
        assert image.get_attribute("src") == pages.draw_frame(7) != first
        assert float(moment.locator(".curves .cursor").get_attribute("x1")) > float(x)
        moment.get_by_role("button", name="Before").click()
        expect(stage).to_have_text("Step 9: 8 steps before (the picture is of step 13)")
        expect(image).to_have_attribute("alt", "What the agent saw at step 13")
        moment.get_by_role("button", name="Play").click()
        expect(stage).not_to_have_text("Step 9: 8 steps before (the picture is of step 13)")
        moment.get_by_role("button", name="Pause").click()
        standing = stage.text_content()
        page.wait_for_timeout(300)
        assert stage.text_content() == standing

    def test_next_previous_escape_and_focus(self, page):
        moment = open_worst(page)
        expect(moment.get_by_role("button", name="Previous moment")).to_be_disabled()
        moment.get_by_role("button", name="Next moment").click()
        expect(page.locator("#moment-title")).not_to_have_text("Record 4,057")
        expect(moment).to_contain_text("whence view RUN shows the frames.")
        moment.get_by_role("button", name="Previous moment").click()
        expect(page.locator("#moment-title")).to_have_text("Record 4,057")
        page.keyboard.press("Escape")
        expect(moment).to_be_hidden()
        expect(page.locator(f".card[data-record='{4000 + WORST}']")).to_be_focused()

    def test_a_link_restores_the_moment(self, browser, files):
        with open_page(browser, files["one"], link=f"#run=0&round=2&record={2000 + BEST}") as page:
            expect(page.locator("#moment-title")).to_have_text("Record 2,130")
            expect(page.locator("#explorer-round-name b")).to_have_text("Round 2 of 4")
            expect_link(page, f"#run=0&round=2&record={2000 + BEST}")
            page.get_by_role("button", name="Copy link").click()
            expect(page.locator(".copied")).to_have_text("Copied")
            page.keyboard.press("Escape")
            expect_link(page, "#run=0&round=2")

    def test_a_broken_link_shows_what_there_is(self, browser, files):
        with open_page(browser, files["one"], link="#run=x&round=99&record=<b>") as page:
            expect(page.locator("#explorer-round-name b")).to_have_text("Round 4 of 4")
            expect(page.locator("#moment")).to_be_hidden()


class TestGrid:
    def test_it_sorts_by_the_score_and_by_any_heading(self, page):
        expect(page.locator("#grid .tabulator-row").first).to_be_visible()
        expect(first_score(page)).to_have_text("−0.9")
        page.locator("#grid .tabulator-col[tabulator-field=score] .tabulator-col-title").click()
        expect(first_score(page)).to_have_text("+0.8")
        heading = page.locator("#grid .tabulator-col[tabulator-field=record_id]")
        heading.focus()
        page.keyboard.press("Enter")
        expect(page.locator("#grid .tabulator-row").first).to_contain_text("4,000")

    def test_filters_and_search_leave_what_fits(self, page):
        note = page.locator("#grid-note")
        expect(note).to_have_text("240 of the 240 records of round 4.")
        page.get_by_label("Filter score").fill("<-0.5")
        expect(page.locator("#grid .tabulator-row")).to_have_count(1)
        page.get_by_label("Filter score").fill("")
        page.fill("#grid-search", "FIRE LEFT")
        expect(note).to_contain_text("60 of the 240")
        page.get_by_label("Filter kept").fill("dropped")
        expect(note).not_to_contain_text("60 of the 240")
        page.fill("#grid-search", "no such text")
        expect(page.locator("#grid")).to_contain_text("No record fits.")

    def test_all_rounds_that_a_file_holds_are_searched(self, page):
        rows, note = page.locator("#grid .tabulator-row"), page.locator("#grid-note")
        page.select_option("#grid-scope", "all")
        expect(note).to_have_text("960 of the 960 records of 4 rounds.")
        expect(page.locator("#grid-where")).to_be_hidden()  # it is the server's
        page.get_by_label("Filter round").fill("<2")
        expect(note).to_have_text("240 of the 960 records of 4 rounds.")
        page.get_by_label("Filter score").fill("<-0.5")
        expect(rows).to_have_count(1)
        rows.first.click()
        expect(page.locator("#moment-title")).to_have_text(f"Record {1000 + WORST:,}")
        expect_link(page, f"#run=0&round=1&record={1000 + WORST}")
        page.keyboard.press("Escape")
        page.locator(".pivot tbody button").first.click()
        expect(note).to_contain_text(" of the 240 records of round 1.")
        expect(page.locator("#grid-scope")).to_have_value("")  # groups are a round's

    def test_groups_findings_and_boxes_choose_records(self, page):
        rows, note = page.locator("#grid .tabulator-row"), page.locator("#grid-note")
        expect(page.locator(".pivot tbody td.unsure")).to_have_text(["+0.31", "+0.1 ± 0.29"])
        page.select_option("#groups-by", label="action")
        page.select_option("#groups-across", label="nothing else")
        page.get_by_role("button", name="fire left: −0.05 ± 0.01, 60 records").click()
        expect(note).to_contain_text("fire left: 60 of the 240")
        page.get_by_label("beyond two errors").check()
        expect(rows).to_have_count(1)
        page.get_by_role("button", name="Show all records").click()
        expect(rows).to_have_count(2)
        page.get_by_label("flagged").check()
        expect(rows).to_have_count(1)
        page.get_by_role("button", name="Previous round").click()
        expect(page.locator("#explorer-round-name b")).to_have_text("Round 3 of 4")
        # What is chosen by a column stays from round to round; ids of a finding are of one.
        expect(page.get_by_label("flagged")).to_be_checked()
        expect(note).to_have_text("1 of the 240 records of round 3.")
        page.get_by_label("flagged").uncheck()
        page.get_by_label("Filter score").fill("<-0.5")
        page.get_by_role("button", name="Previous round").click()
        expect(note).to_have_text("1 of the 240 records of round 2.")
        page.get_by_label("Filter score").fill("")

    def test_a_finding_sets_the_round_and_the_groups_and_marks_its_records(self, page):
        page.get_by_role("button", name="Previous round").click()
        expect(page.locator("#explorer-round-name b")).to_have_text("Round 3 of 4")
        expect(page.locator(".named")).to_have_count(0)
        page.get_by_role("button", name="Show the 2 of 240 records in round 4 that show it").click()
        note = page.locator("#grid-note")
        expect(note).to_contain_text(f"Fire left harms{pages.HOSTILE}: 2 of the 240 records of round 4.")
        expect(page.locator("#explorer-round-name")).to_contain_text("Round 4 of 4")
        expect(page.locator("#explorer-round-name")).to_contain_text("Finding 1 is about 2 of this round’s records")
        expect(page.locator("#groups-by")).to_have_value("action")
        expect(page.locator("#groups-across")).to_have_value("")
        expect(page.locator(".bars tr.named th")).to_have_text("fire left")
        expect(page.locator(".card.named")).to_have_count(2)
        expect(page.locator("#findings-list li.named")).to_have_count(1)
        page.locator(".card.named").first.click()
        expect(page.locator("#moment .moment-body p").first).to_contain_text("Part of the finding: Fire left harms")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Show all records").click()
        expect(page.locator("#grid .tabulator-row.named")).to_have_count(1)  # the other is on another page
        expect(page).to_have_url(re.compile("round=4&finding=1$"))
        page.reload()
        expect(note).to_contain_text("2 of the 240")
        page.get_by_role("button", name="Previous round").press("Enter")  # the page still scrolls to the records
        expect(page.locator(".named")).to_have_count(0)

    def test_what_was_looked_at_is_folded_below_the_findings(self, page):
        expect(page.locator("#findings-list h3")).to_have_text(f"wrong Fire left harms{pages.HOSTILE}")
        looked = page.locator("#findings-looked")
        expect(looked.get_by_text("kinds of records")).to_be_hidden()
        looked.get_by_text("What was looked at: 1 wrong, 1 fine, 1 could not be looked at").click()
        expect(looked.locator("h3")).to_have_text(["wrong", "fine", "could not be looked at"])
        name, text = f"rewards{pages.HOSTILE}", "as large in 3 of 9 healthy environments"
        expect(looked.locator("li").nth(1)).to_have_text(f"{name} {text}")
        expect(looked.locator("code")).to_have_text(pages.HOSTILE)
        expect(looked.locator("img")).to_have_count(0)

    def test_a_row_opens_its_moment(self, page):
        page.get_by_role("button", name="Open record 4,057").press("Enter")
        expect(page.locator("#moment-title")).to_have_text("Record 4,057")


class TestEveryone:
    def test_nothing_is_wider_than_the_screen_and_axe_finds_nothing_serious(self, browser, files):
        axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
        options = {"bypass_csp": True, "reduced_motion": "reduce"}
        with open_page(browser, files["two"], width=390, colour_scheme="dark", **options) as page:
            expect(page.locator("#grid .tabulator-row").first).to_be_visible()
            for width, scheme in ((390, "dark"), (1600, "light")):
                page.set_viewport_size({"width": width, "height": 900})
                page.emulate_media(color_scheme=scheme)
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                moment = open_worst(page)
                assert moment.bounding_box()["width"] <= width
                assert moment.locator(".moment-body").evaluate("body => body.scrollWidth <= body.clientWidth")
                serious = [
                    (rule["id"], [node["html"][:120] for node in rule["nodes"][:3]])
                    for rule in axe.run(page).response["violations"]
                    if rule["impact"] in ("serious", "critical")
                ]
                assert serious == []
                page.keyboard.press("Escape")

    def test_rewards_are_in_sight_on_a_narrow_screen(self, browser, files):
        with open_page(browser, files["language"], width=390) as page:
            rewards = page.locator("#grid .tabulator-col[tabulator-field='reward.vowels']")
            expect(rewards).to_be_visible()
            box = rewards.bounding_box()
            assert box["x"] + box["width"] < 390

    def test_the_keyboard_alone_reaches_everything(self, page):
        reached = set()
        for _ in range(90):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("(one => one.id || one.className || one.textContent)(document.activeElement)"))
        groups = ("explorer-round", "strip", "card low", "card high", "grid-search", "quiet")
        assert [name for name in groups if name not in reached] == []
        assert any("tabulator" in name for name in reached)

    def test_hostile_text_is_shown_as_text(self, browser, files):
        with open_page(browser, files["hostile"]) as page:
            expect(page.locator(".trust li").first).to_contain_text(HOSTILE)
            expect(page.locator("#grid .tabulator-row").first).to_be_visible()
            expect(page.locator(".tabulator-col-title").first).to_contain_text(HOSTILE)
            moment = open_worst(page)
            expect(moment.locator(".story")).to_contain_text(f"fire left{HOSTILE}")
            for state in moment.locator(".state").all():  # the metrics, then the observation
                expect(state).to_contain_text(HOSTILE)
            page.keyboard.press("Escape")
            expect(page.locator(".pivot thead")).to_contain_text(HOSTILE)
            page.locator(".pivot button").first.click()
            expect(page.locator("#grid-note")).to_contain_text(HOSTILE)
            assert page.locator("img[src=x]").count() == 0

    def test_without_scores_none_are_spoken_of(self, browser, files):
        with open_page(browser, files["unscored"]) as page:
            expect(page.locator(".strip-part h3").first).to_have_text("Records over time")
            expect(page.locator(".legend").first).to_be_hidden()
            expect(page.locator("#about-scores")).to_be_hidden()
            page.get_by_role("button", name="Open record").first.press("Enter")
            expect(page.locator("#moment .story")).to_be_visible()
            expect(page.locator("#moment")).not_to_contain_text("What taught it this?")


class TestResponses:
    @pytest.fixture
    def page(self, language_tab, files) -> Any:
        return reload(language_tab, files["language"].as_uri())

    def test_prompts_and_responses_are_shown_as_text(self, page):
        expect(page.locator(".card .what").first).to_have_text(f"Response {WORST} It. {HOSTILE}")
        moment = open_worst(page)
        expect(moment.locator("section pre").first).to_have_text(f"Say it. {HOSTILE}")
        expect(moment.locator("section pre").nth(1)).to_have_text(f"Say it. {HOSTILE}")
        assert page.locator("#explorer > h2").text_content() == "Rounds"
        expect(moment.locator(".story")).to_contain_text(
            "The reward was 0. The advantage was −0.5, so training makes the"
        )
        assert moment.get_by_text("Was the advantage right?").count() == 0
        assert moment.get_by_text("What it saw").count() == 0

    def test_the_responses_to_a_prompt_stand_side_by_side(self, page):
        moment = open_worst(page)
        expect(moment.get_by_role("heading", name="The 4 responses to this prompt")).to_be_visible()
        expect(moment.get_by_text("The highest reward first; 1 more are not shown.")).to_be_visible()
        cards = moment.locator(".group-card")
        expect(cards).to_have_count(3)
        expect(cards.nth(0)).to_contain_text("+0.8 ± 0.05")
        expect(cards.nth(0)).to_contain_text("Say it.")
        expect(cards.nth(1)).to_contain_text(f"Response {WORST}, this one")
        expect(cards.nth(1)).to_contain_text("no, dropped")
        expect(cards.nth(2)).to_contain_text(f"Say it. {HOSTILE}")
        boxes = [cards.nth(at).bounding_box() for at in range(3)]
        assert boxes[0]["y"] == boxes[1]["y"]
        assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
        assert cards.nth(2).get_by_role("button").count() == 0  # the file does not have it
        cards.nth(0).get_by_role("button", name=f"Response {BEST}").click()
        expect(page.locator("#moment-title")).to_have_text(f"Response {BEST}")

    def test_curves_prompts_turns_and_tokens(self, page):
        expect(page.locator("#round-curves figcaption")).to_have_text(f"{HOSTILE}0.25")
        page.locator("#round-curves svg").click(position={"x": 2, "y": 10})
        expect(page.locator("#round-curves figcaption")).to_have_text(f"{HOSTILE}0.5")
        expect_link(page, "#run=0&round=1")
        row = page.locator("#prompts .tabulator-row")
        expect(row).to_contain_text(f"Say it. {HOSTILE}")
        expect(row.locator("[tabulator-field='reward.vowels']")).to_have_text("0.25")
        # The table may draw its rows again once it has its size; a press and a release on two rows are no click.
        row.get_by_role("button").dispatch_event("click")
        moment = page.locator("#moment")
        expect(page.locator("#moment-title")).to_have_text(f"Response {BEST}")
        expect(moment.locator(".turns li").nth(0)).to_have_text(f"userSay it. {HOSTILE}")
        expect(moment.locator(".turns .call")).to_have_text(f"calls add({HOSTILE})")
        tokens = moment.locator(".tokens span")
        expect(tokens.nth(1)).to_have_attribute("title", "log-prob −3, entropy –")
        expect(tokens.nth(1)).to_have_attribute("style", re.compile("background"))
        moment.get_by_role("button", name="entropy").click()
        expect(tokens.nth(1)).not_to_have_attribute("style", re.compile("background"))
        assert page.locator("img[src=x]").count() == 0

    def test_answers_of_any_checkpoints(self, page):
        prompts = page.locator("#answers .answered > pre")
        expect(prompts.first).to_have_text(f"q{HOSTILE}")
        expect(page.locator("#answers-note")).to_contain_text("after round 2: mean reward 0.5")
        expect(page.locator("#answers .group-card")).to_have_count(4)
        page.get_by_label("after round 1").check()
        expect(page.locator("#answers .answered").first.locator(".group-card")).to_contain_text(
            [f"b{HOSTILE}", "The same answer.", f"c{HOSTILE}"]
        )
        page.locator("#answers-search").fill("c<")
        expect(prompts).to_have_count(1)

    def test_flags_are_exported(self, page):
        with page.expect_download() as download:
            page.get_by_role("button", name="Export flags").click()
        assert json.loads(download.value.path().read_text()) == {"round": 1, "record_id": 7, "note": HOSTILE}


class Server:
    """What a server answers, by hand: a run that goes on, and can go away."""

    def __init__(self):
        self.rounds, self.gone, self.asked, self.written = 2, False, [], []
        self.is_slow, self.waiting = False, []

    def answer(self, route):
        url = urlsplit(route.request.url)
        self.asked.append(url)
        if route.request.method == "PUT":
            self.written.append(route.request.post_data_json)
            return route.fulfill(json={"flag": self.written[-1]["note"], "records": 7})
        if self.gone and url.path != "/":
            return route.abort()
        if self.is_slow:
            return self.waiting.append(route)
        if url.path.startswith("/assets/"):
            return route.fulfill(content_type="text/javascript", body=read_library(Path(url.path).stem))
        if url.path == "/":
            return route.fulfill(content_type="text/html", body=pages.render(self.page(), {}))
        return route.fulfill(content_type="application/json", body=json.dumps(self.answer_api(url.path, url.query)))

    def page(self):
        return make_page(mode="served", rounds=self.rounds, finished=False, live=True, planned=9)

    def answer_api(self, path, query):
        if path == "/api/page":
            return self.page()
        if path == "/api/figures":
            return [{"title": HOSTILE, "about": HOSTILE, "figure": {"data": [{"y": [1, 2]}], "layout": {}}}]
        parts = path.split("/")
        if parts[-1] == "findings":
            return {"findings": [], "looked": pages.LOOKED, "opens": None}
        if parts[-2:] == ["0", "records"]:
            return self.answer_search(parse_qs(query))
        content = make_round(int(parts[5]))
        if len(parts) == 6:
            return content["round"] | {"rows": None}
        if parts[-1] == "pivot":
            return content["pivots"]["\n".join(sorted(parse_qs(query)["by"]))]
        if parts[-1] == "causes":
            return make_causes(int(parts[5]), int(parts[7]), parse_qs(query)["by"][0])
        if len(parts) == 8:
            return content["details"][str(WORST)] | {"record": int(parts[7])}
        asked = parse_qs(query)
        rows = content["round"]["rows"] if asked.get("dir") != ["desc"] else content["round"]["rows"][::-1]
        rows = [row for row in rows if asked.get("search", [""])[0] in row["action"]]
        start, size = (int(asked["page"][0]) - 1) * int(asked["size"][0]), int(asked["size"][0])
        counts = {"last_page": -(-len(rows) // size), "last_row": len(rows), "records": EPISODES * LENGTH}
        return counts | {"data": rows[start : start + size], "left_out": []}

    def answer_search(self, asked):
        """Of all rounds, the record with the lowest score of each."""
        rounds = [make_round(n)["round"] for n in range(1, self.rounds + 1)]
        rows = [row | {"round": one["round"]} for one in rounds for row in one["rows"] if row["record_id"] == WORST]
        counts = {"last_page": 1, "last_row": len(rows), "records": self.rounds * EPISODES * LENGTH}
        return counts | {"data": rows, "left_out": [1] if "where" in asked else []}


def make_causes(number, record, by):
    """What the server answers to: what taught it this?"""
    raised, lowered = make_round(1, text=HOSTILE)["round"]["best"][:3], make_round(2)["round"]["worst"][:2]
    return {
        **{"record": record, "round": number, "by": by, "notes": [], "rounds": [1, 2, 3]},
        "decision": f"“nothing{HOSTILE}” in record {record}: its probability was 25% and is 97% now.",
        "text": f"Round 1 speaks for it most, by {by}.",
        "sums": {"raised": [3.0, 1.0, 0.0], "lowered": [0.0, -1.5, 0.0]},
        "raised": [moment | {"round": 1} for moment in raised],
        "lowered": [moment | {"round": 2} for moment in lowered],
    }


POLL = 3000
"""Milliseconds until a page asks again whether a run under way has new rounds."""


@pytest.fixture(scope="module")
def live(browser) -> Iterator:
    """A tab, the servers by hand of which the last one answers it, and what went wrong."""
    servers, problems = [Server()], []
    context = browser.new_context(viewport={"width": 1600, "height": 900})
    context.route("**/*", lambda route: servers[-1].answer(route))
    tab = context.new_page()
    tab.clock.install()  # so that a test need not wait until the page asks again
    tab.set_default_timeout(10_000)
    tab.on("console", lambda message: None if servers[-1].gone else problems.append(message.text))
    tab.on("pageerror", lambda error: problems.append(str(error)))
    yield tab, servers, problems
    context.close()


@pytest.fixture
def served(live) -> Iterator:
    """The page of a server by hand, and the server."""
    tab, servers, problems = live
    tab.goto("about:blank")  # which asks the last server for nothing more
    servers.append(Server())
    problems.clear()  # an earlier test's
    yield reload(tab, f"{LIVE}/"), servers[-1]
    assert problems == []


class TestServed:
    def test_the_grid_asks_the_server(self, served):
        page, server = served
        expect(page.locator("#grid .tabulator-row")).to_have_count(25)
        expect(first_score(page)).to_have_text("−0.9")
        page.locator("#grid .tabulator-col[tabulator-field=score] .tabulator-col-title").click()
        expect(page.locator("#grid .tabulator-row").first).to_contain_text("+0.8")
        page.fill("#grid-search", "fire left")
        expect(page.locator("#grid-note")).to_have_text("60 of the 240 records of round 2.")
        page.get_by_label("Filter score").fill("<-0.1")
        page.wait_for_timeout(600)
        assert ["score:<-0.1"] in [parse_qs(url.query).get("filter") for url in server.asked]

    def test_what_is_found_is_told_once_its_rows_are_drawn(self, served):
        page, _ = served
        expect(page.locator("#grid-note")).to_have_text("240 of the 240 records of round 2.")
        page.evaluate("""() => {
            const rows = () => [...document.querySelectorAll("#grid .tabulator-cell[tabulator-field=action]")];
            const tell = () => { window.drawn = rows().every((cell) => cell.textContent === "fire left"); };
            new MutationObserver(tell).observe(document.getElementById("grid-note"), { childList: true });
        }""")
        page.fill("#grid-search", "fire left")
        expect(page.locator("#grid-note")).to_have_text("60 of the 240 records of round 2.")
        assert page.evaluate("window.drawn")

    def test_all_rounds_are_searched_and_what_is_found_is_opened(self, served):
        page, server = served
        rows, note = page.locator("#grid .tabulator-row"), page.locator("#grid-note")
        expect(rows).to_have_count(25)
        page.select_option("#grid-scope", "all")
        expect(rows).to_have_count(2)
        expect(page.locator("#grid .tabulator-cell[tabulator-field=round]")).to_have_text(["1", "2"])
        expect(note).to_have_text("2 of the 480 records of 2 rounds.")
        page.fill("#grid-where", "action = 2")
        page.keyboard.press("Enter")
        expect(note).to_contain_text("such as stored scores, are left out: 1.")
        asked = parse_qs([url for url in server.asked if url.path == "/api/runs/0/records"][-1].query)
        assert (asked["where"], "sort" in asked) == (["action = 2"], False)
        rows.first.get_by_role("button").click()
        expect(page.locator("#explorer-round-name b")).to_have_text("Round 1 of 9")
        expect(page.locator("#moment-title")).to_have_text(f"Record {WORST}")
        page.keyboard.press("Escape")
        expect(rows).to_have_count(2)  # what was found is still there
        page.select_option("#grid-scope", "")
        expect(note).to_have_text("240 of the 240 records of round 1.")

    def test_what_is_looked_for_before_the_first_answer_is_looked_for_then(self, served):
        page, server = served
        expect(page.locator("#grid .tabulator-row")).to_have_count(25)
        server.is_slow = True
        page.select_option("#grid-scope", "all")
        page.fill("#grid-where", "action = 2")
        page.keyboard.press("Enter")
        while not server.waiting:
            page.wait_for_timeout(20)
        server.is_slow = False
        server.answer(server.waiting.pop())
        expect(page.locator("#grid-note")).to_contain_text("are left out: 1.")

    def test_what_is_found_is_flagged_at_once(self, served):
        page, server = served
        flagging, note = page.locator("#grid-flagging"), page.locator("#grid-note")
        expect(note).to_have_text("240 of the 240 records of round 2.")
        expect(flagging).to_be_hidden()  # nobody flags all
        page.fill("#grid-search", "fire left")
        flagging.get_by_label("Note of these flags").fill("odd")
        flagging.get_by_role("button", name="Flag these 60 records").click()
        expect(note).to_have_text("7 flags set. 60 of the 240 records of round 2.")
        page.check("#grid-flagged")
        flagging.get_by_role("button", name="Remove these 60 flags").click()
        expect(note).to_have_text("7 flags removed. 60 of the 240 records of round 2.")
        assert server.written == [{"note": "odd"}, {"note": None}]
        urls = [url for url in server.asked if url.path == "/api/runs/0/rounds/2/flags"]
        assert [parse_qs(url.query).get("only") for url in urls] == [None, ["flagged"]]
        assert [parse_qs(url.query)["search"] for url in urls] == [["fire left"]] * 2

    def test_figures_come_when_the_round_is_shown(self, served):
        page, server = served
        expect(page.locator("#figures h2")).to_have_text(HOSTILE)
        page.locator("#figures .figure").scroll_into_view_if_needed()
        expect(page.locator("#figures .main-svg .infolayer")).to_have_count(1)
        paths = [url.path for url in server.asked]
        assert paths.index("/api/runs/0/rounds/2") < paths.index("/api/figures") < paths.index("/assets/plotly.js")

    def test_new_rounds_extend_the_slider_and_a_server_that_is_gone_is_said(self, served):
        page, server = served
        expect(page.locator("#explorer-live")).to_be_visible()
        expect(page.locator("#explorer-round-name b")).to_have_text("Round 2 of 9")
        server.rounds = 3
        page.clock.fast_forward(POLL)
        expect(page.locator("#explorer-round-name b")).to_have_text("Round 3 of 9")
        page.get_by_role("button", name="Previous round").click()
        server.rounds = 4
        page.clock.fast_forward(POLL)
        expect(page.locator("#explorer-round")).to_have_attribute("max", "3")
        expect(page.locator("#explorer-round-name b")).to_have_text("Round 2 of 9")
        server.gone = True
        page.clock.fast_forward(POLL)
        expect(page.locator("#explorer-status")).to_have_text("The server does not answer. Trying again …")
        server.gone = False
        page.clock.fast_forward(2 * POLL)
        expect(page.locator("#explorer-status")).to_have_text("")

    def test_a_flag_is_sent_with_its_note(self, served):
        page, server = served
        moment = open_worst(page)
        moment.get_by_label("Note").fill("look again")
        moment.get_by_role("button", name="Flag this record").click()
        expect(moment.locator(".flag")).to_contain_text("Saved with the run.")
        assert server.written == [{"note": "look again"}]
        moment.get_by_role("button", name="Remove flag").click()
        expect(moment.locator(".flag")).to_contain_text("Removed.")
        assert server.written[1:] == [{"note": None}]

    def test_what_taught_it_this(self, served):
        page, server = served
        moment = open_worst(page)
        assert not any(url.path.endswith("/causes") for url in server.asked)  # it scores all rounds
        moment.get_by_role("button", name="What taught it this?").click()
        expect(moment.locator(".causes .say")).to_contain_text(f"“nothing{HOSTILE}”")
        expect(moment.locator(".causes .card")).to_have_count(5)
        assert moment.locator(".cause-rounds rect").count() == 6
        heights = [float(bar.get_attribute("height")) for bar in moment.locator(".cause-rounds rect").all()]
        assert heights == pytest.approx([58, 0, 58 / 3, 29, 0, 0])
        moment.get_by_role("button", name="By influence").click()
        expect(moment.locator(".causes")).to_contain_text("by influence")
        expect(moment.locator(".causes")).to_contain_text("raised this action's log-probability")
        expect(moment.get_by_role("button", name="By influence")).to_have_attribute("aria-pressed", "true")
        assert page.evaluate("window.hacked") is None
        moment.locator(".causes .card").last.click()
        record = make_round(2)["round"]["worst"][1]["record"]
        expect(page.locator("#moment-title")).to_have_text(f"Record {record}")
        expect_link(page, f"#run=0&round=2&record={record}")
        page.go_back()
        expect(page.locator("#moment-title")).to_have_text(f"Record {WORST}")
        expect_link(page, f"#run=0&round=2&record={WORST}")
        expect(page.locator("#moment .story")).to_be_visible()
