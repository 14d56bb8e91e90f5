"""Logs of a training that is over, where no run directory exists: other libraries' files, in whence's names."""

import fnmatch
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import polars as pl

from whence.core import WhenceError, explain_damage

log = logging.getLogger("whence")

Names: TypeAlias = Mapping[tuple[str, Literal["x", "-x", "1 - x", "x · length"]], tuple[str, ...]]
"""Logged names, by the column of a run's metrics that they are, and what becomes of a logged x."""

AGENT_NAMES: Names = {
    ("step", "x"): ("time/total_timesteps", "timesteps", "global_step", "step"),
    ("round", "x"): ("time/iterations",),
    ("episode_return", "x"): ("rollout/ep_rew_mean", "Train/mean_reward"),
    ("episode", "x"): ("r", "charts/episodic_return"),
    ("test_return", "x"): ("results", "eval/mean_reward"),
    ("train/approx_kl", "x"): ("train/approx_kl", "losses/approx_kl"),
    ("train/entropy_loss", "x"): ("train/entropy_loss",),
    ("train/entropy_loss", "-x"): ("losses/entropy", "Loss/entropy"),
    ("train/std", "x"): ("train/std", "Policy/mean_noise_std", "Policy/mean_std"),
    ("train/learning_rate", "x"): ("train/learning_rate", "charts/learning_rate", "Loss/learning_rate"),
    ("train/n_updates", "x"): ("train/n_updates",),
    ("train/clip_fraction", "x"): ("train/clip_fraction", "losses/clipfrac"),
    ("train/clip_range", "x"): ("train/clip_range",),
    ("train/explained_variance", "x"): ("train/explained_variance", "losses/explained_variance"),
    ("train/value_loss", "x"): ("train/value_loss", "losses/value_loss", "Loss/value_function", "Loss/value"),
}
"""Of Stable-Baselines3, CleanRL and rsl_rl. Returns of single episodes become a mean of the last hundred."""

LANGUAGE_NAMES: Names = {
    ("round", "x"): ("training/global_step", "step"),
    ("reward", "x"): ("reward", "critic/score/mean"),
    ("test_return", "x"): ("eval_reward", "eval/reward", "val-core/*", "val/test_score/*"),
    ("length", "x"): ("completions/mean_length", "completion_length", "response_length/mean", "response_length"),
    ("ended_share", "1 - x"): ("completions/clipped_ratio", "response_length/clip_ratio"),
    ("equal_groups", "x"): ("frac_reward_zero_std",),
    # A divergence of the sampler from the trainer is at most the mean |difference| of their log-probs.
    ("sampler_difference", "x"): ("sampling/sampling_logp_difference/mean", "rollout_corr/kl"),
    ("kl", "x · length"): ("kl", "actor/kl_loss", "actor/reward_kl_penalty"),
    # What verl and OpenRLHF call entropy_loss is the entropy: their losses subtract it.
    ("train/entropy_loss", "-x"): ("entropy", "actor/entropy", "actor/entropy_loss", "entropy_loss"),
    ("train/approx_kl", "x"): ("actor/ppo_kl", "ppo_kl"),
    ("train/learning_rate", "x"): ("learning_rate", "actor/lr", "actor_lr"),
}
"""Of TRL, verl and OpenRLHF, whose TensorBoard files may have `train/` in front of them; `*` is any text."""

_TRAINERS = {"TRL": "completion*", "verl": "critic/*", "OpenRLHF": "response_length"}
"""What a trainer of language models logs, and no other does."""

_STEPS = (*AGENT_NAMES["step", "x"], *LANGUAGE_NAMES["round", "x"])

_MOST_STEPS = 2**53
"""Beyond this, floats are no longer all whole numbers."""

_AXIS = 0.5 * math.log(2 * math.pi * math.e)
"""The entropy of an axis of actions whose deviation is 1, in nats."""


@dataclass(frozen=True, eq=False)
class Logs:
    """What a training logged.

    Attributes:
        metrics: a row each time something was logged, in the columns of a run's table of that name.
        is_language: whether a language model was trained, and no agent.
        axes: axes of actions that the entropy is of; 0: they are discrete.
        not_read: the logged names that whence does not read.
        trainer: of a language model, "TRL", "verl" or "OpenRLHF"; empty: it is not known.
    """

    metrics: pl.DataFrame
    is_language: bool
    axes: int
    not_read: tuple[str, ...]
    trainer: str = ""


