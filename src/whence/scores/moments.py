"""Moments: stretches of an episode whose records score alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.core import WhenceError

ALIKE = 0.5
"""The share of its face's score that a record of a moment has at least."""


@dataclass(frozen=True)
class Moment:
    """A stretch of one episode whose records score alike. Its face is the record of the surest score.

    Attributes:
        record_id: the face.
        episode_id: the episode; None where unknown.
        env_index: the environment; None where unknown.
        step: the face's position in the episode, from 0; None where unknown.
        first_step: the position of the first record; None where unknown.
        last_step: the position of the last record; None where unknown.
        records: the number of records.
        dropped: how many of them did not train.
        score: the face's score.
        error: its standard error; None where unknown.
        total: the sum of the scores.
        action: the face's action.
        advantage: the face's, not normalised.
        value: the face's, as the critic estimated it; None where unknown.
        return_: the face's target of the value function; None where unknown.
        reward: the face's; None where unknown.
        record_ids: all records, in time order.
    """

    record_id: int
    episode_id: int | None
    env_index: int | None
    step: int | None
    first_step: int | None
    last_step: int | None
    records: int
    dropped: int
    score: float
    error: float | None
    total: float
    action: Any
    advantage: float | None
    value: float | None
    return_: float | None
    reward: float | None
    record_ids: tuple[int, ...]


def find_moments(records: pl.DataFrame, *, lowest: bool, most: int) -> list[Moment]:
    """Return the moments of scores below or above 0, the surest first: by score over error, if known.

    Around its face, a moment holds the neighbouring steps of the episode whose scores have the face's sign and at
    least half its size. No record is in two moments. Records without an episode are a moment each.

    Args:
        records: a round's table, as in a run directory; without scores there are no moments.
        lowest: True: moments below 0, the most harmful first; False: moments above 0, the most helpful first.
        most: the largest number of moments.
    """
    if "score" not in records.columns or records.is_empty() or most < 1:
        return []
    ordered = sort_by_time(records)
    scores = ordered["score"].cast(pl.Float64).fill_null(0.0).to_numpy()
    keys = scores if lowest else -scores
    stretch = _number_stretches(ordered)
    order = np.lexsort((ordered["record_id"].to_numpy(), keys / _read_errors(ordered)))
    is_free = np.ones(len(scores), dtype=bool)
    moments: list[Moment] = []
    for face in order[keys[order] < 0]:
        if len(moments) == most:
            break
        if is_free[face]:
            first, last = _extend(int(face), keys, stretch, is_free)
            is_free[first : last + 1] = False
            moments.append(_make_moment(ordered, int(face), first, last))
    return moments


def find_moment(records: pl.DataFrame, record_id: int) -> Moment:
    """Return the moment whose face is a given record: its neighbours that score alike, at least half as much.

    Without scores, the record is alone and its score is NaN. One that the round does not hold is a `WhenceError`.
    """
    ordered = sort_by_time(records)
    if "score" not in ordered.columns:
        ordered = ordered.with_columns(score=pl.lit(float("nan")))
    ids = ordered["record_id"]
    if (place := ids.index_of(record_id)) is None:
        raise WhenceError(
            f"Record {record_id} is not in this round, which holds records {ids.min()!r} to {ids.max()!r}."
        )
    face = int(place)
    scores = ordered["score"].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    if not abs(scores[face]) > 0:
        return _make_moment(ordered, face, face, face)
    keys = -np.sign(scores[face]) * scores
    return _make_moment(ordered, face, *_extend(face, keys, _number_stretches(ordered), np.ones(len(keys), dtype=bool)))


def sort_by_time(records: pl.DataFrame) -> pl.DataFrame:
    """Return a round's records environment by environment, each in the order of time."""
    keys = [name for name in ("env_index", "record_id") if name in records.columns]
    return records.sort(keys) if keys else records


def _read_errors(ordered: pl.DataFrame) -> NDArray[np.float64]:
    """Return what scores are divided by to rank them: their errors, infinite where one is not known; 1 if none is.

    Of few folds some errors are small by chance: none counts for less than the median, so no score of nothing leads.
    """
    if "error" not in ordered.columns or not ordered["error"].count():
        return np.ones(len(ordered))
    errors = ordered["error"].cast(pl.Float64).to_numpy()
    is_known = errors > 0
    return np.where(is_known, np.maximum(errors, np.median(errors[is_known]) if is_known.any() else 0.0), np.inf)


