"""Models of Stable-Baselines3's that cannot be scored: their environments are recorded, and what the critic says."""

import logging
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper, VecNormalize

from whence.core import eval_mode, preserve_rng_state, read_observations, to_numpy
from whence.sb3.episodes import digest_code, iterate_vec_wrappers
from whence.sb3.models import describe_model, read_names
from whence.sb3.recorded_envs import WatchedVecEnv
from whence.sb3.recording import Recording
from whence.sb3.round_result import read_train_metrics

log = logging.getLogger("whence")

_RECORDS = 2048  # records of a round, unless rollouts are shorter and the model trains on them alone

_LAMBDA = 0.95  # of the returns that a critic is compared with: SB3's `gae_lambda` of PPO


def warn_of_no_scores(model: Any, reason: str, logged: set[str]) -> None:
    """Log once that a training is recorded without scores, and why."""
    if "scores" not in logged:
        logged.add("scores")
        log.warning(
            "This training is recorded without scores, which are of PPO, A2C, MaskablePPO and RecurrentPPO alone. %s.",
            reason.partition(". ")[0].rstrip("."),
        )


def record_model(
    model: Any, run: Path, reason: str, *, names: Any, factory: str | None, overwrite: bool
) -> WatchedVecEnv:
    """Record the environments of a model that cannot be scored, as `learn()` begins, inside of their wrappers."""
    warn_of_no_scores(model, reason, set())
    env, base = model.env, model.env.unwrapped
    config = {key: value for key, value in describe_model(model).items() if not key.endswith("_space")}
    names = read_names(model, names or {})
    config |= {**({"names": names} if names else {}), "policy": None}
    config |= {} if factory is None else {"env": factory, "env_kwargs": {}}
    spaces, length = (base.observation_space, base.action_space), 16 * _RECORDS  # also in a learn() without a callback
    options: Any = {"overwrite": overwrite, "complete": partial(add_values, model), "code": digest_code(env)}
    recording = Recording(run, config, spaces=spaces, count=env.num_envs, length=length, **options)
    recorded = WatchedVecEnv(base, recording)
    recorded.begin(_read_observation(model, [*iterate_vec_wrappers(env)]))
    return recorded


def _read_observation(model: Any, wrappers: list[VecEnvWrapper]) -> Any:
    """Return what the environments show at present; None if that is not known."""
    base = model.env.unwrapped
    if isinstance(base, DummyVecEnv):
        return base._obs_from_buf()
    if all(isinstance(each, VecNormalize) for each in wrappers):
        return model._last_obs if not wrappers else wrappers[-1].old_obs
    return None


def end_round_if_due(model: Any, recorded: WatchedVecEnv) -> None:
    """End a round if enough was recorded, with what the last training logged."""
    steps = 0 if isinstance(model, OffPolicyAlgorithm) else getattr(model, "n_steps", 0)
    if recorded.recording.size >= min(_RECORDS, (steps or _RECORDS) * model.n_envs):
        recorded.recording.end_round(read_train_metrics(model.logger))


def stop_recording(model: Any, recorded: WatchedVecEnv) -> None:
    """Write what is left with what the last training logged, and give the environments back as they were."""
    recorded.recording.end_round(read_train_metrics(model.logger))
    recorded.stop()


def add_values(model: Any, table: pl.DataFrame) -> pl.DataFrame:
    """Return a round's table with the critic's `value` of what was seen and done, and the `return` as of PPO.

    The critic is that of the round's end. A model without a critic of actions, or with observations that are not
    stored or that wrappers stack, gets neither.
    """
    normaliser = model.get_vec_normalize_env()
    if not all(isinstance(each, VecNormalize) for each in iterate_vec_wrappers(model.env)):
        return table
    values = None
    with suppress(Exception), torch.no_grad(), eval_mode(model.policy.modules()), preserve_rng_state():
        observations = read_observations(table, model.observation_space, "observation")
        if normaliser is not None:
            observations = normaliser.normalize_obs(observations)
        tensors, _ = model.policy.obs_to_tensor(observations)
        values = _ask_critic(model, tensors, np.asarray(table["action"].to_numpy()))
    if values is None or len(values) != len(table) or not np.isfinite(values).all():
        return table
    rewards = table["reward"].to_numpy().astype(np.float64)
    if normaliser is not None and normaliser.norm_reward:
        rewards = normaliser.normalize_reward(rewards)
    returns = _compute_returns(table, rewards, values, model.gamma)
    return table.with_columns(
        pl.Series("value", values.astype(np.float32)), pl.Series("return", returns.astype(np.float32))
    )


def _ask_critic(model: Any, tensors: Any, actions: NDArray[Any]) -> NDArray[np.float64] | None:
    """Return the value of each action; None: the model has no such critic."""
    network = getattr(model.policy, "q_net", None) or getattr(model.policy, "quantile_net", None)
    if network is not None:
        values = network(tensors)
        values = values.mean(dim=1) if values.ndim > 2 else values  # of quantiles
        return np.asarray(to_numpy(values)[np.arange(len(values)), actions.astype(int)], np.float64)
    if (critic := getattr(model, "critic", None)) is None:
        return None
    scaled = model.policy.scale_action(actions.reshape(len(actions), *model.action_space.shape))
    values = critic(tensors, torch.as_tensor(scaled, dtype=torch.float32, device=model.device))
    parts = [each.reshape(len(actions), -1).mean(dim=1) for each in (values if isinstance(values, tuple) else [values])]
    return np.asarray(to_numpy(torch.stack(parts).min(dim=0).values), np.float64)


def _compute_returns(
    table: pl.DataFrame, rewards: NDArray[np.float64], values: NDArray[np.float64], gamma: float
) -> NDArray[np.float64]:
    """Return the λ-return of each record, by the values of the actions that were taken next.

    Where an episode is cut, or continues in the next round, the last value stands for what would follow.
    """
    ends = table["end"].fill_null("").to_numpy()
    episodes = table["episode_id"].fill_null(-1).to_numpy()
    returns = np.zeros(len(table))
    for at in reversed(range(len(table))):
        if at + 1 < len(table) and episodes[at + 1] == episodes[at] and not ends[at]:
            following = (1 - _LAMBDA) * values[at + 1] + _LAMBDA * returns[at + 1]
        else:
            following = 0.0 if ends[at] == "terminated" else values[at]
        returns[at] = rewards[at] + gamma * following
    return returns