def read_logs(path: Path) -> Logs:
    """Read a log, or together those of one training that a folder holds; nothing in them runs."""
    table = pl.concat([_read_files(*each) for each in find_logs(path).items()], how="diagonal")
    agent, language = (_translate(table, known) for known in (AGENT_NAMES, LANGUAGE_NAMES))
    # What any training logs tells nothing of its kind.
    counts = [len({*metrics.columns} - {"round", "step", "train/learning_rate"}) for metrics, _ in (agent, language)]
    if not any(counts):
        came = ", ".join(table.columns[:8]) or "no numbers"
        raise WhenceError(
            f"{path} holds {came}: no metric that whence reads. docs/reference/files.md says which names it reads."
        )
    is_language, axes = counts[1] > counts[0], 0
    metrics, not_read = language if is_language else agent
    if not is_language:
        metrics, axes = _measure_axes(_join_returns(metrics), is_sb3="train/entropy_loss" in table.columns)
    if not is_language or "round" not in metrics.columns:
        metrics = metrics.drop("round", strict=False).with_row_index("round", 1)
    metrics = metrics.cast({"round": pl.Int64}, strict=False).drop_nulls("round")
    if not is_language:
        return Logs(metrics, False, axes, tuple(not_read))
    metrics = metrics.group_by("round", maintain_order=True).agg(pl.all().drop_nulls().last())
    names = [name.removeprefix("train/") for name in table.columns]
    trainer = next((each for each, pattern in _TRAINERS.items() if fnmatch.filter(names, pattern)), "")
    return Logs(metrics, is_language, axes, tuple(not_read), trainer)


def _translate(table: pl.DataFrame, known: Names) -> tuple[pl.DataFrame, list[str]]:
    """Return logged numbers in whence's columns, of several names of one the first; and the names that are not read."""
    prefix = "train/" if known is LANGUAGE_NAMES else ""
    logged = {
        name: key
        for name in table.columns
        for key, names in known.items()
        if any(fnmatch.fnmatchcase(name.removeprefix(prefix), each) for each in names)
    }
    length = next((pl.col(name) for name, (column, _) in logged.items() if column == "length"), None)
    if known is LANGUAGE_NAMES and length is None:  # which rules on these need
        logged = {name: key for name, key in logged.items() if key[0] not in ("kl", "train/entropy_loss")}
    columns: dict[str, pl.Expr] = {}
    for name, (column, change) in logged.items():
        x = pl.col(name)
        columns.setdefault(column, {"x": x, "-x": -x, "1 - x": 1 - x}.get(change, x * length).alias(column))
    return table.select(columns.values()), [name for name in table.columns if name not in logged]


def find_logs(path: Path) -> dict[str, list[Path]]:
    """Return a training's logs in a folder, or else in one below it, by the patterns of their names."""
    folders: dict[Path, dict[str, list[Path]]] = {}
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if pattern := next((each for each in _READERS if file.match(each)), None):
            folders.setdefault(file.parent, {}).setdefault(pattern, []).append(file)
    if path.is_dir() and path not in folders:
        _refuse_several(path, [*folders])
    groups = folders.get(path) or next(iter(folders.values()), {})
    metrics = next((pattern for pattern in _READERS if pattern in groups and pattern not in _FURTHER), "")
    _refuse_several(path, groups.get(metrics, []))
    return {pattern: groups[pattern] for pattern in (metrics, *_FURTHER) if pattern in groups}


def _refuse_several(path: Path, places: Sequence[Path]) -> None:
    if len(places) > 1:
        raise WhenceError(f"{path} holds several logs. Give that of one training: {', '.join(map(str, places[:5]))}.")


def _read_files(pattern: str, files: Sequence[Path]) -> pl.DataFrame:
    """Return numbers as columns by their logged names; what is not finite is null."""
    with explain_damage(files[0], pattern, "tensorboard", "Give the file as it was logged."):
        table = _READERS[pattern](files)
    numbers = pl.all().cast(pl.Float64, strict=False)
    table = table.select(pl.when(numbers.is_finite()).then(numbers))
    return _drop_repeated_steps(table.select(column for column in table if column.count()), files[0])


def _drop_repeated_steps(table: pl.DataFrame, file: Path) -> pl.DataFrame:
    """Return rows without those whose steps are logged again after them, as by a second training in the same file."""
    name = next((name for name in _STEPS if name in table.columns), None)
    if name is None:
        return table
    steps = pl.col(name)
    table = table.with_columns(pl.when(steps.is_between(0, _MOST_STEPS)).then(steps))
    steps = steps.forward_fill()
    starts = pl.when(steps.diff() < 0).then(steps)  # of a part that begins anew
    next_start = starts.cum_min(reverse=True).backward_fill().shift(-1)
    rest = table.filter((steps < next_start).fill_null(True))
    if dropped := len(table) - len(rest):
        log.warning("%s: steps begin anew, and the first %d rows of the same steps are left out.", file, dropped)
    return rest