def _number_stretches(ordered: pl.DataFrame) -> NDArray[np.int64]:
    """Return a number for each record that differs where a moment must end: between episodes and environments."""
    if "episode_id" not in ordered.columns:
        return np.arange(len(ordered))
    keys = [name for name in ("env_index", "episode_id") if name in ordered.columns]
    differs = pl.struct(keys).rle_id().diff().fill_null(0) != 0
    is_unknown = pl.col("episode_id").fill_null(-1) < 0  # an unknown episode joins no neighbour
    return ordered.select((differs | is_unknown).cum_sum()).to_series().to_numpy()


def _extend(
    face: int, keys: NDArray[np.float64], stretch: NDArray[np.int64], is_free: NDArray[np.bool_]
) -> tuple[int, int]:
    """Return the positions of a moment's first and last record; `keys` are below 0 where scores have its sign."""
    ends = np.flatnonzero((stretch != stretch[face]) | ~is_free | ~(keys <= ALIKE * keys[face]))
    after = int(np.searchsorted(ends, face))
    first, end = [-1, *ends[after - 1 : after]][-1] + 1, [*ends[after : after + 1], len(keys)][0]
    return int(first), int(end) - 1


def _make_moment(ordered: pl.DataFrame, face: int, first: int, last: int) -> Moment:
    stretch = ordered[first : last + 1]
    row = ordered.row(face, named=True)
    steps = stretch["step"] if "step" in ordered.columns else None
    names = ("record_id", "episode_id", "env_index", "step", "error", "action", "advantage", "value", "reward")
    about: dict[str, Any] = {name: row.get(name) for name in names}
    return Moment(
        **about,
        first_step=None if steps is None else steps[0],
        last_step=None if steps is None else steps[-1],
        records=len(stretch),
        dropped=int((~stretch["keep"]).sum()) if "keep" in ordered.columns else 0,
        score=float("nan") if row["score"] is None else float(row["score"]),
        total=float(stretch["score"].cast(pl.Float64).sum()),  # a column of nulls alone has no number for a sum
        return_=row.get("return"),
        record_ids=tuple(stretch["record_id"].to_list()),
    )


def name_action(action: Any, labels: Sequence[str] | None = None) -> str:
    """Return an action in words: its label if there is one, else its numbers; a dash for None."""
    if action is None:
        return "–"
    if isinstance(action, int) and labels is not None and 0 <= action < len(labels):
        return labels[action]
    if isinstance(action, float):
        return f"{action:.3g}"
    if isinstance(action, Sequence) and not isinstance(action, str):
        return ", ".join(name_action(entry) for entry in action)
    return str(action)


def list_observations(columns: Sequence[str], root: str | None = None) -> list[str]:
    """Return the columns of the observations as the environment returned them, or those of a `root`."""
    roots = [column.split(".")[0] for column in columns]
    root = root or ("raw_observation" if "raw_observation" in roots else "observation")
    return [column for column, its_root in zip(columns, roots, strict=True) if its_root == root]


def name_entries(key: str, width: int, names: Sequence[str] | None = None) -> list[str]:
    """Return the names of a column's entries: "x0", "x1", … or by the key of a Dict, where `names` has none of each."""
    if names and not key and len(names) == width:
        return [*map(str, names)]
    if key and width == 1:
        return [key]
    return [f"{key}[{index}]" if key else f"x{index}" for index in range(width)]


def read_axes(
    records: pl.DataFrame, names: Sequence[str] | None = None, *, most: int | None = None
) -> dict[str, NDArray[Any]]:
    """Return the numbers of the observations, (n,) each, by axis as `name_entries` names it; none if not stored.

    They are the environment's own where the policy saw normalised ones. None are returned of more than `most` axes.
    """
    axes: dict[str, NDArray[Any]] = {}
    for column in list_observations(records.columns):
        if records.is_empty() or records[column].null_count():
            continue
        values = np.asarray(records[column].to_numpy()).reshape(len(records), -1)
        if most is not None and len(axes) + values.shape[1] > most:
            return {}
        entries = name_entries(column.partition(".")[2], values.shape[1], names)
        axes |= dict(zip(entries, values.T, strict=True))
    return axes
