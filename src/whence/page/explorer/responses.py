"""A language model's response, opened: its tokens with their parts of the score, and the others to its prompt."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import polars as pl

from whence.page.explored_run import Round
from whence.page.explorer.columns import round_number, round_numbers, short_text

LONGEST_TEXT = 20_000
"""Characters of a prompt or response at most."""

MOST_TOKENS = 8_000
"""Tokens of a response whose parts are shown at most."""

GROUP = 32
"""Responses to one prompt that are shown at most."""

EXCERPT = 160
"""Characters of a response in a list."""

PART_DIGITS = 3
"""Significant digits of a part."""

TARGETS = {
    "ValidationLoss": "likelihood of the demonstrations",
    "SequenceReturn": "return of whole responses",
    "TokenReturn": "return of tokens",
}
"""What targets raise, in words, by the beginnings of their names in the configuration."""


def describe_response(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response's texts, tokens and numbers in JSON types.

    `tokens` holds the texts that the tokens add, and their parts of the score; it is null if they were not stored.
    """
    return {
        "record": row["record_id"],
        **{name: cut_text(row.get(name) or "") for name in ("prompt", "response")},
        "tokens": _list_tokens(row),
        **{name: round_number(row.get(name)) for name in ("reward", "advantage", "score", "error", "weight")},
        "dropped": row.get("keep") is False,
    }


def _list_tokens(row: Mapping[str, Any]) -> dict[str, Any] | None:
    texts, parts = row.get("token_texts"), row.get("token_parts")
    if not isinstance(texts, list) or not isinstance(parts, list) or not 0 < len(texts) == len(parts):
        return None
    if not all(isinstance(text, str) for text in texts):
        return None
    if not all(isinstance(part, float) and math.isfinite(part) for part in parts):
        return None
    shown = slice(MOST_TOKENS)
    return {
        "texts": [cut_text(text) for text in texts[shown]],
        "parts": round_numbers(parts[shown], PART_DIGITS),
        "left_out": max(0, len(texts) - MOST_TOKENS),
    }


def list_group(records: Round, prompt: Any, details: Collection[int] = ()) -> dict[str, Any]:
    """Return the responses of a round to one prompt in JSON types, the highest reward first.

    Args:
        records: the round.
        prompt: the prompt's text.
        details: records whose texts and tokens the page has already; they are left out.

    Returns:
        `responses`, and `total`, their number before some are left out for want of room.
    """
    table = records.table
    if "prompt" not in table.columns or not isinstance(prompt, str):
        return {"responses": [], "total": 0}
    by = [pl.col(name) for name in ("reward", "score") if name in table.columns]
    rows = table.filter(pl.col("prompt") == prompt).sort(*by, "record_id", descending=[*[True] * len(by), False])
    responses = [describe_response(row) for row in rows.head(GROUP).iter_rows(named=True)]
    for response in responses:
        del response["prompt"]
        if response["record"] in details:
            del response["response"], response["tokens"]
    return {"responses": responses, "total": len(rows)}


def list_groups(records: Round, details: Sequence[int]) -> list[dict[str, Any]]:
    """Return the groups of some records' prompts, those of more than one response; see `list_group`."""
    if "prompt" not in records.table.columns:
        return []
    rows = records.table.filter(pl.col("record_id").is_in(list(details)))
    groups = [list_group(records, prompt, details) for prompt in rows["prompt"].unique(maintain_order=True)]
    return [group for group in groups if group["total"] > 1]


def name_target(target: Any) -> str:
    """Return what a language model's target raises, in words; another target's own name."""
    text = str(target or "target")
    return next((words for name, words in TARGETS.items() if text.startswith(name)), text)


def cut_text(text: Any, longest: int = LONGEST_TEXT) -> str:
    """Return a text, cut off after so many characters."""
    return short_text(str(text), longest)
