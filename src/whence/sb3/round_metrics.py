"""A round's row of metrics: what was selected, what the logger shows of it, and what `train()` logged."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.logger import Logger

from whence.sb3.episodes import mean_episode_return
from whence.sb3.results import Choice
from whence.tables import summarise_selection

_LOGGED = ("dropped_share", "negative_share", "mean")


def measure_choice(model: BaseAlgorithm, number: int, choice: Choice, *, is_flat: bool) -> dict[str, Any]:
    """Return a round's metrics before it trains.

    Args:
        model: the model, after the rollout.
        number: the round's number, from 1.
        choice: the round's scores and selection.
        is_flat: whether the round gave every action the same reward.
    """
    summary = summarise_selection(choice.selection, choice.influence)
    return {
        "round": number,
        "timestep": model.num_timesteps,
        **summary,
        "episode_return": mean_episode_return(model),
        "skipped": summary["kept"] < 2,
        "flat": is_flat,
        **choice.metrics,
    }


def log_choice(
    logger: Logger, metrics: Mapping[str, Any], more: Collection[str], *, seconds: float, skipped_rounds: int
) -> None:
    """Record a round's metrics under `influence/`.

    Args:
        logger: the model's logger.
        metrics: the round's metrics.
        more: names of those to record besides the usual ones.
        seconds: how long scoring took.
        skipped_rounds: how many rounds were skipped so far.
    """
    for name in (*_LOGGED, *more):
        if metrics.get(name) is not None:
            logger.record(f"influence/{name}", float(metrics[name]))
    logger.record("influence/seconds", seconds)
    logger.record("influence/skipped_rounds", skipped_rounds)


def read_train_metrics(logger: Logger) -> dict[str, float]:
    """Return what `train()` logged, by name, where it is a number; a user may log texts and figures, too."""
    numbers = {}
    for name, value in logger.name_to_value.items():
        if name.startswith("train/") and not isinstance(value, str):
            with suppress(TypeError, ValueError):
                numbers[name] = float(value)
    return numbers
