"""Moments: stretches of an episode whose records score alike; and groups of records with what they score."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.core import WhenceError

By: TypeAlias = Literal["action", "episode", "region", "reward"]

ALIKE = 0.5
"""The share of its face's score that a record of a moment has at least."""


_GROUPED = {"group": pl.String, "records": pl.Int64, "mean": pl.Float64, "error": pl.Float64} | dict.fromkeys(
    ("share_negative", "total", "dropped_share"), pl.Float64
)


@dataclass(frozen=True)
class Moment:
    """A stretch of one episode whose records score alike. Its face is the record of the largest |score|.

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
    """Return the moments of the lowest or the highest scores, the most extreme face first.

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
    candidates = np.flatnonzero(keys < 0)
    candidates = candidates[np.lexsort((ordered["record_id"].to_numpy()[candidates], keys[candidates]))]
    is_free = np.ones(len(scores), dtype=bool)
    moments: list[Moment] = []
    for face in candidates:
        if len(moments) == most:
            break
        if is_free[face]:
            first, last = _extend(int(face), keys, stretch, is_free)
            is_free[first : last + 1] = False
            moments.append(_make_moment(ordered, int(face), first, last))
    return moments


def find_moment(records: pl.DataFrame, record_id: int) -> Moment:
    """Return the moment whose face is a given record: its neighbours that score alike, at least half as much.

    Args:
        records: a round's table; without scores, the record is alone and its score is NaN.
        record_id: the record.

    Raises:
        WhenceError: the round does not hold the record.
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


def _number_stretches(ordered: pl.DataFrame) -> NDArray[np.int64]:
    """Return a number for each record that differs where a moment must end: between episodes and environments."""
    if "episode_id" not in ordered.columns:
        return np.arange(len(ordered))
    columns = [
        ordered[name].cast(pl.Int64).fill_null(-1).to_numpy()
        for name in ("env_index", "episode_id")
        if name in ordered.columns
    ]
    differs = np.any([np.diff(column, prepend=column[:1]) != 0 for column in columns], axis=0)
    return np.cumsum(differs | (columns[-1] < 0))  # an unknown episode joins no neighbour


def _extend(
    face: int, keys: NDArray[np.float64], stretch: NDArray[np.int64], is_free: NDArray[np.bool_]
) -> tuple[int, int]:
    """Return the positions of a moment's first and last record; `keys` are below 0 where scores have its sign."""
    level = ALIKE * keys[face]

    def belongs(position: int) -> bool:
        inside = 0 <= position < len(keys) and stretch[position] == stretch[face]
        return bool(inside and is_free[position] and keys[position] <= level)

    first = last = face
    while belongs(first - 1):
        first -= 1
    while belongs(last + 1):
        last += 1
    return first, last


def _make_moment(ordered: pl.DataFrame, face: int, first: int, last: int) -> Moment:
    stretch = ordered[first : last + 1]
    row = ordered.row(face, named=True)
    steps = stretch["step"] if "step" in ordered.columns else None
    return Moment(
        record_id=row["record_id"],
        episode_id=row.get("episode_id"),
        env_index=row.get("env_index"),
        step=row.get("step"),
        first_step=None if steps is None else steps[0],
        last_step=None if steps is None else steps[-1],
        records=len(stretch),
        dropped=int((~stretch["keep"]).sum()) if "keep" in ordered.columns else 0,
        score=float("nan") if row["score"] is None else float(row["score"]),
        error=row.get("error"),
        total=float(stretch["score"].cast(pl.Float64).sum()),  # a column of nulls alone has no number for a sum
        action=row.get("action"),
        advantage=row.get("advantage"),
        value=row.get("value"),
        return_=row.get("return"),
        reward=row.get("reward"),
        record_ids=tuple(stretch["record_id"].to_list()),
    )


def group_scores(
    records: pl.DataFrame,
    by: By,
    *,
    labels: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    most: int = 12,
) -> pl.DataFrame:
    """Return what groups of a round's records score, the lowest mean first.

    Args:
        records: a round's table, as in a run directory, with scores.
        by: "action": discrete actions, or the signs of a box's; "episode"; "reward": each distinct reward if there are
            few, else five bins by sign and size; "region": discrete states, else nine regions: thirds of the two axes
            of the observation along which the scores vary most.
        labels: names of discrete actions.
        names: names of the observation's axes.
        most: the largest number of groups; those of the largest |total| stay.

    Returns:
        A row for each group: `group` (text), `records`, `mean` score, `error` (the standard error of the mean, records
        taken as independent), `share_negative`, `total` and `dropped_share`. No rows if the table lacks what is
        needed.
    """
    groups: pl.Series | None
    if by == "action":
        groups = _name_actions(records, labels)
    elif by == "reward":
        groups = _name_rewards(records)
    elif by == "region":
        groups = _name_regions(records, names)
    else:
        episodes = records["episode_id"] if "episode_id" in records.columns else None
        groups = None if episodes is None else episodes.cast(pl.String).fill_null("unknown")
    if groups is None or records.is_empty() or "score" not in records.columns:
        return pl.DataFrame(schema=_GROUPED)
    score = pl.col("score").cast(pl.Float64)
    dropped = (~pl.col("keep")).mean() if "keep" in records.columns else pl.lit(0.0)
    table = (
        records.with_columns(groups.alias("group"))
        .group_by("group")
        .agg(
            records=pl.len().cast(pl.Int64),
            mean=score.mean(),
            error=score.std() / pl.len().sqrt(),
            share_negative=(score < 0).mean(),
            total=score.sum(),
            dropped_share=dropped,
        )
    )
    largest = table.sort(pl.col("total").abs(), "group", descending=[True, False]).head(most)
    return largest.sort("mean", "group")


