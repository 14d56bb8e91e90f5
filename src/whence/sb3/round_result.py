"""A round as the callback sees it: what was chosen, what happened, its row of metrics, and what a run stores of it."""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.logger import Logger
from torch import Tensor

from whence.core import Objective, RecordBatch, Target, WhenceError, target_name
from whence.engines import ENGINES
from whence.runs import RunRecorder
from whence.sb3.episodes import MOST_INFOS, ResetTracker
from whence.sb3.models import named_tensors
from whence.sb3.rounds import EnvironmentSteps, model_objective, note_rewards, wrap_next
from whence.scores import Influence, NoMean, add_errors, usable_folds
from whence.selection import Selection, summarise_selection

log = logging.getLogger("whence")


@dataclass(frozen=True)
class RoundResult:
    """What happened in one round; `InfluenceCallback.round` holds the last one's.

    Attributes:
        number: the round's number, from 1.
        records: the rollout.
        influence: the rollout's scores; None if nothing was scored.
        selection: the records that trained.
    """

    number: int
    records: RecordBatch
    influence: Influence | None
    selection: Selection


@dataclass(frozen=True)
class Choice:
    """What `InfluenceCallback.choose` returns.

    Attributes:
        influence: scores of the rollout; None: nothing was scored.
        selection: the records to train on.
        metrics: further columns of the round's metrics; numbers also go to the model's logger, as `influence/NAME`.

    Example: keep the better half by advantage.
        ```
        class BetterHalf(InfluenceCallback):
            def choose(self, records):
                keep = records.advantages >= records.advantages.median()
                return Choice(None, Selection.dropping(keep, "advantage below the median"))
        ```
    """

    influence: Influence | None
    selection: Selection
    metrics: Mapping[str, float | bool | None] = field(default_factory=dict)


def check_selection(selection: object, records: RecordBatch, source: str, *, strict: bool = False) -> None:
    """Refuse what is no selection with one entry per record, or, if strict, one that keeps fewer than two.

    `source` names the call that returned it.
    """
    if not isinstance(selection, Selection) or len(selection.keep) != len(records):
        received = f"{len(selection.keep)} records" if isinstance(selection, Selection) else repr(selection)
        raise WhenceError(
            f"{source} returned a selection of {received} for a rollout of {len(records)}; it must return a "
            "whence.Selection with one entry per record."
        )
    if strict and not can_train(selection):
        raise WhenceError(
            f"{source} keeps {int(selection.keep.sum())} of {len(records)} records, and training needs two. Drop less, "
            "or pass strict=False to skip such rounds."
        )


def can_train(selection: Selection) -> bool:
    """Return whether a selection keeps two records, which advantages are normalised over; or all, if there is one."""
    return int(selection.keep.sum()) >= min(2, len(selection.keep))


_LOGGED = ("dropped_share", "negative_share", "mean")


def measure_choice(model: BaseAlgorithm, number: int, choice: Choice, steps: EnvironmentSteps) -> dict[str, Any]:
    """Return a round's metrics before it trains, and log those of the choice under `influence/`."""
    returns = [float(episode["r"]) for episode in model.ep_info_buffer or ()]
    metrics = {
        **{"round": number, "timestep": model.num_timesteps},
        **summarise_selection(choice.selection, choice.influence),
        # SB3's running mean over the last hundred episodes, unshaped; a Monitor notes them.
        "episode_return": float(np.mean(returns)) if returns else None,
        **{"skipped": not can_train(choice.selection), "flat": steps.is_flat},
        **({} if steps.reward_scale is None else {"reward_scale": steps.reward_scale}),
        **choice.metrics,
    }
    for name in (*_LOGGED, *choice.metrics):
        if metrics.get(name) is not None:
            model.logger.record(f"influence/{name}", float(metrics[name]))
    return metrics


def read_train_metrics(logger: Logger) -> dict[str, float]:
    """Return what `train()` logged, by name, where it is a number; a user may log texts and figures, too."""
    numbers = {}
    for name, value in logger.name_to_value.items():
        if name.startswith("train/") and not isinstance(value, str):
            with suppress(TypeError, ValueError):
                numbers[name] = float(value)
    return numbers


def estimate_errors(
    model: Any,
    influence: Influence | None,
    records: RecordBatch,
    target: Target,
    folds: int,
    logged: set[str],
    *,
    objective: Objective | None,
    engine: str,
    memory: int | None,
) -> Influence | None:
    """Return snapshot scores of a rollout with errors over folds of its episodes; unchanged where there can be none.

    A target that is no mean over records has none, which is logged once, and noted in `logged`.
    """
    if influence is None or influence.errors is not None or "errors" in logged:
        return influence
    usable = usable_folds(target, records, folds)
    is_snapshot = influence.provenance.target == target_name(target) and influence.engine in ENGINES
    if usable is None or not is_snapshot or len(influence) != len(records):
        return influence
    settings: Any = {"objective": objective or model_objective(model), "engine": engine, "memory": memory}
    try:
        return add_errors(influence, model.policy, records, target=target, folds=usable, **settings)
    except NoMean as reason:
        logged.add("errors")
        log.warning("Scores are written without errors. %s", reason)
        return influence


def read_settings(model: Any) -> dict[str, Any]:
    """Return the settings that advice reads."""
    names = ("n_epochs", "batch_size", "n_steps", "gamma", "learning_rate")
    return {"hyperparameters": {name: getattr(model, name, None) for name in names}, "n_envs": model.n_envs}


_LEFT_OUT = (
    "The environments' infos hold numbers that this run does not store: %s. A round stores up to %d keys that are "
    "texts, with one number each."
)


def write_round(
    recorder: RunRecorder,
    tracker: ResetTracker | None,
    model: Any,
    number: int,
    table: pl.DataFrame,
    steps: EnvironmentSteps,
    lstm_states: Mapping[str, Tensor],
    logged: set[str],
) -> None:
    """Write a round before its training.

    Args:
        recorder: the run's recorder.
        tracker: what followed the environments.
        model: the model that collected it.
        number: the round's number, from 1.
        table: the buffer's records, to which are added what the environments returned and digests of observations.
        steps: what the environments returned.
        lstm_states: a recurrent policy's states before the first step, see `History`; empty if there are none.
        logged: what was logged before, to which is added what is logged of this round.
    """
    assert tracker is not None
    records = steps.add_columns(table)
    if left_out := {f"info {key!r}" for key in steps.infos.left_out} - logged:
        logged |= left_out
        names = ", ".join(name.removeprefix("info ") for name in sorted(left_out))
        log.warning(_LEFT_OUT, names, MOST_INFOS)
    digests = pl.Series("observation_digest", tracker.take_digests(), dtype=pl.UInt64)
    if digests.count():
        records = records.with_columns(digests)
    episodes = records.filter("episode_start").select("episode_id", "env_index")
    states = [tracker.take_state(env) for env in episodes["env_index"]]
    episodes = episodes.with_columns(pl.Series("generator_state", states, dtype=pl.String))
    tensors: Any = {"policies": named_tensors(model.policy), "statistics": steps.statistics, "states": lstm_states}
    recorder.write_round(number, records, tables={"episodes": episodes}, tensors=tensors)


def record_next_rollout(model: Any, tracker: ResetTracker | None) -> None:
    """Let environments note their rewards and, with a tracker, how episodes begin, during the next rollout alone."""

    def record(collect: Callable[[], bool]) -> bool:
        with note_rewards(model.env), nullcontext() if tracker is None else tracker.wrapped():
            return collect()

    wrap_next(model, "collect_rollouts", record)
