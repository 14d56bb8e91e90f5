"""What one has without findings, as lines: pivots of the records, explained variance, SB3's log.

A line is a kind, as findings have it, and a text. Each rival has one fixed rule, by which its lines are sorted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from whence.runs import RunDirectory

Names = Mapping[str, Sequence[str]]
Line = tuple[str, str]

CLEAR = 4.0
"""The errors that a pivot's difference must be from 0 to be a line: many differences are looked at."""


def read_regions(run: RunDirectory, names: Names) -> pl.DataFrame:
    """Return all records with columns for the pivots: the action, and which half of each feature a record is in."""
    records = pl.concat([run.round("records", number) for number in run.rounds()], how="diagonal_relaxed")
    regions = {
        "environment": records["env_index"].cast(pl.String),
        "step of the episode": _halve(records["step"].to_numpy()),
        "first step": (records["step"] == 0).cast(pl.String),
        "action": _label_actions(records["action"], names.get("actions", ())),
    }
    for column in records.columns:
        if column.split(".")[0] == "observation":
            values = np.asarray(records[column].to_numpy()).reshape(len(records), -1)
            labels = names.get("observations", ()) if column == "observation" else ()
            for number, feature in enumerate(values.T):
                name = labels[number] if number < len(labels) else f"{column} {number}"
                if len(np.unique(feature)) > 1:
                    regions[name] = _halve(feature)
    return records.select("reward", "advantage").with_columns(**regions)


def _halve(values: Any) -> pl.Series:
    """Return in words which side of the median each value is on; values below the highest are low if that is it."""
    values = values.astype(float)
    bound = np.nanmedian(values)
    low = values <= bound if (values > bound).any() else values < bound
    return pl.Series([f"at most {bound:.3g}" if each else f"above {bound:.3g}" for each in low])


def _label_actions(actions: pl.Series, names: Sequence[str]) -> pl.Series:
    if actions.dtype.is_integer():
        return pl.Series([names[number] if number < len(names) else f"action {number}" for number in actions])
    return _halve(actions.to_numpy().reshape(len(actions), -1)[:, 0])


def pivot(kind: str, records: pl.DataFrame, value: str) -> list[Line]:
    """Return the cells of a pivot of a column's mean by action and region that differ most, for their error."""
    mean, deviation = float(records[value].mean()), float(records[value].std())  # type: ignore[arg-type]
    lines = []
    for region in records.drop("reward", "advantage", "action").columns:
        cells = records.group_by("action", region).agg(pl.mean(value).alias("mean"), pl.len().alias("n"))
        for action, half, cell_mean, count in cells.iter_rows():
            errors = (cell_mean - mean) / max(deviation / count**0.5, 1e-9)
            text = f"{value} of action {action}, {region} {half}: {cell_mean:.3g} (all records {mean:.3g})"
            lines.append((abs(errors), text))
    return [(kind, text) for errors, text in sorted(lines, reverse=True) if errors > CLEAR]


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
    "pivot of rewards": lambda run, names: pivot("reward", read_regions(run, names), "reward"),
    "pivot of advantages": lambda run, names: pivot("records", read_regions(run, names), "advantage"),
    "explained variance": lambda run, names: read_explained_variance(run.table("metrics")),
    "SB3's log": lambda run, names: read_log(run.table("metrics")),
}
