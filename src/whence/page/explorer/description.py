"""What a page says of its runs before a round is opened."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import polars as pl

from whence.page.explored_run import ExploredRun
from whence.page.explorer.grid import RESPONSES, STEPS, list_columns, round_number

SERIES = ("episode_return", "test_return", "reward", "dropped_share", "negative_share", "significant_share")
"""Curves over rounds that a page shows below the slider, where they exist."""

Mode = Literal["file", "served"]


def describe_runs(
    runs: Sequence[ExploredRun], *, mode: Mode, rounds: Sequence[Sequence[int]] | None = None
) -> dict[str, Any]:
    """Return the page's object in JSON types.

    Args:
        runs: the runs, in the order of their numbers on the page.
        mode: "file": the rounds are embedded; "served": a server is asked for them.
        rounds: the rounds of each run that are embedded; None: all.
    """
    kind = "responses" if runs and runs[0].is_language else "steps"
    numbers = [run.directory.rounds() for run in runs] if rounds is None else rounds
    return {
        "mode": mode,
        "kind": kind,
        "runs": [describe_run(run, chosen) for run, chosen in zip(runs, numbers, strict=True)],
    }


def describe_run(run: ExploredRun, rounds: Sequence[int]) -> dict[str, Any]:
    """Return one run's part of the page's object.

    Args:
        run: the run.
        rounds: those that the page can open.
    """
    return {
        "label": run.label,
        "planned": run.planned,
        "finished": run.is_finished(),
        "rounds": [*rounds],
        "series": _read_series(run, rounds),
        "columns": [column._asdict() for column in _list_run_columns(run, rounds)],
        "actions": run.labels,
    }


def _read_series(run: ExploredRun, rounds: Sequence[int]) -> dict[str, list[Any]]:
    by_round: dict[str, Mapping[int, Any]] = {}
    for table in (run.directory.table("metrics"), run.directory.table("evaluations")):
        for name in SERIES:
            if name in table.columns and table.schema[name].is_numeric() and table[name].count():
                by_round[name] = dict(zip(table["round"].to_list(), table[name].to_list(), strict=True))
    return {name: [round_number(values.get(number)) for number in rounds] for name, values in by_round.items()}


def _list_run_columns(run: ExploredRun, rounds: Sequence[int]) -> list[Any]:
    """Return the grid's columns, by the last round that can be read."""
    for number in reversed(rounds):
        try:
            names = pl.read_parquet_schema(run.directory.round_path("records", number))
        except (OSError, pl.exceptions.PanicException, pl.exceptions.PolarsError):
            continue
        # An agent's scores are computed when a round is opened.
        computed = ("score", "error") if "score" not in names and not run.is_language else ()
        return list_columns([*names, *computed], is_language=run.is_language)
    return list(RESPONSES if run.is_language else STEPS)
