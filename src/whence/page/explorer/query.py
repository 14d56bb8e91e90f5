"""The grid's questions to a round: pages of records, sorted, searched and filtered, without reading all of them."""

import math
import re
from collections.abc import Sequence
from typing import Any

import polars as pl

from whence.errors import WhenceError
from whence.page.explored_run import ExploredRun
from whence.page.explorer.columns import Column, Labels, list_columns, make_row

LARGEST_PAGE = 500
"""Rows of a page at most."""

_COMPARISON = re.compile(r"\s*(>=|<=|>|<|=)?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*", re.IGNORECASE)

_LARGEST_POWER = 300
"""Of 10: of a larger one no number is left."""

_INTEGERS = ("record_id", "env_index", "episode_id", "step", "tokens")


def query_records(
    run: ExploredRun,
    number: int,
    *,
    page: int = 1,
    size: int = 50,
    sort: str | None = None,
    descending: bool = False,
    search: str = "",
    filters: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    """Return one page of a round's records, in JSON types.

    Args:
        run: the run.
        number: the round.
        page: counted from 1.
        size: rows of a page.
        sort: a column's key; None: the score, or the record id if there is none. Records without a value come last.
        descending: whether the largest come first.
        search: text that one of the ids, actions, reasons, prompts or responses has to contain, in any case.
        filters: a column's key and a text for each. A text column has to contain it; a number takes >, >=, <, <= or =
            and a number; `keep` takes "kept" or "dropped".

    Returns:
        `last_page`, `last_row` and `data`, a list of records by the columns' keys.

    Raises:
        RunDirectoryError: the round is not there or cannot be read.
        WhenceError: a column is unknown, a filter has no meaning, or a number is out of range.
    """
    if page < 1 or not 1 <= size <= LARGEST_PAGE:
        raise WhenceError(f"page is {page} and size {size}; a page from 1 and a size from 1 to {LARGEST_PAGE} needed.")
    table, labels = run.round(number).table, run.labels
    names = table.columns
    columns = list_columns(names, is_language=run.is_language)
    by_key = {column.key: column for column in columns}
    conditions = [_make_condition(_find_column(by_key, key), text, names, labels) for key, text in filters]
    if search.strip():
        conditions.append(_make_search(search.strip(), columns, names, labels))
    key = sort or ("score" if "score" in by_key else "record_id")
    column = _find_column(by_key, key)
    is_text = key == "action" and (labels is not None or not table.schema["action"].is_numeric())
    order = _as_text(column, names, labels) if is_text else pl.col(key)
    if key not in names or (not is_text and table.schema[key].is_nested()):
        order = pl.col("record_id")  # the parts of a dict observation make one column, which has no order
    # Only what decides is read for all records; the page's own rows are read whole.
    decided = table.lazy().with_row_index("_row").filter(*conditions)
    keys = decided.select("_row", pl.col("record_id").alias("_id"), order.alias("_key")).collect()
    place = (page - 1) * size
    ordered = keys.lazy().sort("_key", "_id", descending=[descending, False], nulls_last=True).head(place + size)
    rows = table[ordered.collect()["_row"][place:].to_list()]
    shown = [column.key for column in columns]
    data = [dict(zip(shown, make_row(row, columns, labels), strict=True)) for row in rows.iter_rows(named=True)]
    return {"last_page": max(1, math.ceil(len(keys) / size)), "last_row": len(keys), "data": data}


def _find_column(columns: dict[str, Column], key: str) -> Column:
    if key not in columns:
        raise WhenceError(f"These records have no column {key!r}. They have {', '.join(columns)}.")
    return columns[key]


def _make_condition(column: Column, text: str, names: Sequence[str], labels: Labels) -> pl.Expr:
    wanted = text.strip()
    if column.kind == "keep":
        return _filter_kept(wanted)
    if column.kind in ("text", "reason"):
        return _contains(_as_text(column, names, labels), wanted)
    match = _COMPARISON.fullmatch(wanted)
    if match is None:
        raise WhenceError(f"{column.key} is a number, and {text!r} is none. Write it as 3, >3, >=3, <3 or <=3.")
    value, operator = float(match[2]), match[1] or "="
    number = pl.col(column.key).cast(pl.Float64)
    if operator == "=" and column.key not in _INTEGERS:
        # As shown: with the digits that the text has.
        return (number - value).abs() <= 0.5 * 10.0 ** min(-_count_decimals(match[2]), _LARGEST_POWER)
    comparisons = {">": number > value, ">=": number >= value, "<": number < value, "<=": number <= value}
    return comparisons.get(operator, number == value)


def _filter_kept(wanted: str) -> pl.Expr:
    lower = wanted.lower()
    if (lower and "kept".startswith(lower)) or lower in ("true", "1"):
        return pl.col("keep")
    if (lower and "dropped".startswith(lower)) or lower in ("false", "0"):
        return ~pl.col("keep")
    raise WhenceError(f"keep is {wanted!r}; kept or dropped is needed.")


def _make_search(text: str, columns: Sequence[Column], names: Sequence[str], labels: Labels) -> pl.Expr:
    conditions = [
        _contains(_as_text(column, names, labels), text)
        for column in columns
        if column.key in _INTEGERS or (column.kind in ("text", "reason") and column.key != "observation")
    ]
    return pl.any_horizontal(conditions)


def _contains(expression: pl.Expr, text: str) -> pl.Expr:
    # The text is escaped: it is no pattern of the searcher's.
    return expression.str.contains("(?i)" + re.escape(text)).fill_null(False)


def _as_text(column: Column, names: Sequence[str], labels: Labels) -> pl.Expr:
    if column.key == "observation":
        parts = [name for name in names if name.split(".")[0] == "observation"]
        return pl.concat_str([_text_of(name) for name in parts], separator="; ", ignore_nulls=True)
    if column.key == "action" and labels:
        names_by_index = {str(index): label for index, label in enumerate(labels)}
        return _text_of("action").replace(names_by_index)
    return _text_of(column.key)


def _text_of(name: str) -> pl.Expr:
    def join(series: pl.Series) -> pl.Series:
        if isinstance(series.dtype, pl.List | pl.Array) and not series.dtype.inner.is_nested():
            return series.cast(pl.List(pl.String)).list.join(", ", ignore_nulls=True)
        if series.dtype.is_nested():
            return pl.Series([None if value is None else str(value) for value in series.to_list()], dtype=pl.String)
        return series.cast(pl.String, strict=False)

    return pl.col(name).map_batches(join, return_dtype=pl.String)


def _count_decimals(number: str) -> int:
    mantissa, _, exponent = number.lower().partition("e")
    return len(mantissa.partition(".")[2]) - int(exponent or 0)
