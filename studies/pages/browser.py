"""Pages in headless Chromium, and the seconds until they show what was asked for."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Route, sync_playwright

PATIENCE = 300_000
"""Milliseconds after which a page counts as broken."""

STOPWATCH = Path(__file__).with_name("stopwatch.js")
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
    context.add_init_script(f"const PATIENCE = {PATIENCE};\n{STOPWATCH.read_text(encoding='utf-8')}")
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
