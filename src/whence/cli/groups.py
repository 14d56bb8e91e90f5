"""A group of a round's records, named by a condition, and what leaving it out did: `whence intervene --where`."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
from rich.table import Table

from whence.cli.console import make_table
from whence.counterfactual.interventions import VARIANTS, summarise_changes
from whence.errors import WhenceError, first_line
from whence.moments import read_axes

EXAMPLE = '"action = 2 and advantage < 0"'

_NAMES = {"probability": "probability", "evaluated": "test return"}


def find_group(records: pl.DataFrame, where: str, names: Sequence[str] | None) -> pl.DataFrame:
    """Return the records for which a condition holds.

    Args:
        records: a round's table, with scores.
        where: the condition, in SQL, over the table's columns and the axes of its observations.
        names: names of these axes; None: x0, x1, ….

    Raises:
        WhenceError: the condition cannot be read, names a column that is not there, is no condition, or holds for no
            record.
    """
    axes = read_axes(records, names)
    plain = records.drop(name for name in records.columns if name.split(".")[0] == "observation")
    table = plain.with_columns(pl.Series(name, values) for name, values in axes.items())
    try:
        condition = table.with_columns(__condition__=pl.sql_expr(where))["__condition__"]
    except pl.exceptions.PolarsError as refusal:
        raise WhenceError(
            f"--where is {where!r}: {first_line(refusal)}. Write a condition in SQL, such as {EXAMPLE}, over "
            f"{', '.join(table.columns)}; names with spaces in double quotes."
        ) from None
    if condition.dtype != pl.Boolean:
        raise WhenceError(
            f"--where is {where!r}, which is no condition but {condition.dtype}. Write one such as {EXAMPLE}."
        )
    group = table.filter(condition.fill_null(False))
    if group.is_empty():
        raise WhenceError(f"--where is {where!r}, which holds for none of the round's {len(table)} records.")
    return group


def describe_group(group: pl.DataFrame) -> dict[str, Any]:
    """Return a group's size and what it scores, in JSON types."""
    scores = group["score"].cast(pl.Float64).to_numpy()
    return {
        "records": len(group),
        "mean_score": float(scores.mean()),
        "share_negative": float((scores < 0).mean()),
    }


def summarise_group(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what leaving a group out did in a round: for each outcome, means of the variants and their differences."""
    table = pl.DataFrame(content["rows"])
    changes = summarise_changes(table).to_dicts()
    rows = []
    for outcome in table["outcome"].unique(maintain_order=True):
        of_outcome = table.filter(pl.col("outcome") == outcome)
        means = {variant: of_outcome.filter(pl.col("variant") == variant)["value"].mean() for variant in VARIANTS}
        differences = {
            row["difference"]: {end: row[end] for end in ("mean", "low", "high")}
            for row in changes
            if row["outcome"] == outcome
        }
        rows.append({"outcome": outcome, **means, **differences})
    return rows


def make_group_outcomes(content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a round's table: the means of each outcome, and what the group changed compared with a random one."""
    about = content["group"]
    title = (
        f"Round {content['round']} without {about['records']} records: {content['where']}\n"
        f"They score {about['mean_score']:.3g} on average, {about['share_negative']:.0%} of them below 0"
    )
    headings = ["", *VARIANTS, "filtered − full", "filtered − random"]
    cells = [
        [
            _NAMES[row["outcome"]],
            *(f"{row[variant]:.3g}" for variant in VARIANTS),
            *(_format_interval(row[difference]) for difference in ("filtered - full", "filtered - random")),
        ]
        for row in rows
    ]
    return make_table(title, headings, cells)


def _format_interval(interval: Mapping[str, float | None]) -> str:
    ends = "" if interval["low"] is None else f" [{interval['low']:+.2g}, {interval['high']:+.2g}]"
    return f"{interval['mean']:+.3g}{ends}"
