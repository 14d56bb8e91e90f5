"""What the columns of a run's tables hold, checked where a table enters."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import polars as pl

from whence.errors import InvalidRecords, WhenceError

_Check = tuple[str, Callable[[Any], bool]]

_WHOLE_KINDS = (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32)


def _is_whole(kind: Any) -> bool:
    return kind in _WHOLE_KINDS


def is_number(kind: Any) -> bool:
    """Return whether a column's type is a number that NumPy has, or a truth value."""
    return bool(kind == pl.Boolean or _is_whole(kind) or kind in (pl.UInt64, pl.Float32, pl.Float64))


def _is_array(kind: Any) -> bool:
    while isinstance(kind, pl.Array):
        if not kind.size:
            return False
        kind = kind.inner
    return is_number(kind)


def _is_list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda kind: isinstance(kind, pl.List) and (kind.inner == pl.Null or check(kind.inner))


_WHOLE: _Check = ("whole numbers of 64 bits at most", _is_whole)
_NUMBERS: _Check = ("numbers", is_number)
_ARRAYS: _Check = ("numbers, or arrays of them of one size", _is_array)
_TEXTS: _Check = ("text", lambda kind: kind == pl.String)

_CHECKS: Mapping[str, _Check] = {
    **dict.fromkeys(("record_id", "env_index", "episode_id", "step", "tokens"), _WHOLE),
    **dict.fromkeys(("score", "error", "weight", "value", "advantage", "return", "reward", "log_prob"), _NUMBERS),
    **dict.fromkeys(("prompt", "response", "reason", "generator_state"), _TEXTS),
    **dict.fromkeys(("prompt_ids", "response_ids"), ("lists of whole numbers", _is_list_of(_is_whole))),
    "token_parts": ("lists of numbers", _is_list_of(is_number)),
    "token_texts": ("lists of text", _is_list_of(lambda kind: kind == pl.String)),
    **dict.fromkeys(("keep", "episode_start"), ("true or false", lambda kind: kind == pl.Boolean)),
    **dict.fromkeys(("divergence", "observation_digest"), _NUMBERS),
    **dict.fromkeys(("action", "action_mask"), _ARRAYS),
}


def check_columns(
    table: pl.DataFrame, source: str, *, needed: Collection[str] = (), error: type[WhenceError] = InvalidRecords
) -> None:
    """Refuse a table of a run with a column of another type than whence writes, or without a column that is needed.

    Columns of other names may hold anything. One of nulls alone has no type, and is taken as one that is not known.

    Args:
        table: a round's records, episodes or answers.
        source: where the table is from, for the message: a path, or "the table of records".
        needed: names of columns that have to be there, without nulls.
        error: the class of the error.

    Raises:
        WhenceError: names the column, its type and the needed one; of the class `error`.
    """
    for name in needed:
        if name not in table.columns:
            raise error(
                f"{source} has no column `{name}`; it has {', '.join(table.columns[:20]) or 'none'}. whence writes it, "
                "so something else changed the table: restore it, or run again."
            )
    for name, kind in table.schema.items():
        is_observation = name.split(".")[0] == "observation"
        check = _CHECKS.get(name, _ARRAYS if is_observation else None)
        if check is None or check[1](kind) or (kind == pl.Null and name not in (*needed, "keep", "action")):
            continue
        raise error(
            f"{source} holds {kind} in the column `{name}`, which needs {check[0]}. whence writes them so, and "
            "something else changed the table: restore it, or run again."
        )
    for name in needed:
        if table[name].null_count():
            raise error(
                f"{source} has no value in {table[name].null_count()} of {len(table)} rows of `{name}`, of which each "
                "row needs one. Restore the table, or run again."
            )
