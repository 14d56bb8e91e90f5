"""The page's grid: its columns, its cells in JSON types, and pages of records, sorted, searched and filtered."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import polars as pl

from whence import moments
from whence.errors import WhenceError
from whence.page.explored_run import ExploredRun

LONGEST = 240
"""Characters of an observation, an action or a reason that a page holds at most."""

LONGEST_TEXT = 2000
"""Characters of a prompt or a response in the grid; a record that is opened shows more."""

Labels = Sequence[str] | None
"""The names of discrete actions; None: unknown."""


class Column(NamedTuple):
    """A column of the grid.

    Attributes:
        key: its name in the run directory.
        name: its heading.
        about: its meaning.
        kind: "score", "error", "keep", "reason", "text" or "number".
    """

    key: str
    name: str
    about: str = ""
    kind: str = "number"


_SCORE = Column("score", "score", "Influence on the target: above 0, training on the record raises it", "score")
_ERROR = Column("error", "± error", "Standard error of the score, over folds of the target's episodes", "error")
_KEPT = Column("keep", "kept", "Whether the record trained", "keep")
_REASON = Column("reason", "reason", "Why the record was dropped", "reason")

STEPS = (
    Column("record_id", "record", "The step of training at which the record was collected"),
    *(_SCORE, _ERROR, _KEPT),
    Column("env_index", "env", "Index of the environment"),
    Column("episode_id", "episode", "Id of the episode"),
    Column("step", "step", "Position in the episode, from 0"),
    Column("action", "action", kind="text"),
    Column("reward", "reward"),
    Column("advantage", "advantage", "As collected, not normalised"),
    Column("return", "return", "Target of the value function"),
    Column("value", "value", "Estimate of the value function"),
    Column("log_prob", "log-prob", "Log-probability of the action"),
    Column("observation", "observation", kind="text"),
    _REASON,
)
"""Columns where records are steps in an environment."""

RESPONSES = (
    Column("record_id", "record", "The response's number, counted from the start of training"),
    *(_SCORE, _ERROR, _KEPT),
    Column("prompt", "prompt", kind="text"),
    Column("response", "response", kind="text"),
    Column("reward", "reward", "Before any penalty"),
    Column("advantage", "advantage", "Of the last token, whitened over the rollout"),
    Column("weight", "weight", "How much the response trained"),
    Column("divergence", "divergence", "From the start model, in nats, as the penalty estimates it"),
    Column("tokens", "tokens", "Length of the response"),
    Column("log_prob", "log-prob", "Log-probability of the whole response"),
    _REASON,
)
"""Columns where records are responses of a language model."""


def list_columns(names: Collection[str], *, is_language: bool) -> list[Column]:
    """Return the grid's columns that a table of records has.

    Args:
        names: the table's columns; `observation.a` and `observation.b` make one column.
        is_language: whether records are responses of a language model.
    """
    parts = {name.split(".")[0] for name in names}
    return [column for column in (RESPONSES if is_language else STEPS) if column.key in parts]


def make_row(record: Mapping[str, Any], columns: Iterable[Column], labels: Labels = None) -> list[Any]:
    """Return a record's cells, in JSON types."""
    parts = {name: value for name, value in record.items() if name.split(".")[0] == "observation"}
    values = {**record, "observation": _join_observation(parts), "action": name_action(record.get("action"), labels)}
    return [_make_cell(column.key, values.get(column.key)) for column in columns]


def name_action(action: Any, labels: Labels) -> str | None:
    """Return an action as text: its label if it has one."""
    return None if action is None else short_text(moments.name_action(action, labels))


def short_text(value: Any, longest: int = LONGEST) -> str:
    """Return numbers, lists of numbers or text as one line, cut off after `longest` characters.

    Only as many entries are formatted as the line may hold: an observation may have thousands.
    """
    line = ", ".join(map(_format_entry, value[:longest] if isinstance(value, list) else [value]))
    return line if len(line) <= longest else line[: longest - 1] + "…"


def round_number(value: Any, digits: int = 6) -> Any:
    """Return a number with so many significant digits; null if there is none or it is not finite."""
    if value is None or isinstance(value, int):
        return value
    number = float(value)
    return float(f"{number:.{digits}g}") if math.isfinite(number) else None


def round_numbers(values: Iterable[Any], digits: int = 6) -> list[Any]:
    """Return numbers as `round_number` does; whole ones as integers, which are shorter."""
    rounded = (round_number(value, digits) for value in values)
    return [int(v) if isinstance(v, float) and v.is_integer() and abs(v) < 1e15 else v for v in rounded]


def _join_observation(parts: Mapping[str, Any]) -> Any:
    if parts.keys() <= {"observation"}:
        return parts.get("observation")
    named = (f"{name.removeprefix('observation.')}: {short_text(value)}" for name, value in parts.items())
    return short_text("; ".join(named))


def _make_cell(name: str, value: Any) -> Any:
    if isinstance(value, float):
        return round_number(value)
    if name in ("prompt", "response") and value is not None:
        return short_text(value, LONGEST_TEXT)
    return short_text(value) if isinstance(value, str | bytes | Iterable) else value


def _format_entry(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


LARGEST_PAGE = 500
"""Rows of a page at most."""

_COMPARISON = re.compile(r"\s*(>=|<=|>|<|=)?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*", re.IGNORECASE)

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


def _find_column(columns: Mapping[str, Column], key: str) -> Column:
    if key not in columns:
        raise WhenceError(f"These records have no column {key!r}. They have {', '.join(columns)}.")
    return columns[key]


def _make_condition(column: Column, text: str, names: Sequence[str], labels: Labels) -> pl.Expr:
    wanted = text.strip()
    if column.kind == "keep":
        kept = [name for name in ("kept", "dropped") if wanted and name.startswith(wanted.lower())]
        if not kept:
            raise WhenceError(f"keep is {wanted!r}; kept or dropped is needed.")
        return pl.col("keep") if kept == ["kept"] else ~pl.col("keep")
    if column.kind in ("text", "reason"):
        return _contains(_as_text(column, names, labels), wanted)
    match = _COMPARISON.fullmatch(wanted)
    if match is None:
        raise WhenceError(f"{column.key} is a number, and {text!r} is none. Write it as 3, >3, >=3, <3 or <=3.")
    value, operator = float(match[2]), match[1] or "="
    number = pl.col(column.key).cast(pl.Float64)
    if operator == "=" and column.key not in _INTEGERS:
        # As shown: with the digits that the text has.
        digits = int(Decimal(match[2]).as_tuple().exponent)
        return (number - value).abs() <= 0.5 * 10.0 ** min(digits, 300)
    comparisons = {">": number > value, ">=": number >= value, "<": number < value, "<=": number <= value}
    return comparisons.get(operator, number == value)


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
