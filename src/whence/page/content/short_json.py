"""Values as short JSON: numbers of a few digits, text cut to a length, nothing that is not finite."""

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

LONGEST = 240
"""Characters of an observation, an action or a reason that a page holds at most."""

_PLAIN = {int, str, bool, type(None)}


def spread(numbers: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of some numbers: the first, the last, and others evenly between."""
    places = range(len(numbers)) if len(numbers) <= most else np.linspace(0, len(numbers) - 1, most).round().astype(int)
    return [numbers[place] for place in places]


def cut_text(text: str, longest: int = LONGEST) -> str:
    """Return text, cut off after `longest` characters."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def round_numbers(value: Any, digits: int = 6) -> Any:
    """Return a value in JSON types, with so many significant digits; null for a number that is not finite.

    Whole numbers are integers, which are shorter.
    """
    if isinstance(value, float):
        short = float(f"{value:.{digits}g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short if math.isfinite(short) else None
    if isinstance(value, Mapping):
        return {key: round_numbers(entry, digits) for key, entry in value.items()}
    if isinstance(value, list | tuple | pl.Series):
        # Most of a round's entries stay as they are, and a call of each would take half of the time.
        return [entry if type(entry) in _PLAIN else round_numbers(entry, digits) for entry in value]
    return value


def write_json(value: Any) -> str:
    """Return a value as JSON without spaces, in ASCII, so that no character of it ends a line of a script."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def compress_text(text: str) -> str:
    """Return a text, compressed by gzip, as base64; equal texts give equal ones."""
    return base64.b64encode(gzip.compress(text.encode("utf-8"), 9, mtime=0)).decode("ascii")
