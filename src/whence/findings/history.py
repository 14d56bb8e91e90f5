"""How a run went, round by round: what was logged, and what its records were like, one number a round each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
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

Entries: TypeAlias = Iterator[tuple[Key, float]]
"""Numbers of a round."""

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
    """What a run was like in each of r rounds: their numbers (r,), mean returns of episodes (r,), and all others."""

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

_EXTREMES = {"the lowest": 0.0, "the median": 0.5, "the highest": 1.0}
_INNER = {"the 1st percentile of": 0.01, "the median of": 0.5, "the 99th percentile of": 0.99}
"""The quantiles of a column that are looked at."""

_PICKS: Mapping[str, Pick] = {
    **dict.fromkeys(("the lowest", "the 1st percentile of"), lambda values, value: values <= value),
    **dict.fromkeys(("the highest", "the 99th percentile of"), lambda values, value: values >= value),
}


def read_returns(run: RunDirectory) -> tuple[NDArray[np.int64], Numbers]:
    """Return the numbers of a run's rounds, and the mean return of the episodes that ended in each."""
    rounds, ongoing = list_whole_rounds(run), dict[int, tuple[float, int]]()
    rows = [_count_episodes(run.round("records", int(number)), ongoing) for number in rounds]
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
    rows, ongoing, ranges = list[dict[Key, float]](), dict[int, tuple[float, int]](), dict[str, tuple[float, float]]()
    for number in rounds:
        records = run.round("records", int(number))
        rows.append(dict(_summarise(records, run, ranges)) | _count_episodes(records, ongoing))
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = {key: np.array([row.get(key, np.nan) for row in rows]) for key in keys}
    returns = choose_returns(columns.pop(RETURN, np.full(len(rounds), np.nan)), metrics, rounds)
    series = [
        Series(kind, f"{words} `{column}`" if column else words, values, column, _PICKS.get(words))
        for (kind, words, column), values in columns.items()
    ]
    logged = metrics.filter(pl.col("round").is_in(rounds)).sort("round")
    return History(rounds, returns, (*read_metrics(logged), *series))


def read_metrics(metrics: pl.DataFrame) -> list[Series]:
    """Return the metrics that may tell why a return fell."""
    series = []
    for name, (kind, words) in METRICS.items():
        if name in metrics.columns:
            sign = -1.0 if kind == "entropy" else 1.0  # the loss is its negative
            series.append(Series(kind, words, sign * metrics[name].cast(pl.Float64).fill_null(np.nan).to_numpy()))
    return series


def _summarise(records: pl.DataFrame, run: RunDirectory, ranges: dict[str, tuple[float, float]]) -> Entries:
    """Yield the numbers of a round; `ranges` are those of the observation in earlier rounds, and are extended."""
    env, config = run.config.get("env"), run.config
    for column, quantiles in (("reward", _EXTREMES), ("advantage", _EXTREMES), ("value", _INNER)):
        if column in records.columns and records[column].null_count() < len(records):
            yield from _take_quantiles(column, column, records[column].drop_nulls().to_numpy(), quantiles)
    for axis, read in read_axes(records, state_names(env, config), most=FEW).items():
        if not len(values := read[np.isfinite(read)]):
            continue
        yield from _take_quantiles("observation", axis, values, _INNER)
        low, high = float(values.min()), float(values.max())
        yield from {("", "the lowest", axis): low, ("", "the highest", axis): high}.items()
        if axis in ranges:
            before = ranges[axis]
            is_new = (values < before[0]) | (values > before[1])
            yield ("new observations", "the share outside of all earlier ones of", axis), float(is_new.mean())
            low, high = min(low, before[0]), max(high, before[1])
        ranges[axis] = low, high
    if "action" in records.columns and len(records):
        yield from _summarise_actions(records["action"].to_numpy(), action_labels(env, config) or [], config)


def _take_quantiles(kind: str, column: str, values: NDArray[Any], quantiles: Mapping[str, float]) -> Entries:
    numbers = np.quantile(values.astype(np.float64), [*quantiles.values()])
    yield from (((kind, words, column), float(number)) for words, number in zip(quantiles, numbers, strict=True))


def _summarise_actions(actions: NDArray[Any], names: Sequence[str], config: Mapping[str, Any]) -> Entries:
    """Yield the share of each discrete action, or of those at a bound."""
    space = config.get("action_space") or {}
    if actions.ndim == 1 and actions.dtype.kind in "iu":
        counts = np.bincount(actions - actions.min() if actions.min() < 0 else actions)[:FEW]
        for index, count in enumerate(counts):
            name = names[index] if index < len(names) else str(index)
            yield ("action", "the share of the action", name), float(count / len(actions))
        return
    bounds = (space.get("low", "-inf"), space.get("high", "inf"))
    low, high = (np.asarray(bound, dtype=np.float64).reshape(-1) for bound in bounds)
    flat = actions.reshape(len(actions), -1).astype(np.float64)
    yield ("action", "the share of actions at a bound", ""), float(((flat <= low) | (flat >= high)).mean())


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
