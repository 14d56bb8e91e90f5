"""What one has without findings, as lines: pivots of the records, explained variance, SB3's log.

A line is a kind, as findings have it, and a text. Each rival has one fixed rule, by which its lines are sorted. A pivot
does not say of what kind it is, so its kind is "any", which counts as the right one.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import polars as pl

from whence.runs import RunDirectory
from whence.scores.moments import read_axes
from whence.scores.pivots import name_groups

Names = Mapping[str, Sequence[str]]
Line = tuple[str, str]

CLEAR = 4.0
"""The errors that a pivot's difference must be from 0 to be a line: many differences are looked at."""


def pivot(value: str, run: RunDirectory, names: Names) -> list[Line]:
    """Return the cells of pivots of a column's mean by action and another column that differ most, for their error.

    The other column is the environment, the step, or a number of the observation, in thirds.
    """
    records = pl.concat([run.round("records", number) for number in run.rounds()], how="diagonal_relaxed")
    columns = {
        "env_index": records["env_index"],
        "step": records["step"],
        "first step": records["step"] == 0,
        **read_axes(records, names.get("observations")),
    }
    mean, deviation = float(records[value].mean()), float(records[value].std())  # type: ignore[arg-type]
    actions = name_groups(records, "action", names.get("actions"))
    lines = []
    for name, column in columns.items():
        groups = name_groups(pl.DataFrame({name: column}), name)
        cells = pl.DataFrame({"action": actions, "group": groups, "value": records[value]}).group_by("action", "group")
        for action, group, cell_mean, count in cells.agg(pl.mean("value"), pl.len()).iter_rows():
            errors = (cell_mean - mean) / max(deviation / count**0.5, 1e-9)
            lines.append((abs(errors), f"{value} of {action}, {group}: {cell_mean:.3g} (all records {mean:.3g})"))
    return [("any", text) for errors, text in sorted(lines, reverse=True) if errors > CLEAR]


def read_explained_variance(metrics: pl.DataFrame) -> list[Line]:
    """Return a line if the critic explains nothing in the second half of the training."""
    explained = _read_second_half(metrics, "explained_variance").mean()
    return [("critic", f"explained variance {explained:.2f}")] if explained is not None and explained < 0 else []  # type: ignore[operator]


def read_log(metrics: pl.DataFrame) -> list[Line]:
    """Return what a fixed reading of SB3's log says, by medians of the second half of the training."""
    divergence, clipped, entropy = (
        float(_read_second_half(metrics, name).median())  # type: ignore[arg-type]
        for name in ("approx_kl", "clip_fraction", "entropy_loss")
    )
    first = float(metrics["train/entropy_loss"].drop_nulls()[0])
    lines = [
        (divergence > 0.03, f"KL {divergence:.3g}: learning rate too high, lower it"),
        (divergence < 0.0005, f"KL {divergence:.3g}: learning rate too low, raise it"),
        (clipped > 0.3, f"clip fraction {clipped:.2f}: learning rate too high, lower it"),
        (first < 0 and entropy > 0.05 * first, f"entropy {-entropy:.3g} of {-first:.3g}: collapsed, raise ent_coef"),
    ]
    return [("setting", text) for holds, text in lines if holds] + read_explained_variance(metrics)


def _read_second_half(metrics: pl.DataFrame, name: str) -> pl.Series:
    return metrics[f"train/{name}"].drop_nulls().tail((len(metrics) + 1) // 2)


RIVALS: Mapping[str, Callable[[RunDirectory, Names], list[Line]]] = {
    "pivot of rewards": partial(pivot, "reward"),
    "pivot of advantages": partial(pivot, "advantage"),
    "explained variance": lambda run, names: read_explained_variance(run.table("metrics")),
    "SB3's log": lambda run, names: read_log(run.table("metrics")),
}
