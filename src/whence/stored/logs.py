"""Logs of a training that is over, where no run directory exists: other libraries' files, in whence's names."""

import json
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from whence.core import WhenceError, first_line
from whence.stored.log_names import LIBRARIES, look_up, translate

_EPISODES = 100
"""Episodes that a mean return is of, as in SB3's `rollout/ep_rew_mean`."""

_AXIS = 0.5 * math.log(2 * math.pi * math.e)
"""The entropy of an axis of actions whose deviation is 1, in nats."""

_STEP = "time/total_timesteps"


@dataclass(frozen=True, eq=False)
class Logs:
    """What a training logged.

    Attributes:
        metrics: a row each time something was logged, in the columns of a run's table of that name. If the deviation of
            actions is known, the entropy is that of one axis.
        is_language: whether a language model was trained, and no agent.
        axes: axes that an agent's entropy is of; 0: its actions are discrete.
        not_read: the logged names that whence does not read.
    """

    metrics: pl.DataFrame
    is_language: bool
    axes: int
    not_read: tuple[str, ...]


def read_logs(path: Path) -> Logs:
    """Read a log, or together those of one training that a folder holds, at least one; nothing in them runs.

    Raises:
        WhenceError: they are of several trainings, or have no known name; or a file is damaged.
    """
    table = pl.concat([_read_files(*each) for each in find_logs(path).items()], how="diagonal")
    keys = ([look_up(name, is_language=each) for name in table.columns] for each in (False, True))
    places = "round", "step", "train/learning_rate"  # which any training has
    agents, language = (sum(key is not None and key[0] not in places for key in each) for each in keys)
    if not agents + language:
        raise WhenceError(
            f"{path} holds {', '.join(table.columns[:8]) or 'no numbers'}: no metric of reinforcement learning that "
            f"whence reads. It reads what {LIBRARIES} log; rename yours to theirs."
        )
    metrics, not_read = translate(table, is_language=language > agents)
    if language > agents and "round" in metrics.columns:
        metrics = metrics.drop_nulls("round").with_columns(pl.col("round").cast(pl.Int64))
        return Logs(metrics, True, 0, tuple(not_read))
    metrics, axes = (metrics, 0) if language > agents else _measure_axes(_join_returns(metrics), table.columns)
    metrics = metrics.drop("round", strict=False).with_row_index("round", 1)
    return Logs(metrics, language > agents, axes, tuple(not_read))


def find_logs(path: Path) -> dict[str, list[Path]]:
    """Return the files of one training's logs, of a folder or those below it, by the pattern that their names match."""
    folders: dict[Path, dict[str, list[Path]]] = {}
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if pattern := next((each for each in _READERS if file.match(each)), None):
            folders.setdefault(file.parent, {}).setdefault(pattern, []).append(file)
    if not folders:
        return {}
    if path.is_dir() and path not in folders:
        _refuse_several(path, [*folders])
    groups = folders.get(path, folders[min(folders)])
    metrics = next((each for each in _READERS if each in groups and each not in _FURTHER), None)
    if metrics in ("*.csv", "*.jsonl"):
        _refuse_several(path, groups[metrics])
    return {each: groups[each] for each in (metrics, *_FURTHER) if each in groups}


def _refuse_several(path: Path, places: Sequence[Path]) -> None:
    if len(places) > 1:
        raise WhenceError(f"{path} holds several logs. Give that of one training: {', '.join(map(str, places[:5]))}.")


def _read_files(pattern: str, files: Sequence[Path]) -> pl.DataFrame:
    """Return numbers as columns by their logged names; what is not finite is null."""
    try:
        table = _READERS[pattern](files)
    except WhenceError:
        raise
    except (
        OSError,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        zipfile.BadZipFile,
        pl.exceptions.PolarsError,
    ) as error:
        reason = f"{files[0]} cannot be read as {pattern}: {first_line(error)}."
        raise WhenceError(f"{reason} Give the file as it was logged.") from error
    numbers = pl.all().cast(pl.Float64, strict=False)
    table = table.select(pl.when(numbers.is_finite()).then(numbers))
    return table.select(column for column in table if column.count())


def _read_csv(files: Sequence[Path]) -> pl.DataFrame:
    return pl.read_csv(files[0], infer_schema=False)


