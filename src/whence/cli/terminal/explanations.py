"""A response's score in the terminal, taken apart by its tokens and by the rows of the target."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import polars as pl
from rich.text import Text

from whence.cli.terminal.console import console, make_printable, make_table, print_line
from whence.cli.terminal.moment_tables import print_response, shorten, show_text

if TYPE_CHECKING:
    from whence.stored.language import Explanation

STRONG, WEAK = 0.4, 0.1
"""Shares of the largest part from which a token is coloured fully, and at all."""


def print_explanation(explanation: "Explanation", number: int, top: int) -> None:
    """Print a response with coloured tokens, the tokens that count most, and the rows that it pulls at most."""
    print_response(explanation.row, number, colour_tokens(explanation.tokens, explanation.parts))
    total = sum(explanation.parts)
    print_line(f"Blue tokens raise the target, orange ones lower it. Their parts sum to {total:.4g}.")
    places = sorted(range(len(explanation.parts)), key=lambda at: -abs(explanation.parts[at]))[: 2 * top]
    cells = [[at, show_text(explanation.tokens[at]), f"{explanation.parts[at]:+.3g}"] for at in sorted(places)]
    console.print(make_table(f"The {len(cells)} tokens that count most", ["position", "token", "part"], cells))
    for title, pulls in _choose_pulls(explanation, top).items():
        if pulls:
            about = "raises" if title == "with" else "lowers"
            rows = [_list_cells(pull, explanation.row["record_id"]) for pull in pulls]
            heading = f"What it pulls {title}: training on it {about} these terms of the target"
            console.print(make_table(heading, ["part", "of", "advantage", "prompt", "response"], rows))
    if explanation.note is not None:
        print_line(f"Note: {explanation.note}")


def colour_tokens(tokens: Sequence[str], parts: Sequence[float]) -> Text:
    """Return a response's text with its tokens coloured by sign and size of their parts."""
    largest = max(map(abs, parts), default=0.0) or 1.0
    text = Text()
    for token, part in zip(tokens, parts, strict=True):
        share, colour = abs(part) / largest, "#ff8a3d" if part < 0 else "#5f9bff"
        style = f"black on {colour}" if share >= STRONG else colour if share >= WEAK else ""
        text.append(make_printable(token), style)
    return text


def _choose_pulls(explanation: "Explanation", top: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the target with the largest parts above 0, and with the largest below."""
    part, pulls = pl.col("part"), explanation.pulls
    return {
        "with": pulls.head(top).filter(part > 0).to_dicts(),
        "against": pulls.tail(top).reverse().filter(part < 0).to_dicts(),
    }


def _list_cells(pull: dict[str, Any], explained: int) -> list[str]:
    name = "demonstration" if pull["record"] is None else f"record {pull['record']}"
    of = f"{name}, itself" if pull["record"] == explained else name
    advantage = "" if pull["advantage"] is None else f"{pull['advantage']:+.3g}"
    return [f"{pull['part']:+.3g}", of, advantage, shorten(pull["prompt"]), shorten(pull["response"])]


def describe_explanation(explanation: "Explanation", top: int) -> dict[str, Any]:
    """Return a response's explanation in JSON types."""
    names = ("record_id", "prompt", "response", "reward", "advantage", "score", "keep", "weight", "reason")
    pairs = zip(explanation.tokens, explanation.parts, strict=True)
    return {
        **{name: explanation.row.get(name) for name in names},
        "tokens": [{"text": text, "part": part} for text, part in pairs],
        "pulls": _choose_pulls(explanation, top),
        "notes": [] if explanation.note is None else [explanation.note],
    }
