"""What `studies.pages.run` measured, as tables, and as the figures of its README."""

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from studies.markdown import table
from whence.guards import write_atomically

SMALL, SHAPES = "20 × 2,048", {"20 × 2,048": (20, 2048), "1,000 × 2,048": (1000, 2048), "20 × 100,000": (20, 100_000)}
"""Rounds and records a round of the runs that are compared; the first is the small one."""

WORDS = {
    "page": "the page, opened right after `whence view` has said its address",
    "again": "the page, opened again",
    "round": "another round",
    "sort": "the grid sorted by another column",
    "filter": "the grid filtered (0.25 s of it wait for more typing)",
}


class Promise(NamedTuple):
    """What whence promises of its pages.

    Attributes:
        text: the promise.
        place: keys of what was measured, in the summary.
        limit: the largest value that keeps it.
        short: the promise in a word or two, where it is one of the main ones.
        unit: of the limit.
    """

    text: str
    place: tuple[str, ...]
    limit: float
    short: str = ""
    unit: str = "s"


PROMISES = (
    Promise("the file of all 150 rounds", ("file", "bytes"), 25e6, "file", "MB"),
    Promise("the file is usable, from the start of the navigation", ("file", "usable"), 2, "usable in"),
    Promise("any round opens, served", ("served", "round"), 1, "served round"),
    Promise("any moment's frames are shown, served", ("served", "frames"), 2, "its frames"),
    *(Promise(f"any round opens, served, {name} records", ("sizes", name, "round"), 1) for name in list(SHAPES)[1:]),
)


def describe_seconds(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the median and the maximum of some times, and all of them to the millisecond."""
    rounded = [round(value, 3) for value in seconds]
    return {
        "median": round(statistics.median(rounded), 3),
        "maximum": max(rounded),
        "n": len(rounded),
        "seconds": rounded,
    }


def judge_promise(promise: Promise, summary: Mapping[str, Any]) -> tuple[float, float, bool] | None:
    """Return the median and the maximum of what was measured, and whether the maximum keeps the promise.

    None: it was not measured.
    """
    measured: Any = summary
    for key in promise.place:
        if not isinstance(measured, Mapping) or key not in measured:
            return None
        measured = measured[key]
    pair = (measured["median"], measured["maximum"]) if isinstance(measured, Mapping) else (measured, measured)
    return *pair, pair[1] <= promise.limit


def format_value(value: float, unit: str) -> str:
    """Return seconds or bytes as text."""
    return f"{value / 1e6:.1f} MB" if unit == "MB" else f"{value:.2f} s"


def write_figures(summary: Mapping[str, Any], readme: Path) -> None:
    """Put what was measured between the marks of a README."""
    text = readme.read_text(encoding="utf-8")
    for name, content in (("figures", tell_figures(summary)), ("tables", "\n\n".join(make_tables(summary)))):
        text = replace_marked(text, name, content)
    with write_atomically(readme) as temporary:
        temporary.write_text(text, encoding="utf-8")


def replace_marked(text: str, name: str, content: str) -> str:
    """Return a text with other content between `<!-- name -->` and `<!-- end of name -->`.

    Raises:
        ValueError: the text has no such marks.
    """
    marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(marks[0])}.*?{re.escape(marks[1])}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"The text has no marks {marks[0]} and {marks[1]}.")
    return pattern.sub(lambda _: f"{marks[0]}\n{content}\n{marks[1]}", text)


def tell_figures(summary: Mapping[str, Any]) -> str:
    """Return the answer and the figures, as lines of a list."""
    results = [(promise, judge_promise(promise, summary)) for promise in PROMISES]
    judged = [(promise, *result) for promise, result in results if result is not None]
    missed = [promise.text for promise, _, _, kept in judged if not kept]
    answer = (
        f"no: {len(missed)} of {len(judged)} promises are missed ({'; '.join(missed)})"
        if missed
        else f"yes: all {len(judged)} promises hold at the slowest of their repeats"
    )
    problems = len(summary["problems"])
    complaints = f"{problems} complaints of the browser" if problems else "the browser complained of nothing"
    shown = [f"{promise.short} {format_value(median, promise.unit)}" for promise, median, *_ in judged if promise.short]
    return f"- **Answer**: {answer}; {complaints}.\n- **Figure** (medians): {', '.join(shown)}."


def make_tables(summary: Mapping[str, Any]) -> list[str]:
    """Return the tables of promises, of other times, and of runs of three sizes."""
    heads = ["what", "promise", "median", "maximum", "times", "kept"]
    rows = [heads]
    for promise in PROMISES:
        if (result := judge_promise(promise, summary)) is not None:
            median, maximum, kept = result
            cells = [format_value(value, promise.unit) for value in (promise.limit, median, maximum)]
            count = _count(summary, promise.place)
            rows.append([promise.text, f"≤ {cells[0]}", *cells[1:], count, "yes" if kept else "**no**"])
    return [*_describe_measurement(summary), table(rows), *_list_others(summary), *_compare_sizes(summary)]


def _describe_measurement(summary: Mapping[str, Any]) -> list[str]:
    if "machine" not in summary:
        return []
    versions = f"Python {summary['python']}, torch {summary['torch']}, Chromium {summary['chromium']}"
    return [
        f"- **Machine**: {summary['machine']}; load {summary['load_before']:.2f} before; {summary['date']}.\n"
        f"- **Versions**: {versions}."
    ]


def _count(summary: Mapping[str, Any], place: Sequence[str]) -> str:
    measured: Any = summary
    for key in place:
        measured = measured[key]
    return str(measured["n"]) if isinstance(measured, Mapping) else "1"


def _list_others(summary: Mapping[str, Any]) -> list[str]:
    texts = {
        ("file", "round"): "the file: the slider turns to another round",
        ("file", "moment"): "the file: a moment with frames opens",
        ("served", "page"): f"served: {WORDS['page']}",
        ("served", "again"): f"served: {WORDS['again']}",
        ("served", "late"): "served: frames of an episode's last step in its round",
        ("served", "advantage"): "served: the measured advantage, after the frames",
    }
    rows = [["what", "median", "maximum", "times"]]
    for (part, name), text in texts.items():
        if name in summary.get(part, {}):
            measured = summary[part][name]
            rows.append([text, *(f"{measured[key]:.2f} s" for key in ("median", "maximum")), str(measured["n"])])
    return [table(rows)] if len(rows) > 1 else []


def _compare_sizes(summary: Mapping[str, Any]) -> list[str]:
    sizes = summary.get("sizes", {})
    if not all(name in sizes for name in SHAPES):
        return []
    rows = [["rounds × records a round", *SHAPES]]
    for key, text in WORDS.items():
        cells = []
        for name in SHAPES:
            measured = sizes[name][key]
            ratio = "" if name == SMALL else f", × {measured['median'] / sizes[SMALL][key]['median']:.1f}"
            cells.append(f"{measured['median']:.2f} s (max {measured['maximum']:.2f} s{ratio})")
        rows.append([text, *cells])
    return [table(rows)]
