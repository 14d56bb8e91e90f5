"""A rollout as its environments returned it: rewards in their own units, time limits' bootstraps, numbers in infos."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from torch import Tensor

from whence.core import add_observations, named_leaves, replace_attribute
from whence.sb3.episodes import InfoNumbers, iterate_vec_wrappers


class GivenRewards:
    """Rewards as the environments give them, inside of all wrappers, summed over the steps of each action.

    It is an attribute of the environments while `note_rewards` is open, and is copied with them.
    """

    def __init__(self, env: VecEnv) -> None:
        self._step_wait = env.unwrapped.step_wait
        self._sum: NDArray[Any] | None = None

    def __call__(self) -> Any:
        """Step the environments, and note their rewards."""
        returned = self._step_wait()
        rewards = np.array(returned[1])
        self._sum = rewards if self._sum is None else self._sum + rewards
        return returned

    def take(self) -> NDArray[Any] | None:
        """Return the sums since they were last taken, (envs,); None: no step was seen."""
        rewards, self._sum = self._sum, None
        return rewards


def note_rewards(env: VecEnv) -> AbstractContextManager[None]:
    """Let `EnvironmentSteps` read the rewards that environments give, as long as this is open."""
    return replace_attribute(env.unwrapped, "step_wait", GivenRewards(env))


def list_normalisers(env: VecEnv) -> list[VecNormalize]:
    """Return the VecNormalize wrappers around environments, the outermost first."""
    return [each for each in iterate_vec_wrappers(env) if isinstance(each, VecNormalize)]


class EnvironmentSteps:
    """The steps of a rollout, followed while it is collected; it is made as that begins, inside of `note_rewards`.

    SB3's buffer holds something else: rewards that wrappers have scaled, and to which SB3 has added the value of the
    last state where a time limit cut an episode; and normalised observations. `infos` are the numbers in infos.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._normalised: VecNormalize | None = model.get_vec_normalize_env()
        # The innermost of several reads what the environments return.
        normalisers = list_normalisers(model.env)[::-1]
        self._scaling, self._reader = next(iter(normalisers), None), next((n for n in normalisers if n.norm_obs), None)
        self._noted = vars(model.env.unwrapped).get("step_wait")
        self._rewards: list[NDArray[Any]] = []
        self._unscaled: list[NDArray[Any]] = []
        self._dones: list[NDArray[np.bool_]] = []
        self._limits: dict[tuple[int, int], Any] = {}
        self.infos = InfoNumbers()
        self._observations: list[dict[str, NDArray[Any]]] = []
        self._note_observation()
        if isinstance(self._noted, GivenRewards):
            self._noted.take()

    def add(
        self,
        rewards: NDArray[Any],
        dones: NDArray[np.bool_],
        ended: NDArray[np.int64],
        infos: Sequence[Mapping[str, Any]],
        lstm_states: Any = None,
    ) -> None:
        """Read what the environments returned for a step; `ended` are the indices of those that are done.

        `lstm_states` are a recurrent policy's after the step.
        """
        for env in ended:
            if infos[env].get("TimeLimit.truncated"):
                last = copy.deepcopy(infos[env].get("terminal_observation"))
                states = None if lstm_states is None else [each[:, [env]] for each in lstm_states.vf]
                self._limits[len(self._dones), int(env)] = last, states
        noted_rewards = self._noted.take() if isinstance(self._noted, GivenRewards) else None
        # SB3 adds the bootstrap to these rewards in place, after its callbacks.
        self._unscaled.append((rewards if self._scaling is None else self._scaling.old_reward).copy())
        self._rewards.append(self._unscaled[-1] if noted_rewards is None else noted_rewards)
        self._dones.append(dones.copy())
        self.infos.add(infos)
        self._note_observation()

    def _note_observation(self) -> None:
        if self._reader is not None:
            leaves = named_leaves(self._reader.old_obs, "raw_observation")
            self._observations.append({name: np.array(leaf) for name, leaf in leaves})

    @property
    def is_flat(self) -> bool:
        """Whether the rewards say nothing about the actions, so that advantages rest on the values alone.

        They say something if two of them differ, or if an episode terminated and rewards are not 0, so that a longer
        one earns another sum. These are the rewards that train, as a wrapper's curiosity may add to, before they are
        normalised.
        """
        rewards = _flatten(self._unscaled)
        is_same = bool((rewards == rewards[0]).all())
        return is_same and (rewards[0] == 0 or not (_flatten(self._dones) & ~self._find_truncated()).any())

    def _find_truncated(self) -> NDArray[np.bool_]:
        truncated = np.zeros((len(self._dones[0]), len(self._dones)), bool)
        for step, env in self._limits:
            truncated[env, step] = True
        return truncated.reshape(-1)

    @property
    def reward_scale(self) -> float | None:
        """What VecNormalize, or several, divide rewards by at present; None if none does."""
        dividing = [each for each in list_normalisers(self._model.env) if each.norm_reward]
        return float(np.prod([np.sqrt(each.ret_rms.var + each.epsilon) for each in dividing])) if dividing else None

    @property
    def statistics(self) -> dict[str, Tensor]:
        """VecNormalize's statistics at present, as `load_statistics` takes them; empty if there is none."""
        return {
            f"{name}/{field}": torch.tensor(getattr(each, field), dtype=torch.float64)
            for name, each in _list_statistics(self._normalised).items()
            for field in ("mean", "var", "count")
        }

    @np.errstate(all="ignore")  # of numbers too large for single precision
    def add_columns(self, table: pl.DataFrame) -> pl.DataFrame:
        """Return a round's table, of the buffer's records in their order, with what the environments returned.

        `reward` becomes the environments' own. What trained is in `trained_reward` if some differ. `bootstrap` is what
        SB3 added where a time limit cut an episode, if one did: the last state's discounted value. `end` is
        "terminated" or "truncated" at an episode's last record. `raw_observation`, or `raw_observation.KEY`, are those
        that VecNormalize read. `info.KEY` are the numbers in infos.
        """
        rewards = _flatten(self._rewards).astype(np.float32)
        truncated = self._find_truncated()
        ends = pl.Series("end", [None, "terminated", "truncated"], dtype=pl.String)
        columns = [pl.Series("reward", rewards), ends.gather(_flatten(self._dones).astype(np.int8) + truncated)]
        trained = table["reward"].to_numpy()
        if (trained != rewards).any():
            columns.append(pl.Series("trained_reward", trained))
        if truncated.any():
            columns.append(pl.Series("bootstrap", self._compute_bootstraps()).set(pl.Series(~truncated), None))
        table = table.with_columns(*columns, *self.infos.make_columns())
        if self._observations:
            # One more was noted than there are steps: the next rollout's first.
            steps = self._observations[:-1]
            table = add_observations(table, {name: _flatten([step[name] for step in steps]) for name in steps[0]})
        return table

    def _compute_bootstraps(self) -> NDArray[np.float32]:
        """Return what SB3 added to each record's reward: the discounted value of a last state that a limit cut off."""
        bootstraps = np.zeros((len(self._dones[0]), len(self._dones)), np.float32)
        limits = {place: limit for place, limit in self._limits.items() if limit[0] is not None}
        if limits:
            (last, states), policy = zip(*limits.values(), strict=True), self._model.policy
            # None names an observation that has no parts.
            parts = [each if isinstance(each, dict) else {None: each} for each in last]
            stacked: Any = {name: np.stack([each[name] for each in parts]) for name in parts[0]}
            tensors, _ = policy.obs_to_tensor(stacked.get(None, stacked))
            memory: list[Any] = []
            if states[0] is not None:
                zeros = torch.zeros(len(states), device=policy.device)
                memory = [tuple(torch.cat(each, 1) for each in zip(*states, strict=True)), zeros]
            with torch.no_grad():
                values = policy.predict_values(tensors, *memory).flatten().cpu().numpy()
            for (step, env), value in zip(limits, values, strict=True):
                bootstraps[env, step] = self._model.gamma * value
        return bootstraps.reshape(-1)


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
