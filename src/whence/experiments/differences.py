"""Whether the runs of one directory repeat those of another, value by value."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl

from whence.experiments.rl.curves import KeptRun
from whence.experiments.sweep import Results

TABLES = ("evaluations", "rounds")
"""What can be reproduced of a run; seconds cannot."""


@dataclass(frozen=True)
class Difference:
    """One thing in which a run differs from the run of the same name in another directory.

    Attributes:
        run: "NAME/ARM/seed_S".
        what: a column, as "evaluations/test_return"; a setting, as "config/drop"; or "run": the other has no such run.
        first_round: the first round whose values differ; None for a setting, a missing run or a missing column.
        largest: the largest difference of two numbers of the column; None if there is none.
    """

    run: str
    what: str
    first_round: int | None = None
    largest: float | None = None


def find_run_differences(first: Results, second: Results) -> list[Difference]:
    """Return everything in which the runs of the first directory differ from those of the second.

    Runs that only the second has are no difference, so that a part of a sweep can be compared with the whole.

    Args:
        first: from `load_sweep`.
        second: the same, of another directory.
    """
    differences: list[Difference] = []
    for group, labels in first.items():
        for label, runs in labels.items():
            for seed, run in runs.items():
                name = f"{group}/{label}/seed_{seed}"
                other = second.get(group, {}).get(label, {}).get(seed)
                differences += [Difference(name, "run")] if other is None else _compare_runs(name, run, other)
    return differences


def _compare_runs(name: str, run: KeptRun, other: KeptRun) -> Iterator[Difference]:
    settings, others = run.config.to_json(), other.config.to_json()
    different = [field for field in settings if settings[field] != others[field]]
    yield from (Difference(name, f"config/{field}") for field in different)
    if different:
        return  # nothing else is expected to be alike
    for table in TABLES:
        columns, other_columns = run.tables[table], other.tables[table]
        for column in dict.fromkeys([*columns.columns, *other_columns.columns]):
            if column not in columns.columns or column not in other_columns.columns:
                yield Difference(name, f"{table}/{column}")
            else:
                yield from _compare_columns(name, table, column, columns, other_columns)


def _compare_columns(
    name: str, table: str, column: str, columns: pl.DataFrame, other_columns: pl.DataFrame
) -> Iterator[Difference]:
    pairs: list[tuple[int, Any, Any]] = list(
        zip(columns["round"].to_list(), columns[column].to_list(), other_columns[column].to_list(), strict=True)
    )
    unequal = [(number, one, other) for number, one, other in pairs if one != other]
    if unequal:
        sizes = [abs(one - other) for _, one, other in unequal if one is not None and other is not None]
        yield Difference(name, f"{table}/{column}", unequal[0][0], max(sizes, default=None))
