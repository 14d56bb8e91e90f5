"""Names of metrics in the logs of other libraries, and the columns of whence's `metrics` that they are."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

import polars as pl

LIBRARIES = "Stable-Baselines3, CleanRL, rsl_rl, TRL, verl and OpenRLHF"

Change: TypeAlias = Literal["x", "-x", "1 - x", "x · length"]
"""What becomes of a logged value x; `length` is the mean of the responses, in tokens."""

Names: TypeAlias = Mapping[tuple[str, Change], tuple[str, ...]]
"""Logged names, by the column that they are and the change."""

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
}
"""`episode` is the return of one episode; the mean of a hundred is `episode_return`."""

LANGUAGE_NAMES: Names = {
    ("round", "x"): ("training/global_step", "step"),
    ("reward", "x"): ("reward", "critic/score/mean"),
    ("length", "x"): ("completions/mean_length", "completion_length", "response_length/mean", "response_length"),
    ("ended_share", "1 - x"): ("completions/clipped_ratio", "response_length/clip_ratio"),
    ("kl", "x · length"): ("kl", "actor/kl_loss", "actor/reward_kl_penalty"),
    ("kl", "x"): ("objective/kl",),
    # Losses subtract what verl and OpenRLHF call entropy_loss, so it is the entropy.
    ("train/entropy_loss", "-x"): (
        "entropy",
        "policy/entropy_avg",
        "actor/entropy",
        "actor/entropy_loss",
        "entropy_loss",
    ),
    ("train/approx_kl", "x"): ("actor/ppo_kl", "ppo_kl"),
    ("train/learning_rate", "x"): ("learning_rate", "actor/lr", "actor_lr"),
}
"""In TensorBoard's files they may have `train/` in front."""


def look_up(name: str, *, is_language: bool) -> tuple[str, Change] | None:
    """Return the column that a logged name is, and its change; None: whence does not read it."""
    table, name = (LANGUAGE_NAMES, name.removeprefix("train/")) if is_language else (AGENT_NAMES, name)
    return next((key for key, names in table.items() if name in names), None)


def translate(table: pl.DataFrame, *, is_language: bool) -> tuple[pl.DataFrame, list[str]]:
    """Return a table of logged numbers in whence's columns, and the names that are not read.

    Of several names of a column the first is read; a language model's divergence and entropy, if a length is there,
    which their rules need.
    """
    keys = {name: key for name in table.columns if (key := look_up(name, is_language=is_language))}
    length = next((pl.col(name) for name, (column, _) in keys.items() if column == "length"), None)
    if is_language and length is None:
        keys = {name: key for name, key in keys.items() if key[0] not in ("kl", "train/entropy_loss")}
    chosen: dict[str, pl.Expr] = {}
    for name, (column, change) in keys.items():
        x = pl.col(name)
        chosen.setdefault(column, {"x": x, "-x": -x, "1 - x": 1 - x}.get(change, x * length).alias(column))
    return table.select(chosen.values()), [name for name in table.columns if name not in keys]
