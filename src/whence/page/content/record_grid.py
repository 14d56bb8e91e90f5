"""The page's grid of records, sorted, searched and filtered, and its table of their groups, in JSON types."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import polars as pl

from whence.causes import select_where
from whence.core import WhenceError
from whence.page.content.explored_run import ExploredRun
from whence.page.content.short_json import LONGEST, round_numbers
from whence.scores import group_scores, is_significant

LONGEST_TEXT = 2000
"""Characters of a prompt or a response in the grid; a record that is opened shows more."""

LARGEST_PAGE = 500
"""Rows of a page at most."""


class Column(NamedTuple):
    """A column of the grid: its name in the run directory, its heading, its meaning, and how it is shown."""

    key: str
    name: str
    about: str = ""
    kind: Literal["number", "score", "error", "keep", "reason", "text"] = "number"


_ERROR = Column(
    "error",
    "± error",
    "Error of the score, over folds of the target's episodes: two of them are a 95% interval",
    "error",
)

_ROUND = Column("round", "round", "Where all rounds are searched")

STEPS = (
    Column("record_id", "record", "The step of training at which the record was collected"),
    Column("score", "score", "Influence on the target: above 0, training on the record raises it", "score"),
    _ERROR,
    Column("keep", "kept", "Whether the record trained", "keep"),
    Column("flag", "flag", "Your flag and note, from an opened record", "text"),
    Column("env_index", "env", "Index of the environment"),
    Column("episode_id", "episode", "Id of the episode"),
    Column("step", "step", "Position in the episode, from 0"),
    Column("action", "action", kind="text"),
    Column("reward", "reward", "As the environment paid it"),
    Column("trained_reward", "trained reward", "The reward that training saw: normalised, with any bootstrap"),
    Column("bootstrap", "bootstrap", "What was added to the reward where a time limit cut the episode"),
    Column("end", "end", "How the episode ended here", "text"),
    Column("advantage", "advantage", "In the unit of the trained reward, as collected"),
    Column("return", "return", "Target of the value function"),
    Column("value", "value", "Estimate of the value function, in the unit of the trained reward"),
    Column("log_prob", "log-prob", "Log-probability of the action"),
    Column("raw_observation", "observation", "As the environment returned it", "text"),
    Column("observation", "observation", "As the policy saw it", "text"),
    Column("reason", "reason", "Why the record was dropped", "reason"),
)
"""Columns where records are steps in an environment."""

RESPONSES = (
    Column("record_id", "response", "The response's number, counted from the start of training"),
    Column("score", "score", "Above 0, training on the response raises the target", "score"),
    _ERROR,
    Column("reward", "reward", "Before any penalty"),
    Column("advantage", "advantage", "As trained; of PPO the last token's, whitened over the rollout"),
    Column("tokens", "tokens", "Length of the response"),
    Column("ended", "ended", "1: the response ended by itself; 0: it was cut at the limit of tokens"),
    Column("response", "text", kind="text"),
    Column("prompt", "prompt", kind="text"),
    Column("score_per_token", "score / token", "The score divided by the response's length", "score"),
    Column("entropy", "entropy", "Of the model, in nats, mean over the response's tokens"),
    Column("divergence", "divergence", "From the start model or the reference, in nats, over the whole response"),
    Column("clip_share", "clipped", "The share of the tokens whose ratio of probabilities was clipped"),
    Column("log_prob", "log-prob", "Log-probability of the whole response"),
    Column("weight", "weight", "How much the response trained"),
    Column("keep", "kept", "Whether the response trained", "keep"),
    Column("flag", "flag", "Your flag and note, from an opened response", "text"),
    Column("reason", "reason", "Why the response was dropped", "reason"),
)
"""Columns where records are responses of a language model."""


def list_columns(names: Collection[str], *, is_language: bool) -> list[Column]:
    """Return the grid's columns that a table of records has.

    `observation.a` and `observation.b` make one column; what the environment put into `infos` makes one for each key.
    """
    parts = {name.split(".")[0] for name in names} | {"flag"}
    source = "your data set, or logged by a reward" if is_language else "your environment's infos"
    rewards = [Column(name, name[7:], "Of this reward function") for name in names if name.startswith("reward.")]
    infos = [Column(name, name[5:], f"From {source}") for name in names if name.startswith("info.")]
    columns = [column for column in (RESPONSES if is_language else STEPS) if column.key in parts]
    place = 1 + next((at for at, column in enumerate(columns) if column.key == "reward"), len(columns) - 2)
    rounds = [_ROUND] if "round" in parts else []
    return [*rounds, *columns[:place], *rewards, *columns[place:-1], *infos, *columns[-1:]]


def make_cells(
    table: pl.DataFrame, columns: Iterable[Column], labels: Sequence[str] | None = None
) -> dict[str, pl.Expr]:
    """Return how each column's cells are made from a table: numbers of six digits, text cut to its length."""
    return {column.key: _make_cell(column, table.schema, labels).alias(column.key) for column in columns}


