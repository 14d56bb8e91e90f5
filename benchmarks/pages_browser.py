"""Pages in headless Chromium, and the seconds until they show what was asked for."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, Route, sync_playwright

PATIENCE = 300_000
"""Milliseconds after which a page counts as broken."""

STOPWATCH = """
const look = (selector) => document.querySelector(selector);
const isVisible = (selector) => Boolean(look(selector)?.checkVisibility());
const firstRow = () => look("#grid .tabulator-row button.link")?.getAttribute("aria-label") ?? null;
const firstCard = () => look(".column:not([hidden]) .card")?.dataset.record ?? null;
const shownRound = () => look("#explorer-round-name b")?.textContent.split(" of ")[0] ?? null;
const isUsable = () => Boolean(shownRound()) && isVisible(".card") && isVisible("#grid .tabulator-row");

// The time at which a frame has been painted in which something holds.
const whenPainted = (holds) => new Promise((resolve, reject) => {
  const late = performance.now() + PATIENCE;
  const check = () => {
    if (holds()) requestAnimationFrame(() => resolve(performance.now()));
    else if (performance.now() > late) reject(new Error(`Not seen: ${holds}`));
    else requestAnimationFrame(check);
  };
  check();
});

// Seconds from an action until what it asks for is painted.
async function time(act, holds) {
  const start = performance.now();
  act();
  return (await whenPainted(holds) - start) / 1000;
}

// Counted from the start of the navigation.
const usable = whenPainted(isUsable);

const stopwatch = window.stopwatch = {
  usable: async () => (await usable) / 1000,

  round(number, act) {
    const [card, row, name] = [firstCard(), firstRow(), `Round ${number.toLocaleString("en")}`];
    const isNew = (one, before) => one !== null && one !== before;
    return time(act, () => shownRound() === name && isNew(firstCard(), card) && isNew(firstRow(), row));
  },

  slide(number, place) {
    const slider = look("#explorer-round");
    return stopwatch.round(number, () => { slider.value = place; slider.dispatchEvent(new Event("input")); });
  },

  async moment(act, record) {
    const title = `Record ${Number(record).toLocaleString("en")}`;
    const image = () => look("#moment figure img");
    const isShown = () => look("#moment-title")?.textContent === title && isVisible("#moment .story")
      && look("#moment .moment-place").textContent !== "Loading …" && (!image() || (image().complete && image().naturalWidth > 0));
    return { seconds: await time(act, isShown), framed: Boolean(image()) };
  },

  card() {
    const card = look(".column:not([hidden]) .card");
    return stopwatch.moment(() => card.click(), card.dataset.record);
  },

  record(number, record) {
    return stopwatch.moment(() => { location.hash = `#run=0&round=${number}&record=${record}`; }, record);
  },

  async advantage() {
    const isPending = () => [...document.querySelectorAll("#moment .note")].some((note) => note.textContent.startsWith("Being measured"));
    const seconds = await time(() => {}, () => !isPending());
    return { seconds, measured: Boolean(look("#moment .measures")) };
  },

  sort(column) {
    const row = look("#grid .tabulator-row");
    return time(
      () => look(`#grid .tabulator-col[tabulator-field="${column}"] .tabulator-col-title`).click(),
      () => ![null, row].includes(look("#grid .tabulator-row")) && look(`#grid [tabulator-field="${column}"]`).ariaSort === "ascending",
    );
  },

  filter(column, text) {
    const note = look("#grid-note").textContent;
    const input = look(`#grid .tabulator-col[tabulator-field="${column}"] input`);
    return time(
      () => { input.value = text; input.dispatchEvent(new Event("input")); },
      () => look("#grid-note").textContent !== note && firstRow() !== null,
    );
  },
};
"""
"""Runs in a page before its own scripts do."""


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Yield a headless Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        raise SystemExit("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as driver:
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []  # root, as in a container, has no sandbox to offer
        browser = driver.chromium.launch(executable_path=chromium, args=arguments)
        yield browser
        browser.close()


@contextmanager
def open_page(browser: Browser, address: str, problems: list[str], *, served: bool) -> Iterator[Page]:
    """Yield a page in a context of its own, without a network: only the page's own address is answered.

    Args:
        browser: from `open_browser`.
        address: the page's.
        problems: gets whatever the page complains of on its console, and asks for elsewhere.
        served: whether the page may ask the server at its address for more.
    """
    context = browser.new_context(viewport={"width": 1600, "height": 900})

    def refuse_others(route: Route) -> None:
        url = route.request.url
        if url == address or (served and url.startswith(address)):
            route.continue_()
        else:
            problems.append(f"asks for {url[:100]}")
            route.abort()

    context.route("**/*", refuse_others)
    context.add_init_script(f"const PATIENCE = {PATIENCE};{STOPWATCH}")
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.goto(address, wait_until="commit")
    try:
        yield page
    finally:
        context.close()


def measure(page: Page, call: str, *arguments: Any) -> Any:
    """Return what a method of the page's stopwatch returns, once it does."""
    return page.evaluate(f"(given) => stopwatch.{call}(...given)", list(arguments))
