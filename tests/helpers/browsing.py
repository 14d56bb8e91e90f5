"""Pages in a browser that reports whatever goes wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install '.[dev]'")

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\"&amp;"
TURNED = "\u202eشَجَرة"  # right to left, also for what follows


@contextmanager
def open_page(browser, path, *, width=1600, colour_scheme="light", link="", script="", **options) -> Iterator:
    """The page, with nothing to load from; whatever it complains of, or asks for, fails the test."""
    problems = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=colour_scheme, **options)

    def refuse_others(route):
        if route.request.url == path.as_uri():
            route.continue_()
        else:
            problems.append(f"asks for {route.request.url[:100]}")
            route.abort()

    context.route("**/*", refuse_others)
    if script:
        context.add_init_script(script)
    page = context.new_page()
    page.set_default_timeout(10_000)
    page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.goto(path.as_uri() + link)
    yield page
    assert page.evaluate("window.hacked") is None
    assert problems == []
    context.close()