def _make_cell(column: Column, schema: pl.Schema, labels: Sequence[str] | None) -> pl.Expr:
    key = column.key
    if key in ("observation", "raw_observation"):
        names = [name for name in schema if name.split(".")[0] == key]
        parts = [_as_text(name, schema) for name in names]
        if "." in names[0]:
            keys = [pl.lit(f"{name.partition('.')[2]}: ") for name in names]
            parts = [pl.concat_str(key, text) for key, text in zip(keys, parts, strict=True)]
        return _cut(pl.concat_str(parts, separator="; ", ignore_nulls=True), LONGEST)
    if key == "action" and labels:
        return _as_text(key, schema).replace({str(index): label for index, label in enumerate(labels)})
    if column.kind in ("text", "reason"):
        return _cut(_as_text(key, schema), LONGEST_TEXT if key in ("prompt", "response") else LONGEST)
    number = pl.col(key).cast(pl.Int8) if schema[key] == pl.Boolean and column.kind == "number" else pl.col(key)
    return _round(number) if schema[key].is_float() else number


def _as_text(name: str, schema: pl.Schema) -> pl.Expr:
    kind, value = schema[name], pl.col(name)
    if isinstance(kind, pl.List | pl.Array) and not kind.inner.is_nested():
        entries = value.cast(pl.List(kind.inner)).list.head(LONGEST)
        shown = pl.element().round_sig_figs(3) if kind.inner.is_float() else pl.element()
        return entries.list.eval(shown.cast(pl.String)).list.join(", ", ignore_nulls=True)
    if kind.is_nested():
        return value.map_elements(lambda part: str(part.to_list()), pl.String)
    return (value.round_sig_figs(3) if kind.is_float() else value).cast(pl.String)


def _round(number: pl.Expr) -> pl.Expr:
    """Round numbers to six digits; JSON has none that are not finite."""
    return pl.when(number.is_finite()).then(number.cast(pl.Float64).round_sig_figs(6))


def _cut(text: pl.Expr, longest: int) -> pl.Expr:
    shorter = pl.concat_str(text.str.slice(0, longest - 1), pl.lit("…"))
    return pl.when(text.str.len_chars() > longest).then(shorter).otherwise(text)


class Search(NamedTuple):
    """Which records are looked for, and in which order.

    Attributes:
        sort: a column's key; None: the round if there are several, else the score or the record id. Records without a
            value come last.
        descending: whether the largest come first.
        search: text that one of the ids, actions, reasons, prompts or responses has to contain, in any case.
        filters: a column's key and a text for each. A text column has to contain it; a number takes >, >=, <, <= or =
            and a number; `keep` takes "kept" or "dropped".
        where: a condition in SQL, as `whence.causes.select_where` takes it.
        groups: a column that records are grouped by, and the name of a group, for each; they are a round's.
        only: "differs": records whose score differs from 0; "flagged", "unflagged": those that were flagged, or not.
        ids: only these records; none: all.
    """

    sort: str | None = None
    descending: bool = False
    search: str = ""
    filters: Sequence[tuple[str, str]] = ()
    where: str = ""
    groups: Sequence[tuple[str, str]] = ()
    only: Collection[str] = ()
    ids: Collection[int] = ()


