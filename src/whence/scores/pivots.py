"""Groups of a round's records by one or two of their columns, with what they score."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.scores.influence import widen_errors
from whence.scores.moments import name_action, read_axes

Bins: TypeAlias = tuple[Sequence[str], NDArray[np.int64]]
"""The names of groups in their order, and the place of each record's."""

FEW = 8
"""Up to so many distinct values are a group each."""

NEARLY_ALL = 0.9
"""The share of some records from which on a group is said to hold them."""

LEAST_CLUSTERS = 3
"""Independent sets of episodes that a group needs to have an error."""

MOST_AXES = 256
"""Observations of more entries, such as images, have no regions."""

_ONE_EACH = ("action", "region", "reward", "step", "env_index", "keep", "end")
"""Columns that records are grouped by, where they have them; "region" is made from the observation."""


def list_groupings(records: pl.DataFrame) -> list[str]:
    """Return the columns, and "region", that divide a round's records into several groups."""
    columns = [name for name in records.columns if name.startswith(("info.", "reward."))]
    return [
        by
        for by in (*_ONE_EACH, *columns)
        if (groups := name_groups(records, by)) is not None and groups.n_unique() > 1
    ]


def group_scores(
    records: pl.DataFrame,
    by: str | Sequence[str],
    *,
    labels: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    most: int = 12,
) -> pl.DataFrame:
    """Return what groups of a round's records score, the lowest mean first.

    Args:
        records: a round's table, as in a run directory, with scores.
        by: a column, or two of them. "action": discrete actions, or the signs of a box's; "reward": each distinct
            reward if there are few, else five bins by sign and size; "region": discrete states, else nine regions:
            thirds of the two axes of the observation along which the scores vary most. Another column has a group for
            each value if there are few, else five ranges of whole numbers or thirds.
        labels: names of discrete actions.
        names: names of the observation's axes.
        most: the largest number of groups by each column; those of the largest |total| stay.

    Returns:
        A row for each group: `group` (an Enum in the groups' order), `across` (that by the second column, if two),
        `records`, `mean` score, `error` (of the mean, by `group_errors`; null where unknown),
        `share_negative`, `total` and `dropped_share`. No rows if the table lacks what is needed.
    """
    columns = dict(zip(("group", "across"), [by] if isinstance(by, str) else by, strict=False))
    groups = {name: name_groups(records, column, labels, names) for name, column in columns.items()}
    if any(series is None for series in groups.values()) or records.is_empty() or "score" not in records.columns:
        numbers = ("records", "mean", "error", "share_negative", "total", "dropped_share")
        return pl.DataFrame(schema={**dict.fromkeys(columns, pl.String), **dict.fromkeys(numbers, pl.Float64)})
    table = records.with_columns(series.alias(name) for name, series in groups.items() if series is not None)
    place = pl.col("place").first().over(*columns).rank("dense") - 1  # the number of each group, from 0
    table = table.with_row_index("place").with_columns(place.cast(pl.Int64))
    errors = pl.Series("error", group_errors(records, table["place"].to_numpy())).fill_nan(None)
    score = pl.col("score").cast(pl.Float64)
    for name in columns:
        totals = table.group_by(name).agg(score.sum().abs()).sort("score", name, descending=[True, False])
        table = table.filter(pl.col(name).is_in(totals[name].head(most).implode()))
    dropped = (~pl.col("keep")).mean() if "keep" in records.columns else pl.lit(0.0)
    grouped = table.group_by(*columns).agg(
        records=pl.len().cast(pl.Int64),
        mean=score.mean(),
        error=pl.col("place").first(),
        share_negative=(score < 0).mean(),
        total=score.sum(),
        dropped_share=dropped,
    )
    grouped = grouped.with_columns(errors.gather(grouped["error"]))
    return grouped.sort("mean", *columns)


def find_common_groups(
    records: pl.DataFrame, ids: Collection[int], labels: Sequence[str] | None = None
) -> list[tuple[str, str]]:
    """Return column and name of the groups that hold nearly all of some records, two at most, the smallest first."""
    inside, common = records["record_id"].is_in(list(ids)), list[tuple[float, str, str]]()
    for by in list_groupings(records):
        groups = name_groups(records, by, labels)
        if groups is not None and inside.any() and by != "region":  # regions are cut where scores vary, not by meaning
            name = groups.filter(inside).mode()[0]
            if (groups.filter(inside) == name).mean() >= NEARLY_ALL:
                common.append((float((groups == name).mean()), by, str(name)))
    return [(by, name) for share, by, name in sorted(common) if share <= 0.5][:2]


