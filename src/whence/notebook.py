"""Tables as HTML for notebooks: no scripts, and colours that are legible on light and on dark pages."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

import torch
from torch import Tensor

HELP, HARM, NEUTRAL = "#3b82f6", "#e05260", "#8b949e"

BINS = 12
"""Columns of a histogram."""

Cell: TypeAlias = "str | int | float | Bar | Histogram | None"
"""Text and numbers are shown as they are; None is an empty cell."""

_CELL = "padding:.15em .6em;border:0;background:transparent;color:inherit;text-align:"


@dataclass(frozen=True)
class Bar:
    """A bar to the right of a line in the middle for numbers above 0, to its left for those below.

    Attributes:
        share: the length as a share of the longest, from -1 to 1.
    """

    share: float


@dataclass(frozen=True)
class Histogram:
    """Small columns, one for each count."""

    counts: Sequence[float]


def format_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table as HTML; all text is escaped.

    Args:
        title: the line above the table.
        headings: the columns' names.
        rows: the cells, row by row.
    """
    head = "".join(
        f'<th style="{_CELL}left;border-bottom:1px solid {NEUTRAL}">{escape(heading)}</th>' for heading in headings
    )
    body = "".join(f'<tr style="background:transparent">{"".join(map(_format_cell, row))}</tr>' for row in rows)
    return (
        f'<div style="color:inherit"><div style="margin:.3em 0">{escape(title)}</div>'
        f'<table style="border-collapse:collapse;border:0;margin:0"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def format_columns(title: str, columns: Iterable[tuple[str, Tensor]]) -> str:
    """Return a table with a row for each column of records: shape, type, range, mean and histogram, as HTML.

    Args:
        title: the line above the table.
        columns: names with tensors, (n, ...) each.
    """
    headings = ("column", "shape", "type", "least", "mean", "largest", "histogram")
    return format_table(title, headings, [_describe_column(name, tensor.detach()) for name, tensor in columns])


def _describe_column(name: str, tensor: Tensor) -> list[Cell]:
    cells: list[Cell] = [name, " × ".join(map(str, tensor.shape)), str(tensor.dtype).removeprefix("torch.")]
    numbers = tensor.flatten().double().cpu()
    low, high, mean = float(numbers.min()), float(numbers.max()), float(numbers.mean())
    counts = torch.histc(numbers, bins=BINS, min=low, max=high).tolist() if low < high else [float(len(numbers))]
    return [*cells, low, mean, high, Histogram(counts)]


def format_number(value: float) -> str:
    """Return a number with four significant digits."""
    return f"{value:.4g}"


def _format_cell(cell: Cell) -> str:
    if isinstance(cell, Bar):
        return f'<td style="{_CELL}left">{_format_bar(cell.share)}</td>'
    if isinstance(cell, Histogram):
        return f'<td style="{_CELL}left">{_format_histogram(cell.counts)}</td>'
    if isinstance(cell, str) or cell is None:
        return f'<td style="{_CELL}left">{escape(cell or "")}</td>'
    text = format_number(cell) if isinstance(cell, float) else str(cell)
    return f'<td style="{_CELL}right">{escape(text)}</td>'


def _format_bar(share: float) -> str:
    width = 0.0 if not math.isfinite(share) else 50 * min(abs(share), 1.0)
    left = 50 - width if share < 0 else 50
    bar = f"left:{left:.1f}%;width:{width:.1f}%;background:{HARM if share < 0 else HELP}"
    return (
        '<div style="position:relative;width:8em;height:.8em">'
        f'<div style="position:absolute;top:0;bottom:0;{bar}"></div>'
        f'<div style="position:absolute;top:0;bottom:0;left:50%;width:1px;background:{NEUTRAL}"></div></div>'
    )


def _format_histogram(counts: Sequence[float]) -> str:
    largest = max(counts, default=0) or 1
    bars = "".join(
        f'<div style="width:.45em;margin-right:1px;height:{max(100 * count / largest, 3 if count else 0):.0f}%;'
        f'background:{NEUTRAL}"></div>'
        for count in counts
    )
    return f'<div style="display:flex;align-items:flex-end;height:1.3em">{bars}</div>'
