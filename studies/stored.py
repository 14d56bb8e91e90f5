"""What the studies of rounds have written: `rounds/KIND.parquet`, a row for each round, and `datamodels.parquet`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from whence.lab import put_row, read_rows

ROUND = ("env", "optimizer", "seed", "round")
"""What tells the rounds of a study apart; their rows are in this order."""

GROUP = ("env", "optimizer")
"""What tells the environments and optimisers of a study apart."""


def read_rounds(out: Path, kind: str) -> list[dict[str, Any]]:
    """Return what a study has written about rounds; `kind`: "round", "intervention", "selection" or "ablation"."""
    return list(read_rows(_rounds_file(out, kind), ROUND).values())


def read_round(out: Path, kind: str, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a study has written about one round, which `about` names; None if it has not studied it."""
    return read_rows(_rounds_file(out, kind), ROUND).get(tuple(about[name] for name in ROUND))


def write_round(out: Path, kind: str, content: Mapping[str, Any]) -> None:
    """Write what a study says about one round, in place of what was there."""
    write_line(_rounds_file(out, kind), round_numbers(content), ROUND)


def write_line(file: Path, content: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Write a line of a file, in place of what was there; other processes may write other lines meanwhile."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_name(".lock")):
        put_row(file, content, keys)


def read_datamodels(out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the linear predictors of 4,000 trainings, by environment and optimiser."""
    return {(env, optimizer): row for (env, optimizer), row in read_rows(out / "datamodels.parquet", GROUP).items()}


def round_numbers(value: Any) -> Any:
    """Return a tree of numbers at six digits, which is more than any of them is good for."""
    if isinstance(value, Mapping):
        return {key: round_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [round_numbers(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _rounds_file(out: Path, kind: str) -> Path:
    return out / "rounds" / f"{kind}.parquet"