def group_errors(records: pl.DataFrame, group: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the standard error of each group's mean score over fresh rollouts, by `widen_errors`.

    A fresh rollout changes both the target and the records of a group. So a fold of episodes at a time is left out of
    both: `M_j = sum_{k != j} w_k mean_{i in G, not in j} s_ik / (1 - w_j)`, where s_ik is the score by fold k's mean
    target, and the error is `sqrt((K - 1) / K sum_j (M_j - mean M)^2)`: the jackknife by groups of episodes (Kott,
    J. of Official Statistics 17, 2001). Folds that share an episode count as one.

    Args:
        records: a round's table, with scores.
        group: (n,) the number of each record's group, from 0.

    Returns:
        (groups,) the errors. NaN if the table has no `score_folds`, or if less than three folds hold the group's
        records, in effect: `(sum_k n_k)^2 / sum_k n_k^2`, which also gives the degrees of freedom.
    """
    number = int(group.max()) + 1
    if not {"score_folds", "fold"} <= {*records.columns} or records["score_folds"].null_count():
        return np.full(number, np.nan)
    cluster = _join_folds(records)
    count = int(cluster.max()) + 1
    in_cluster = np.eye(count)[cluster[records["fold"].to_numpy()]]  # (n, clusters)
    shares = np.bincount(records["fold"].to_numpy(), minlength=len(cluster)) / len(records)
    weighted = (records["score_folds"].to_numpy().astype(np.float64) * shares) @ np.eye(count)[cluster]
    sizes, sums = np.zeros((number, count)), np.zeros((number, count, count))
    np.add.at(sizes, group, in_cluster)
    for k in range(count):  # sums[g, k, l]: of the scores by cluster k of the records in cluster l
        np.add.at(sums[:, k], group, in_cluster * weighted[:, k : k + 1])
    others = sums.sum(axis=(1, 2))[:, None] - sums.sum(axis=1) - sums.sum(axis=2) + np.einsum("gkk->gk", sums)
    filled = sizes.sum(axis=1) ** 2 / (sizes**2).sum(axis=1)
    is_known = filled >= LEAST_CLUSTERS
    counts = np.where(is_known[:, None], sizes.sum(axis=1, keepdims=True) - sizes, 1)
    means = others / counts / (1 - shares @ np.eye(count)[cluster]) if count > 1 else others
    errors = np.sqrt((count - 1) * means.var(axis=1)) * widen_errors(np.maximum(filled, 2) - 1)
    return np.where(is_known, errors, np.nan)


def _join_folds(records: pl.DataFrame) -> NDArray[np.int64]:
    """Return the number of each fold's cluster, from 0: folds that share an episode are in one."""
    keys = [name for name in ("env_index", "episode_id") if name in records.columns]
    count = len(records["score_folds"][0])
    cluster = np.arange(count)
    if keys:
        shared = records.group_by(keys).agg(pl.col("fold").unique())["fold"]
        for folds in shared.filter(shared.list.len() > 1).to_list():  # nearly all episodes are in one
            cluster[np.isin(cluster, cluster[folds])] = cluster[folds[0]]
    numbers: NDArray[np.int64] = np.unique(cluster, return_inverse=True)[1]
    return numbers


def name_groups(
    records: pl.DataFrame, by: str, labels: Sequence[str] | None = None, names: Sequence[str] | None = None
) -> pl.Series | None:
    """Return the name of each record's group, an Enum in the groups' order; None if the table lacks what is needed."""
    if by == "region":
        bins = _bin_regions(records, names)
    elif by not in records.columns or records.is_empty():
        bins = None
    elif by == "action":
        bins = _bin_actions(records["action"], labels)
    elif by in _BINS:
        bins = _BINS[by](records[by])
    else:
        bins = _bin_values(by.removeprefix("info."), records[by])
    if bins is None:
        return None
    texts, places = bins
    return pl.Series(by, texts, dtype=pl.Enum(list(dict.fromkeys(texts)))).gather(places)


def _bin_distinct(column: pl.Series, name: Callable[[Any], str], missing: str = "unknown") -> Bins:
    """Return a group for each distinct value, in the values' order; nulls come last."""
    values = column.unique().drop_nulls().sort().to_list()
    numbers = column.replace_strict(values, list(range(len(values))), default=len(values), return_dtype=pl.Int64)
    return [*map(name, values), missing], numbers.to_numpy()


def _bin_values(name: str, column: pl.Series) -> Bins | None:
    numbers = column.drop_nulls()
    if column.dtype.is_nested():
        return None
    if not column.dtype.is_numeric() or numbers.n_unique() <= FEW:
        return _bin_distinct(
            column, lambda value: f"{name} = {value:.4g}" if isinstance(value, float) else f"{name} = {value}"
        )
    texts, places = _cut_whole(name, numbers) if column.dtype.is_integer() else _cut_in_thirds(name, numbers.to_numpy())
    every = np.full(len(column), len(texts))
    every[column.is_not_null().to_numpy()] = places
    return [*texts, "unknown"], every


def _cut_whole(name: str, numbers: pl.Series) -> Bins:
    """Return at most five ranges of whole numbers, of about as many records each."""
    values = numbers.to_numpy()
    edges = np.unique(np.quantile(values, [0.2, 0.4, 0.6, 0.8], method="higher"))
    starts = [int(values.min()), *edges[edges > values.min()].astype(int).tolist()]
    ends = [*(start - 1 for start in starts[1:]), int(values.max())]
    texts = [f"{name} {start}" + (f"–{end}" if end > start else "") for start, end in zip(starts, ends, strict=True)]
    return texts, np.searchsorted(starts, values, side="right") - 1


def _bin_actions(actions: pl.Series, labels: Sequence[str] | None) -> Bins:
    if (isinstance(actions.dtype, pl.Array) or actions.dtype.is_float()) and not actions.null_count():
        rows = np.asarray(actions.to_numpy()).reshape(len(actions), -1)
        signs = [", ".join(f"a{axis} {'<' if x < 0 else '≥'} 0" for axis, x in enumerate(row)) for row in rows.tolist()]
        return _bin_distinct(pl.Series(signs), str)
    if actions.dtype.is_nested():
        names = [None if action is None else name_action(action, labels) for action in actions.to_list()]
        return _bin_distinct(pl.Series(names, dtype=pl.String), str)
    return _bin_distinct(actions, lambda action: name_action(action, labels))


def _bin_rewards(rewards: pl.Series) -> Bins:
    rewards = rewards.cast(pl.Float64)
    if rewards.drop_nulls().n_unique() <= FEW:
        return _bin_distinct(rewards, lambda reward: f"reward {reward:.4g}")
    array = rewards.fill_null(0.0).to_numpy()
    # Nine tenths of the rewards of a sign are small, the rest are large: events such as a crash or a goal.
    losses, gains = array[array < 0], array[array > 0]
    low = float(np.quantile(losses, 0.1)) if len(losses) else 0.0
    high = float(np.quantile(gains, 0.9)) if len(gains) else 0.0
    conditions = [array < low, array < 0, array == 0, array <= high]
    texts = [f"large loss, below {low:.3g}", f"small loss, from {low:.3g}", "nothing", f"small gain, to {high:.3g}"]
    return [*texts, f"large gain, above {high:.3g}"], np.select(conditions, range(4), 4)


def _bin_regions(records: pl.DataFrame, names: Sequence[str] | None) -> Bins | None:
    axes = read_axes(records, names, most=MOST_AXES)
    if not axes or "score" not in records.columns:
        return None
    values = next(iter(axes.values()))
    if len(axes) == 1 and values.dtype.kind in "iu":
        return _bin_distinct(pl.Series(values), lambda state: f"state {state}")
    scores = records["score"].cast(pl.Float64).fill_null(0.0).to_numpy()
    binned = {name: _cut_in_thirds(name, values) for name, values in axes.items()}
    chosen = sorted(binned, key=lambda name: _measure_between(scores, binned[name][1]), reverse=True)[:2]
    chosen = [name for name in axes if name in chosen and len(binned[name][0]) > 1]
    if not chosen:
        return None
    texts, bins = zip(*(binned[name] for name in chosen), strict=True)
    regions = [" and ".join(part) for part in itertools.product(*texts)]
    return regions, np.ravel_multi_index(bins, [len(part) for part in texts])


def _cut_in_thirds(name: str, values: NDArray[Any]) -> Bins:
    numbers = values.astype(np.float64)
    low, high = np.quantile(numbers, [1 / 3, 2 / 3])
    distinct = np.unique(numbers)
    if len(distinct) <= 3:
        return [f"{name} = {value:.3g}" for value in distinct], np.searchsorted(distinct, numbers)
    if low == high:
        return [f"{name} < {low:.3g}", f"{name} ≥ {low:.3g}"], (numbers >= low).astype(np.int64)
    texts = [f"{name} < {low:.3g}", f"{low:.3g} ≤ {name} < {high:.3g}", f"{name} ≥ {high:.3g}"]
    return texts, (numbers >= low).astype(np.int64) + (numbers >= high)


def _measure_between(scores: NDArray[np.float64], bins: NDArray[np.int64]) -> float:
    """Return the part of the scores' sum of squares that lies between bins."""
    counts = np.bincount(bins)
    sums = np.bincount(bins, weights=scores)
    return float((sums**2 / np.maximum(counts, 1)).sum())


_BINS: Mapping[str, Callable[[pl.Series], Bins]] = {
    "reward": _bin_rewards,
    "env_index": lambda column: _bin_distinct(column, lambda env: f"environment {env}"),
    "keep": lambda column: _bin_distinct(column, lambda keep: "trained" if keep else "dropped"),
    "end": lambda column: _bin_distinct(column, str, "not the last step"),
}
