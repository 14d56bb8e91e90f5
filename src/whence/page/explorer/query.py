"""The grid's questions to a round: pages of records, sorted, searched and filtered, without reading all of them."""

import math
import re
from collections.abc import Sequence
from typing import Any

import polars as pl

from whence.errors import WhenceError
from whence.page.explorer import opening
from whence.page.explorer.columns import Column, Labels, is_language_run, list_columns, make_row
from whence.page.explorer.explored_run import ExploredRun

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
    frame, names = _open_frame(run, number)
    columns = list_columns(run.directory.config, names)
    by_key = {column.key: column for column in columns}
    labels = run.labels()
    conditions = [_make_condition(_find_column(by_key, key), text, names, labels) for key, text in filters]
    if search.strip():
        conditions.append(_make_search(search.strip(), columns, names, labels))
    key = sort or ("score" if "score" in by_key else "record_id")
    column = _find_column(by_key, key)
    is_text = key == "action" and (labels is not None or not frame.collect_schema()["action"].is_numeric())
    order = _as_text(column, names, labels) if is_text else pl.col(key)
    if key not in names:
        order = pl.col("record_id")  # the parts of a dict observation make one column, which has no order
    # Only what decides is read for all records; the page's own rows are read whole.
    decided = frame.with_row_index("_row").filter(*conditions) if conditions else frame.with_row_index("_row")
    keys = decided.select("_row", pl.col("record_id").alias("_id"), order.alias("_key"))
    if keys.collect_schema()["_key"].is_nested():
        keys = keys.with_columns(pl.col("_id").alias("_key"))
    with opening.explain_parquet(opening.locate_records(run.directory, number)):
        total = int(decided.select(pl.len()).collect().item())
        place = (page - 1) * size
        if place + size <= 10_000:  # the top of so few is cheaper than sorting all
            by = [pl.col("_key"), pl.col("_id")]
            chosen = keys.sort(by, descending=[descending, False], nulls_last=True).head(place + size).collect()
        else:
            chosen = keys.sort("_key", "_id", descending=[descending, False], nulls_last=True).collect()
        positions = chosen["_row"][place : place + size].to_list()
        rows = frame.with_row_index("_row").filter(pl.col("_row").is_in(positions)).collect()
    by_position = {row["_row"]: row for row in rows.iter_rows(named=True)}
    keys_shown = [column.key for column in columns]
    data = [dict(zip(keys_shown, make_row(by_position[at], columns, labels), strict=True)) for at in positions]
    return {"last_page": max(1, math.ceil(total / size)), "last_row": total, "data": data}


def _open_frame(run: ExploredRun, number: int) -> tuple[pl.LazyFrame, list[str]]:
    """Return a round's records unread; those that were scored on demand, from memory."""
    frame = opening.scan_records(run.directory, number)
    with opening.explain_parquet(opening.locate_records(run.directory, number)):
        names = frame.collect_schema().names()
    if "score" not in names and not is_language_run(run.directory.config):
        table = run.round(number).table
        return table.lazy(), table.columns
    return frame, names


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
    number = pl.col(column.key)
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
