"""How a run went, round by round: what was logged, and what its records were like, one number a round each."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from whence.runs import RunDirectory
from whence.scores import read_axes
from whence.stored.agents import action_labels, state_names

Numbers = NDArray[np.float64]

FEW = 24
"""Numbers of an observation that are looked at one by one; of more, none is."""

FEWEST = 12
"""Rounds that a history has at least: a run needs them to have worked, and then broken."""

Key: TypeAlias = tuple[str, str, str]
"""What a number of a round is: its kind, its words, and the column that it is read from."""

RETURN: Key = ("return", "the return", "")
LENGTH: Key = ("length", "the length of episodes", "")
"""The means over the episodes that ended in a round."""


Pick: TypeAlias = Callable[[Numbers, float], NDArray[np.bool_]]


class Series(NamedTuple):
    """A number of each round, NaN where it is not known.

    Attributes:
        kind: what healthy runs are compared by, one for all entries of the observation. Empty: it tells the scale of
            its column alone.
        words: what it is, in a sentence.
        values: (r,).
        column: the records' column, or axis of the observation, that it is read from; empty: none.
        pick: returns which records of a round show it, of the column's values there; None: no single ones do.
    """

    kind: str
    words: str
    values: Numbers
    column: str = ""
    pick: Pick | None = None


@dataclass(frozen=True, eq=False)
class History:
    """What a run was like in each of r rounds.

    Attributes:
        rounds: (r,) their numbers.
        returns: (r,) the mean return of episodes.
        series: all other numbers.
    """

    rounds: NDArray[np.int64]
    returns: Numbers
    series: tuple[Series, ...]


METRICS: Mapping[str, tuple[str, str]] = {
    "train/approx_kl": ("divergence", "the divergence"),
    "train/clip_fraction": ("clipped share", "the share of clipped records"),
    "train/value_loss": ("value loss", "the critic's loss"),
    "train/explained_variance": ("explained variance", "what the critic explains"),
    "train/entropy_loss": ("entropy", "the entropy"),
    "train/std": ("deviation", "the policy's deviation"),
    "train/learning_rate": ("learning rate", "the learning rate"),
    "train/clip_range": ("clip range", "the clip range"),
    "train/grad_norm": ("gradient norm", "the gradient's norm"),
}
"""Metrics that may tell why a return fell: their kind, and their words."""

KINDS = (
    *(kind for kind, _ in METRICS.values()),
    *("reward", "advantage", "value", "observation", "new observations", "action", "length"),
)
"""The kinds of numbers."""

_EXTREMES = {"the lowest": 0.0, "the median": 0.5, "the highest": 1.0}
_INNER = {"the 1st percentile of": 0.01, "the median of": 0.5, "the 99th percentile of": 0.99}
"""The quantiles of a column that are looked at."""

_PICKS: Mapping[str, Pick] = {
    **dict.fromkeys(("the lowest", "the 1st percentile of"), lambda values, value: values <= value),
    **dict.fromkeys(("the highest", "the 99th percentile of"), lambda values, value: values >= value),
}


def read_returns(run: RunDirectory) -> tuple[NDArray[np.int64], Numbers]:
    """Return the numbers of a run's rounds, and the mean return of the episodes that ended in each."""
    rounds, rows, ongoing = list_whole_rounds(run), list[dict[Key, float]](), dict[int, tuple[float, int]]()
    for number in rounds:
        rows.append(_count_episodes(run.round("records", int(number)), ongoing))
    return rounds, choose_returns(np.array([row.get(RETURN, np.nan) for row in rows]), run.table("metrics"), rounds)


def list_whole_rounds(run: RunDirectory) -> NDArray[np.int64]:
    """Return the numbers of the rounds that have records and metrics, in order."""
    metrics = run.table("metrics")
    return np.array(sorted({*metrics["round"].to_list()} & {*run.rounds()}) if "round" in metrics.columns else [], int)


def choose_returns(returns: Numbers, metrics: pl.DataFrame, rounds: NDArray[np.int64]) -> Numbers:
    """Return the returns of episodes; where records do not tell them, those that were logged."""
    if np.isfinite(returns).any() or "episode_return" not in metrics.columns:
        return returns
    rows = metrics.filter(pl.col("round").is_in(rounds)).sort("round")
    return rows["episode_return"].cast(pl.Float64).fill_null(np.nan).to_numpy()


def read_logged_history(metrics: pl.DataFrame) -> History | None:
    """Return what metrics tell of a training that has no records; None if they are few, or hold no return."""
    if "episode_return" not in metrics.columns or len(metrics) < FEWEST:
        return None
    numbers = metrics["round"] if "round" in metrics.columns else pl.arange(1, len(metrics) + 1, eager=True)
    returns = metrics["episode_return"].cast(pl.Float64).fill_null(np.nan).to_numpy()
    return History(numbers.cast(pl.Int64).to_numpy(), returns, (*read_metrics(metrics),))


