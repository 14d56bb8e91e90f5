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

from whence.core import named_tensors
from whence.runs import RunRecorder
from whence.sb3.episodes import ResetTracker, warn_of_infos
from whence.sb3.rounds import EnvironmentSteps, note_rewards, wrap_next
from whence.scores import Influence
from whence.selection import RoundResult as RoundResult
from whence.selection import Selection, add_selection, can_train, summarise_selection

log = logging.getLogger("whence")


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


def read_settings(model: Any) -> dict[str, Any]:
    """Return the settings that advice reads."""
    names = ("n_epochs", "batch_size", "n_steps", "gamma", "learning_rate")
    return {"hyperparameters": {name: getattr(model, name, None) for name in names}, "n_envs": model.n_envs}


def write_round(
    recorder: RunRecorder,
    tracker: ResetTracker | None,
    model: Any,
    round: RoundResult,
    steps: EnvironmentSteps,
    logged: set[str],
) -> None:
    """Write a round before its training: its records, and what the environments returned.

    `logged` is what was logged before, to which is added what is logged of this round.
    """
    assert tracker is not None
    table = add_selection(round.records.to_polars(observations=True), round.selection, round.influence)
    records = steps.add_columns(table)
    warn_of_infos(steps.infos.left_out, logged)
    digests = pl.Series("observation_digest", tracker.take_digests(), dtype=pl.UInt64)
    if digests.count():
        records = records.with_columns(digests)
    episodes = pl.DataFrame([records[name].filter(records["episode_start"]) for name in ("episode_id", "env_index")])
    noted = [tracker.take_state(env) for env in episodes["env_index"]]
    episodes = episodes.with_columns(pl.Series("generator_state", noted, dtype=pl.String))
    states = getattr(round.records.history, "states", {})  # a recurrent policy's before the first step
    tensors: Any = {"policies": named_tensors(model.policy), "statistics": steps.statistics, "states": states}
    recorder.write_round(round.number, records, tables={"episodes": episodes}, tensors=tensors)


def record_next_rollout(model: Any, tracker: ResetTracker | None) -> None:
    """Let environments note their rewards and, with a tracker, how episodes begin, during the next rollout alone."""

    def record(collect: Callable[[], bool]) -> bool:
        with note_rewards(model.env), nullcontext() if tracker is None else tracker.wrapped():
            return collect()

    wrap_next(model, "collect_rollouts", record)
