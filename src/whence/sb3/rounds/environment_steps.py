"""A rollout as its environments returned it: rewards in their own units, time limits' bootstraps, numbers in infos."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from whence.core import add_observations, named_leaves

MOST_INFOS = 32
"""How many numbers of the user's `infos` a round's table holds."""

_NUMBERS = bool, int, float, np.bool_, np.integer, np.floating
_OTHERS = "TimeLimit.", "episode", "terminal_observation", "final_", "whence_", "_"
"""How the keys of infos begin that are SB3's, Gymnasium's or whence's."""


class EnvironmentSteps:
    """The steps of a rollout, followed while it is collected.

    SB3's buffer holds something else: rewards that VecNormalize has scaled, and to which SB3 has added the value of the
    last state where a time limit cut an episode; and normalised observations.

    Args:
        model: the model whose rollout begins.
    """

    def __init__(self, model: Any) -> None:
        self._normalised: VecNormalize | None = model.get_vec_normalize_env()
        self._scaled: list[NDArray[Any]] = []
        self._rewards = self._scaled if self._normalised is None else []
        self._dones: list[NDArray[np.bool_]] = []
        self._limits: list[tuple[int, int]] = []
        self._infos: list[list[dict[str, Any]]] = []
        self._observations: list[dict[str, NDArray[Any]]] = []
        self._note_observation()

    def add(
        self,
        rewards: NDArray[Any],
        dones: NDArray[np.bool_],
        ended: NDArray[np.int64],
        infos: Sequence[Mapping[str, Any]],
    ) -> None:
        """Read what the environments returned for a step; `ended` are the indices of those that are done."""
        self._limits += [(len(self._dones), env) for env in ended if infos[env].get("TimeLimit.truncated")]
        # SB3 adds the bootstrap to these rewards in place, after its callbacks.
        self._scaled.append(rewards.copy())
        if self._normalised is not None:
            self._rewards.append(self._normalised.old_reward.copy())
        self._dones.append(dones.copy())
        self._infos.append([_select_numbers(info) for info in infos])
        self._note_observation()

    def _note_observation(self) -> None:
        if self._normalised is not None and self._normalised.norm_obs:
            leaves = named_leaves(self._normalised.old_obs, "raw_observation")
            self._observations.append({name: np.array(leaf) for name, leaf in leaves})

    @property
    def is_flat(self) -> bool:
        """Whether the rewards say nothing about the actions, so that advantages rest on the values alone.

        They say something if two of them differ, or if an episode terminated and rewards are not 0, so that a longer
        one earns another sum.
        """
        rewards = _flatten(self._rewards)
        is_same = bool((rewards == rewards[0]).all())
        return is_same and (rewards[0] == 0 or not (_flatten(self._dones) & ~self._find_truncated()).any())

    def _find_truncated(self) -> NDArray[np.bool_]:
        truncated = np.zeros((len(self._dones[0]), len(self._dones)), bool)
        for step, env in self._limits:
            truncated[env, step] = True
        return truncated.reshape(-1)

    @property
    def reward_scale(self) -> float | None:
        """What VecNormalize divides rewards by at present; None if it does not."""
        env = self._normalised
        return float(np.sqrt(env.ret_rms.var + env.epsilon)) if env is not None and env.norm_reward else None

    @property
    def statistics(self) -> dict[str, Tensor]:
        """VecNormalize's statistics at present, as `load_statistics` takes them; empty if there is none."""
        return {
            f"{name}/{field}": torch.tensor(getattr(each, field), dtype=torch.float64)
            for name, each in _list_statistics(self._normalised).items()
            for field in ("mean", "var", "count")
        }

    def add_columns(self, table: pl.DataFrame) -> pl.DataFrame:
        """Return a round's table, of the buffer's records in their order, with what the environments returned.

        `reward` becomes the environments' own. What trained is in `trained_reward` if some differ. `bootstrap` is what
        SB3 added where a time limit cut an episode, if one did: the last state's discounted value. `end` is
        "terminated" or "truncated" at an episode's last record. `raw_observation`, or `raw_observation.KEY`, are those
        that VecNormalize read. `info.KEY` are the numbers in infos.
        """
        rewards, scaled = (_flatten(each).astype(np.float32) for each in (self._rewards, self._scaled))
        truncated = self._find_truncated()
        ends = pl.Series("end", [None, "terminated", "truncated"], dtype=pl.String)
        columns = [pl.Series("reward", rewards), ends.gather(_flatten(self._dones).astype(np.int8) + truncated)]
        trained = table["reward"].to_numpy()
        if (trained != rewards).any():
            columns.append(pl.Series("trained_reward", trained))
        if truncated.any():
            columns.append(pl.Series("bootstrap", trained - scaled).set(pl.Series(~truncated), None))
        rows = [step[env] for env in range(len(self._infos[0])) for step in self._infos]
        keys = list(dict.fromkeys(key for row in rows for key in row))[:MOST_INFOS]
        columns += [_make_numbers(f"info.{key}", [row.get(key) for row in rows]) for key in keys]
        table = table.with_columns(columns)
        if self._observations:
            # One more was noted than there are steps: the next rollout's first.
            steps = self._observations[:-1]
            table = add_observations(table, {name: _flatten([step[name] for step in steps]) for name in steps[0]})
        return table


def _select_numbers(info: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if _is_users(key) and isinstance(value, _NUMBERS)}


@lru_cache(maxsize=1024)
def _is_users(key: object) -> bool:
    return isinstance(key, str) and not key.startswith(_OTHERS)


def _make_numbers(name: str, values: list[Any]) -> pl.Series:
    """Return a column of numbers, with nulls where there is none."""
    present = [value for value in values if value is not None]
    kind: type = float
    if all(isinstance(value, bool | np.bool_) for value in present):
        kind = bool
    elif all(isinstance(value, int | np.integer) and -(2**63) <= value < 2**63 for value in present):
        kind = int
    return pl.Series(name, [None if value is None else kind(value) for value in values])


def _flatten(steps: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return (n, ...) of arrays over environments, one a step, environment by environment."""
    array = np.concatenate(steps).reshape(len(steps), *steps[0].shape).swapaxes(0, 1)
    return array.reshape(-1, *array.shape[2:])


def _list_statistics(env: VecNormalize | None) -> dict[str, Any]:
    """Return the running statistics of VecNormalize, by name."""
    if env is None:
        return {}
    statistics = {"reward": env.ret_rms}
    if env.norm_obs:
        parts = env.obs_rms if isinstance(env.obs_rms, dict) else {None: env.obs_rms}
        statistics |= {"observation" if key is None else f"observation.{key}": part for key, part in parts.items()}
    return statistics


def load_statistics(env: VecNormalize, tensors: Mapping[str, Tensor]) -> None:
    """Set the statistics of VecNormalize to those of a round, as `RunDirectory.policy` reads them."""
    for name, each in _list_statistics(env).items():
        each.mean, each.var = (tensors[f"{name}/{field}"].numpy().copy() for field in ("mean", "var"))
        each.count = float(tensors[f"{name}/count"])