def read_history(run: RunDirectory) -> History | None:
    """Read what a run was like in each round, of whole episodes and all records; None if they are few."""
    rounds, metrics = list_whole_rounds(run), run.table("metrics")
    if len(rounds) < FEWEST:
        return None
    names, actions = state_names(run.config.get("env"), run.config), action_labels(run.config.get("env"), run.config)
    rows, ongoing, ranges = list[dict[Key, float]](), dict[int, tuple[float, int]](), dict[str, tuple[float, float]]()
    for number in rounds:
        records = run.round("records", int(number))
        rows.append(dict(_summarise(records, names, actions, ranges, run.config)) | _count_episodes(records, ongoing))
    columns = {
        key: np.array([row.get(key, np.nan) for row in rows]) for key in dict.fromkeys(k for row in rows for k in row)
    }
    returns = choose_returns(columns.pop(RETURN, np.full(len(rounds), np.nan)), metrics, rounds)
    series = [
        Series(kind, f"{words} `{column}`" if column else words, values, column, _PICKS.get(words))
        for (kind, words, column), values in columns.items()
    ]
    return History(
        rounds, returns, (*read_metrics(metrics.filter(pl.col("round").is_in(rounds)).sort("round")), *series)
    )


def read_metrics(metrics: pl.DataFrame) -> list[Series]:
    """Return the metrics that may tell why a return fell."""
    return [
        Series(
            kind, words, metrics[name].cast(pl.Float64).fill_null(np.nan).to_numpy() * (-1 if "entropy" in name else 1)
        )
        for name, (kind, words) in METRICS.items()
        if name in metrics.columns
    ]


def _summarise(
    records: pl.DataFrame,
    names: Any,
    actions: Any,
    ranges: dict[str, tuple[float, float]],
    config: Mapping[str, Any],
) -> Iterator[tuple[Key, float]]:
    """Yield the numbers of a round by kind, words and column; `ranges` are those of earlier rounds, and extended."""
    for column in ("reward", "advantage", "value"):
        if column in records.columns and records[column].null_count() < len(records):
            values = records[column].cast(pl.Float64).drop_nulls().to_numpy()
            for words, share in (_INNER if column == "value" else _EXTREMES).items():
                yield (column, words, column), float(np.quantile(values, share))
    for axis, values in read_axes(records, names, most=FEW).items():
        values = values.astype(np.float64)
        for words, share in _INNER.items():
            yield ("observation", words, axis), float(np.quantile(values, share))
        for words, extreme in (("the lowest", values.min()), ("the highest", values.max())):
            yield ("", words, axis), float(extreme)
        low, high = ranges.get(axis, (np.inf, -np.inf))
        if low <= high:
            yield (
                ("new observations", "the share outside of all earlier ones of", axis),
                float(np.mean((values < low) | (values > high))),
            )
        ranges[axis] = min(low, float(values.min())), max(high, float(values.max()))
    values = np.asarray(records["action"].to_numpy()) if "action" in records.columns else np.zeros(0)
    if values.ndim == 1 and values.dtype.kind in "iu" and len(values):
        counts = np.bincount(values - values.min() if values.min() < 0 else values)
        for index, count in enumerate(counts[:FEW]):
            name = actions[index] if actions and index < len(actions) else str(index)
            yield ("action", "the share of the action", name), count / len(values)
    elif len(values):
        flat, space = values.reshape(len(values), -1).astype(np.float64), config.get("action_space") or {}
        low, high = (
            np.asarray(space.get(name, limit), dtype=np.float64).reshape(-1)
            for name, limit in (("low", "-inf"), ("high", "inf"))
        )
        yield ("action", "the share of actions at a bound", ""), float(np.mean((flat <= low) | (flat >= high)))


def _count_episodes(records: pl.DataFrame, ongoing: dict[int, tuple[float, int]]) -> dict[Key, float]:
    """Return the mean return and length of the episodes that ended in a round; what was seen of others is kept."""
    if not {"episode_id", "reward", "end"} <= {*records.columns}:
        return {}
    rewards, ended = pl.col("reward").cast(pl.Float64).fill_null(0.0).sum(), pl.col("end").is_not_null().any()
    ends = list[tuple[float, int]]()
    for episode, reward, steps, has_ended in (
        records.drop_nulls("episode_id").group_by("episode_id").agg(rewards, pl.len(), ended).iter_rows()
    ):
        before = ongoing.pop(episode, (0.0, 0))
        now = before[0] + reward, before[1] + steps
        if has_ended:
            ends.append(now)
        else:
            ongoing[episode] = now
    if not ends:
        return {}
    means = np.mean(ends, axis=0)
    return {RETURN: float(means[0]), LENGTH: float(means[1])}