def query_records(
    run: ExploredRun,
    number: int | None,
    search: Search | None = None,
    *,
    page: int = 1,
    size: int = 50,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return one page, counted from 1, of the records of a round, or of all, that are looked for, in JSON types.

    Returns:
        `last_page`, `last_row` and `data`, a list of records by the columns' keys, of all rounds also by `round`;
        `records`, the number of those that were searched, and `left_out`, the rounds that were not.
    """
    if page < 1 or not 1 <= size <= LARGEST_PAGE:
        raise WhenceError(f"page is {page} and size {size}; a page from 1 and a size from 1 to {LARGEST_PAGE} needed.")
    matching, records, left_out = find_records(run, number, search or Search(), check)
    rows = dict[int, dict[str, Any]]()
    for (each,), places in matching.with_row_index("place").slice((page - 1) * size, size).group_by("round"):
        table = _read_records(run, each, are_all=number is None)
        cells = make_cells(table, list_columns(table.columns, is_language=run.is_language), run.labels)
        rows |= zip(places["place"], table[places["row"]].select(**cells).to_dicts(), strict=True)
    return {
        "last_page": max(1, math.ceil(len(matching) / size)),
        "last_row": len(matching),
        "data": [rows[place] for place in sorted(rows)],
        "records": records,
        "left_out": left_out,
    }


def find_records(
    run: ExploredRun, number: int | None, search: Search, check: Callable[[], None] = lambda: None
) -> tuple[pl.DataFrame, int, list[int]]:
    """Return `round`, `row` and `record_id` of what is looked for, how many were searched, and the rounds left out.

    Of all rounds, nothing is scored, and those that lack a column of the search are left out, unless all do.
    """
    parts, records, left_out = list[pl.DataFrame](), 0, list[int]()
    rounds = run.directory.rounds() if number is None else [number]
    for each in rounds:
        check()
        table = _read_records(run, each, are_all=number is None)
        records += len(table)
        try:
            parts.append(_match(run, each, table, search))
        except WhenceError:
            left_out.append(each)
            if len(left_out) == len(rounds):
                raise
    none = pl.DataFrame(schema={"row": pl.UInt32, "record_id": pl.Int64, "round": pl.Int64, "key": pl.Null})
    matching = pl.concat([none, *parts], how="vertical_relaxed")
    order = ["key", "round", "record_id"]
    return matching.sort(order, descending=[search.descending, False, False], nulls_last=True), records, left_out


def _read_records(run: ExploredRun, number: int, *, are_all: bool) -> pl.DataFrame:
    if not are_all:
        return run.flagged(number)
    return run.flagged(number, scored=False).with_columns(round=pl.lit(number, pl.Int64))


def _match(run: ExploredRun, number: int, table: pl.DataFrame, search: Search) -> pl.DataFrame:
    """Return `round`, `row`, `record_id` and the `key` to sort by of the records of a round that are looked for."""
    columns = {column.key: column for column in list_columns(table.columns, is_language=run.is_language)}
    cells, labels = make_cells(table, columns.values(), run.labels), run.labels
    key = search.sort or next(name for name in ("round", "score", "record_id") if name in cells)
    for name in (key, *(name for name, _ in search.filters)):
        if name not in columns:
            raise WhenceError(f"These records have no column {name!r}. They have {', '.join(columns)}.")
    conditions = [_make_condition(columns[name], cells[name], text.strip()) for name, text in search.filters]
    conditions += [pl.lit(run.group(number, by) == name) for by, name in search.groups]
    if search.where.strip():
        conditions.append(pl.lit(select_where(table, search.where, run.state_names, "where")))
    differs = pl.col("differs") if "differs" in table.columns else pl.lit(True)
    marks = {"differs": differs, "flagged": pl.col("flag").is_not_null(), "unflagged": pl.col("flag").is_null()}
    conditions += [mark for name, mark in marks.items() if name in search.only]
    if search.ids:
        conditions.append(pl.col("record_id").is_in(list(search.ids)))
    if text := search.search.strip():
        searched = [cells[name] for name, column in columns.items() if _is_searched(column)]
        conditions.append(pl.any_horizontal(_contains(cell, text) for cell in searched))
    is_text = key not in table.columns or table.schema[key].is_nested() or (key == "action" and labels is not None)
    shown = {"round": pl.lit(number, pl.Int64), "key": cells[key] if is_text else pl.col(key)}
    return table.with_row_index("row").filter(*conditions).select("row", "record_id", **shown)


def _is_searched(column: Column) -> bool:
    """Return whether the search reads a column: ids and texts; observations are numbers."""
    is_id = column.key in ("record_id", "env_index", "episode_id", "step", "tokens")
    return is_id or (column.kind in ("text", "reason") and column.key not in ("observation", "raw_observation"))


def _make_condition(column: Column, cell: pl.Expr, wanted: str) -> pl.Expr:
    if column.kind == "keep":
        chosen = [name for name in ("kept", "dropped") if wanted and name.startswith(wanted.lower())]
        if not chosen:
            raise WhenceError(f"keep is {wanted!r}; kept or dropped is needed.")
        return cell == (chosen == ["kept"])
    if column.kind in ("text", "reason"):
        return _contains(cell, wanted)
    match = re.fullmatch(r"(>=|<=|>|<|=)?\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", wanted, re.IGNORECASE)
    if match is None:
        raise WhenceError(f"{column.key} is a number, and {wanted!r} is none. Write it as 3, >3, >=3, <3 or <=3.")
    value = float(match[2])
    if match[1] is None and "." in match[2]:
        return cell.cast(pl.String).str.starts_with(match[2])  # as many digits as the reader wrote
    comparisons = {">": cell > value, ">=": cell >= value, "<": cell < value, "<=": cell <= value}
    return comparisons.get(match[1], cell == value)


def _contains(cell: pl.Expr, text: str) -> pl.Expr:
    # The text is escaped: it is no pattern of the searcher's.
    return cell.cast(pl.String).str.contains("(?i)" + re.escape(text)).fill_null(False)


EMBEDDED = 6
"""Columns by which a file holds groups at most."""

NAMES = {
    "region": "region of states",
    "step": "step of the episode",
    "env_index": "environment",
    "keep": "trained or dropped",
    "end": "end of the episode",
}
"""What columns are called where the page groups by them, unless by their own names."""


def list_pivots(run: ExploredRun, number: int) -> list[dict[str, str]]:
    """Return the columns by which a round's records can be grouped: `key` and `name` of each."""
    return [{"key": by, "name": NAMES.get(by, by.removeprefix("info."))} for by in run.groupings(number)]


def build_pivot(run: ExploredRun, number: int, by: Sequence[str]) -> dict[str, Any]:
    """Return what groups of a round's records by one or two columns score, in JSON types.

    Returns:
        `rows` and `columns`, names of groups in their order, the columns None for one column; and `cells`: places of
        row and column, number of records, mean score, its error, and whether the mean differs from 0.
    """
    records, keys = run.round(number), run.groupings(number)
    if not 1 <= len(set(by)) == len(by) <= 2 or not {*by} <= {*keys}:
        raise WhenceError(f"Records are grouped by {', '.join(by)[:80]}; one or two of {', '.join(keys)} are needed.")
    table = group_scores(records.table, by, labels=run.labels, names=run.name_axes(number))
    rows = table["group"].unique().sort().to_list()
    columns = table["across"].unique().sort().to_list() if len(by) > 1 else None
    cells = [
        [
            rows.index(row["group"]),
            columns.index(row["across"]) if columns else 0,
            row["records"],
            round_numbers(row["mean"], 4),
            round_numbers(row["error"], 3),
            is_significant(row["mean"], row["error"]),
        ]
        for row in table.iter_rows(named=True)
    ]
    return {"rows": rows, "columns": columns, "cells": cells}


def choose_pairs(keys: Sequence[str], findings: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the pairs of columns by which a file has groups: the one that the page opens with, and those of findings.

    The page's script opens with regions by actions, or, where there are none, with the first columns.
    """
    usual = [key for key in ("region", "action", *keys) if key in keys]
    pairs = [list(dict.fromkeys(usual))[:2], *([key for key, _ in each.get("groups", ())] for each in findings)]
    return [pair for pair in pairs if len(pair) == 2 and {*pair} <= {*keys}]