def _name_actions(records: pl.DataFrame, labels: Sequence[str] | None) -> pl.Series | None:
    if "action" not in records.columns:
        return None
    actions = records["action"]
    if actions.null_count():
        return pl.Series("group", ["unknown" if a is None else name_action(a, labels) for a in actions.to_list()])
    if isinstance(actions.dtype, pl.Array):
        rows = actions.to_list()
        return pl.Series("group", [", ".join(f"a{i} {'<' if x < 0 else '≥'} 0" for i, x in enumerate(a)) for a in rows])
    if actions.dtype.is_float():
        return pl.Series("group", np.where(actions.to_numpy() < 0, "a0 < 0", "a0 ≥ 0"))
    distinct = actions.unique()
    return actions.replace_strict(distinct, [name_action(action, labels) for action in distinct.to_list()])


def name_action(action: Any, labels: Sequence[str] | None = None) -> str:
    """Return an action in words: its label if there is one, else its numbers."""
    if isinstance(action, int) and labels is not None and 0 <= action < len(labels):
        return labels[action]
    if isinstance(action, float):
        return f"{action:.3g}"
    if isinstance(action, Sequence) and not isinstance(action, str):
        return ", ".join(name_action(entry) for entry in action)
    return str(action)


def _name_rewards(records: pl.DataFrame) -> pl.Series | None:
    if "reward" not in records.columns:
        return None
    rewards = records["reward"].cast(pl.Float64)
    values = rewards.drop_nulls()
    if values.n_unique() <= 8:
        return pl.Series("group", [f"reward {reward:.4g}" if reward is not None else "unknown" for reward in rewards])
    array = rewards.fill_null(0.0).to_numpy()
    # Nine tenths of the rewards of a sign are small, the rest are large: events such as a crash or a goal.
    losses, gains = array[array < 0], array[array > 0]
    low = float(np.quantile(losses, 0.1)) if len(losses) else 0.0
    high = float(np.quantile(gains, 0.9)) if len(gains) else 0.0
    conditions = [array < low, array < 0, array == 0, array <= high]
    texts = [f"large loss, below {low:.3g}", f"small loss, from {low:.3g}", "nothing", f"small gain, to {high:.3g}"]
    return pl.Series("group", np.select(conditions, texts, f"large gain, above {high:.3g}"))


def _name_regions(records: pl.DataFrame, names: Sequence[str] | None) -> pl.Series | None:
    axes = read_axes(records, names)
    if not axes or "score" not in records.columns:
        return None
    values = next(iter(axes.values()))
    if len(axes) == 1 and values.dtype.kind in "iu":
        return pl.Series("group", [f"state {state}" for state in values.tolist()])
    scores = records["score"].cast(pl.Float64).fill_null(0.0).to_numpy()
    binned = {name: _cut_in_thirds(name, values) for name, values in axes.items()}
    chosen = sorted(binned, key=lambda name: _explained(scores, binned[name][1]), reverse=True)[:2]
    chosen = [name for name in axes if name in chosen and len(binned[name][0]) > 1]
    if not chosen:
        return None
    texts, bins = zip(*(binned[name] for name in chosen), strict=True)
    regions = pl.Series("group", [" and ".join(part) for part in itertools.product(*texts)])
    return regions.gather(np.ravel_multi_index(bins, [len(part) for part in texts]))


def read_axes(records: pl.DataFrame, names: Mapping[str, str] | Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
    """Return the numbers of the observations, (n,) each, by axis; "x0", "x1", … without names; none if not stored."""
    axes: dict[str, NDArray[Any]] = {}
    for column in records.columns:
        if column.split(".")[0] != "observation" or records.is_empty() or records[column].null_count():
            continue
        values = np.asarray(records[column].to_numpy()).reshape(len(records), -1)
        prefix = column.partition(".")[2]
        for axis in range(values.shape[1]):
            plain = f"x{axis}" if not prefix else prefix if values.shape[1] == 1 else f"{prefix}[{axis}]"
            is_named = names is not None and not prefix and axis < len(names)
            axes[str(names[axis]) if is_named else plain] = values[:, axis]  # type: ignore[index]
    return axes


def _cut_in_thirds(name: str, values: NDArray[Any]) -> tuple[list[str], NDArray[np.int64]]:
    """Return the names of at most three bins of an axis, and each record's bin."""
    numbers = values.astype(np.float64)
    low, high = np.quantile(numbers, [1 / 3, 2 / 3])
    distinct = np.unique(numbers)
    if len(distinct) <= 3:
        return [f"{name} = {value:.3g}" for value in distinct], np.searchsorted(distinct, numbers)
    if low == high:
        return [f"{name} < {low:.3g}", f"{name} ≥ {low:.3g}"], (numbers >= low).astype(np.int64)
    texts = [f"{name} < {low:.3g}", f"{low:.3g} ≤ {name} < {high:.3g}", f"{name} ≥ {high:.3g}"]
    return texts, (numbers >= low).astype(np.int64) + (numbers >= high)


def _explained(scores: NDArray[np.float64], bins: NDArray[np.int64]) -> float:
    """Return the part of the scores' sum of squares that lies between bins."""
    counts = np.bincount(bins)
    sums = np.bincount(bins, weights=scores)
    return float((sums**2 / np.maximum(counts, 1)).sum())