def _read_monitors(files: Sequence[Path]) -> pl.DataFrame:
    """Read episodes of SB3's environments in the order of time, with the steps of all until then."""
    table = pl.concat([pl.read_csv(file, skip_rows=1, infer_schema=False) for file in files], how="diagonal")
    table = table.select(pl.col("r", "l", "t").cast(pl.Float64)).sort("t")
    return table.select("r", pl.col("l").cum_sum().alias("time/total_timesteps"))


def _read_evaluations(files: Sequence[Path]) -> pl.DataFrame:
    with np.load(files[0], allow_pickle=False) as arrays:
        return pl.DataFrame({"time/total_timesteps": arrays["timesteps"], "results": arrays["results"].mean(axis=1)})


def _read_json(files: Sequence[Path]) -> pl.DataFrame:
    """Read a trainer's state, or a row of metrics a line; verl has them under `data`."""
    text = files[0].read_text(encoding="utf-8")
    if files[0].name == "trainer_state.json":
        return _make_table(json.loads(text)["log_history"])
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    parts = [(row, row.get("data")) for row in rows]
    return _make_table([row | data if isinstance(data, dict) else row for row, data in parts])


def _read_events(files: Sequence[Path]) -> pl.DataFrame:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    series: dict[str, dict[int, float]] = {}
    for event in EventFileLoader(str(files[0])).Load():
        for value in event.summary.value:
            array = make_ndarray(value.tensor)
            if array.size == 1 and array.dtype.kind in "fiu":
                values = series.setdefault(value.tag, {})
                if values and event.step < next(reversed(values)):  # as `_drop_repeated_steps` does
                    values = series[value.tag] = {step: x for step, x in values.items() if step < event.step}
                values[event.step] = array.item()
    steps = sorted({step for values in series.values() for step in values})
    return _make_table([{"step": at, **{tag: x[at] for tag, x in series.items() if at in x}} for at in steps])


def _make_table(rows: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    numbers = [{name: float(x) for name, x in row.items() if isinstance(x, int | float)} for row in rows]
    return pl.DataFrame(numbers, infer_schema_length=None)


_READERS: Mapping[str, Callable[[Sequence[Path]], pl.DataFrame]] = {
    "progress.csv": lambda files: pl.read_csv(files[0], infer_schema=False),
    "trainer_state.json": _read_json,
    "*tfevents*": _read_events,
    "*monitor.csv": _read_monitors,
    "evaluations.npz": _read_evaluations,
    "*.csv": lambda files: pl.read_csv(files[0], infer_schema=False),
    "*.jsonl": _read_json,
}
_FURTHER = ("*monitor.csv", "evaluations.npz")
"""What is read with the first of the others that a folder has: these repeat each other, or are no logs."""

LOG_FILES = tuple(_READERS)


def _join_returns(metrics: pl.DataFrame) -> pl.DataFrame:
    """Return an agent's metrics in the order of steps, with the mean of the last hundred episodes at each round."""
    metrics = metrics if "step" in metrics.columns else metrics.with_row_index("step").cast(pl.Float64)
    metrics = metrics.drop_nulls("step").sort("step", maintain_order=True)
    most = [
        np.nanmax(metrics[name].to_numpy(), initial=0)
        for name in ("train/n_updates", "round")
        if name in metrics.columns
    ]
    if len(most) == 2 and most[0] <= most[1]:  # one epoch a round: SB3 measures divergence before each step
        metrics = metrics.drop("train/approx_kl", strict=False)
    if "episode" not in metrics.columns or "episode_return" in metrics.columns:
        return metrics
    episodes = metrics.select("step", pl.col("episode").alias("episode_return")).drop_nulls()
    episodes = episodes.with_columns(pl.col("episode_return").rolling_mean(100, min_samples=1))
    rounds = metrics.filter(pl.any_horizontal(pl.exclude("step", "episode").is_not_null()))
    return rounds.join_asof(episodes, on="step") if len(rounds) else episodes


def _measure_axes(metrics: pl.DataFrame, *, is_sb3: bool) -> tuple[pl.DataFrame, int]:
    """Return metrics with the entropy of one axis if actions have a deviation, and the axes that the entropy is of.

    Unlike SB3, CleanRL does not log it: actions are continuous if their entropy begins as that of axes whose deviation
    is 1, or falls below 0.
    """
    name = "train/entropy_loss"
    if "train/std" in metrics.columns:
        std = pl.col("train/std")
        return metrics.with_columns(pl.when(std > 0).then(-_AXIS - std.log()).alias(name)), 1
    if is_sb3 or name not in metrics.columns or not metrics[name].count():
        return metrics, 0
    entropy = -metrics[name].drop_nulls().to_numpy()
    axes = max(1, round(entropy[0] / _AXIS))
    return metrics, axes if entropy.min() < 0 or abs(entropy[0] / axes - _AXIS) < 0.1 else 0