def _read_monitors(files: Sequence[Path]) -> pl.DataFrame:
    """Read episodes of SB3's environments in the order of time, with the steps of all until then."""
    tables = []
    for file in files:
        start = json.loads(file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#"))["t_start"]
        table = pl.read_csv(file, skip_rows=1, infer_schema=False).select(pl.col("r", "l", "t").cast(pl.Float64))
        tables.append(table.with_columns(pl.col("t") + start))
    return pl.concat(tables).sort("t").select("r", pl.col("l").cum_sum().alias(_STEP))


def _read_evaluations(files: Sequence[Path]) -> pl.DataFrame:
    with np.load(files[0], allow_pickle=False) as arrays:
        return pl.DataFrame({_STEP: arrays["timesteps"], "results": arrays["results"].mean(axis=1)})


def _read_json(files: Sequence[Path]) -> pl.DataFrame:
    """Read a trainer's state, or a row of metrics a line; verl has them under `data`."""
    text = files[0].read_text(encoding="utf-8")
    if files[0].match("trainer_state.json"):
        return _make_table(json.loads(text)["log_history"])
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    return _make_table([{**row, **row.get("data", {})} for row in rows])


def _read_events(files: Sequence[Path]) -> pl.DataFrame:
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise WhenceError(f"To read {files[0]}, TensorBoard is needed: pip install tensorboard.") from None
    rows, begins = dict[int, dict[str, float]](), dict[tuple[str, int], Path]()
    for file in files:
        tags = set[str]()
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                array = make_ndarray(value.tensor)
                if array.size == 1 and array.dtype.kind in "fiu":
                    rows.setdefault(event.step, {})[value.tag] = array.item()
                    if value.tag not in tags:  # a training that continues begins later
                        _refuse_several(file.parent, sorted({begins.setdefault((value.tag, event.step), file), file}))
                    tags.add(value.tag)
    return _make_table([{**rows[step], "step": step} for step in sorted(rows)])


def _make_table(rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    numbers = [{name: float(x) for name, x in row.items() if isinstance(x, int | float)} for row in rows]
    return pl.DataFrame(numbers, infer_schema_length=None)


_READERS: Mapping[str, Callable[[Sequence[Path]], pl.DataFrame]] = {
    "progress.csv": _read_csv,
    "progress.json": _read_json,
    "trainer_state.json": _read_json,
    "*tfevents*": _read_events,
    "*monitor.csv": _read_monitors,
    "evaluations.npz": _read_evaluations,
    "*.csv": _read_csv,
    "*.jsonl": _read_json,
}
"""By the names of files. In a folder the first that is there is read, since others repeat it, and `_FURTHER`."""

_FURTHER = ("*monitor.csv", "evaluations.npz")
LOG_FILES = tuple(_READERS)


def _join_returns(metrics: pl.DataFrame) -> pl.DataFrame:
    """Return an agent's metrics in the order of steps, with the returns of episodes as a mean at each round."""
    metrics = metrics if "step" in metrics.columns else metrics.with_row_index("step").cast(pl.Float64)
    metrics = metrics.drop_nulls("step").sort("step", maintain_order=True)
    if {"train/approx_kl", "train/n_updates", "round"} <= {*metrics.columns}:
        rows = metrics.select("train/n_updates", "round").drop_nulls().to_numpy()
        if len(rows) > 1 and np.ptp(rows[:, 0]) <= np.ptp(rows[:, 1]):
            # SB3 measures divergence before each step, so in rounds of one epoch it is that of an earlier policy.
            metrics = metrics.drop("train/approx_kl")
    if "episode" not in metrics.columns or "episode_return" in metrics.columns:
        return metrics.drop("episode", strict=False)
    episodes = metrics.select("step", pl.col("episode").alias("episode_return")).drop_nulls()
    episodes = episodes.with_columns(pl.col("episode_return").rolling_mean(_EPISODES, min_samples=1))
    rounds = metrics.drop("episode").filter(pl.any_horizontal(pl.exclude("step", "episode").is_not_null()))
    return rounds.join_asof(episodes, on="step") if len(rounds) else episodes


def _measure_axes(metrics: pl.DataFrame, names: Sequence[str]) -> tuple[pl.DataFrame, int]:
    """Return metrics with the entropy of one axis if actions have a deviation, and the axes that the entropy is of.

    SB3 logs a deviation if actions have one. In other logs without it they may be discrete, and count as axes of
    deviation 1 at first: as such they lose less of their entropy.
    """
    if "train/std" in metrics.columns:
        return metrics.with_columns((-_AXIS - pl.col("train/std").log()).alias("train/entropy_loss")), 1
    if "train/entropy_loss" not in metrics.columns or "train/entropy_loss" in names:
        return metrics, 0
    first = -metrics["train/entropy_loss"].drop_nulls()[0]
    return metrics, max(1, math.ceil(first / _AXIS - 0.05))
