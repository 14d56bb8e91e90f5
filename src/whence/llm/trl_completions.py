"""Scores and selection in the table of completions, and the metrics, that TRL's trainers log."""

from collections.abc import Mapping
from typing import Any

from accelerate.utils import gather_object

from whence.influence import Influence
from whence.selection import Selection

_COLUMNS = ("kept", "influence")


def log_selection(
    columns: Mapping[str, Any], metrics: Mapping[str, Any], selection: Selection, influence: Influence | None
) -> None:
    """Add a generation batch's scores and selection.

    Args:
        columns: further columns of TRL's table; a new one is made when it is read, as by a defaultdict.
        metrics: TRL's metrics of the training, likewise.
        selection: the selection.
        influence: the scores; None: there are none, and a column that holds earlier ones gets None.
    """
    columns["kept"].extend(selection.keep.tolist())
    metrics["influence/kept_share"].append(float(selection.keep.double().mean()))
    if influence is not None:
        columns["influence"].extend(influence.scores.tolist())
        metrics["influence/mean"].append(float(influence.scores.mean()))
        metrics["influence/negative_share"].append(float((influence.scores < 0).double().mean()))
    elif "influence" in columns:
        columns["influence"].extend([None] * len(selection.keep))


def log_without_scores(columns: Mapping[str, Any], count: int) -> None:
    """Add None for completions that were not scored, as in an evaluation: the table holds the last of all completions.

    Args:
        columns: see `log_selection`.
        count: the completions of this process.
    """
    present = [columns[name] for name in _COLUMNS if name in columns]
    missing = gather_object([None] * count) if present else []
    for column in present:
        column.extend(missing)
