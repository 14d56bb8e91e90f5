"""EnvPool's environments to collect from, as an SB3 vector environment."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from whence.core import map_tree, named_leaves
from whence.sb3 import Pool, cast_actions


class EnvPoolVecEnv(VecEnv):
    """A pool as an SB3 `VecEnv`: when an episode ends, the next one begins in the same step, as in SB3.

    EnvPool returns the first observation of an episode one step late, which would lose a step. Here the pool is reset
    at once, and `info["terminal_observation"]` holds the last observation.
    """

    def __init__(self, environment: Pool, n_envs: int, seed: int) -> None:
        self._environment, self._pool = environment, environment.make(n_envs, seed)
        self._actions: NDArray[Any] = np.zeros(0)
        self._returns, self._lengths = np.zeros(n_envs), np.zeros(n_envs, dtype=np.int64)
        self.spec = EnvSpec(environment.env.rpartition(":")[2], kwargs=dict(environment.kwargs))
        super().__init__(n_envs, environment.observe(self._pool.observation_space), self._pool.action_space)

    def reset(self) -> VecEnvObs:
        """Begin a new episode in every environment."""
        observation, _ = self._pool.reset()
        self._returns[:], self._lengths[:] = 0, 0
        self.reset_infos = [{} for _ in range(self.num_envs)]
        self._reset_seeds()
        return map_tree(np.array, self._environment.observe(observation))  # type: ignore[arg-type,no-any-return]

    def step_async(self, actions: NDArray[Any]) -> None:
        """Store the actions for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments."""
        actions = cast_actions(self._actions, self.action_space)
        whole_observations, rewards, terminated, truncated, _ = self._pool.step(actions)
        observations = map_tree(np.array, self._environment.observe(whole_observations))  # type: ignore[arg-type]
        ended = terminated | truncated
        self._returns += rewards
        self._lengths += 1
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        ended_envs = np.flatnonzero(ended)
        if len(ended_envs):
            # A copy, before the next episodes' first observations replace them.
            # A copy, before the next episodes' first observations replace them.
            last = map_tree(itemgetter(ended_envs), observations)
            first, pool_info = self._pool.reset(ended_envs)
            first_parts = named_leaves(self._environment.observe(first))
            for (_, part), (_, first_part) in zip(named_leaves(observations), first_parts, strict=True):
                part[pool_info["env_id"]] = first_part
            for row, env in enumerate(ended_envs):
                infos[env] = {
                    "terminal_observation": map_tree(itemgetter(row), last),
                    "TimeLimit.truncated": bool(truncated[env] and not terminated[env]),
                    "episode": {"r": float(self._returns[env]), "l": int(self._lengths[env]), "t": 0.0},
                }
            self._returns[ended_envs], self._lengths[ended_envs] = 0, 0
        return observations, rewards.astype(np.float32), ended, infos

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Make a new pool with a seed, since EnvPool seeds a pool only when it is made."""
        if seed is not None:
            self.close()
            self._pool = self._environment.make(self.num_envs, seed)
        return [seed] * self.num_envs

    def close(self) -> None:
        """Free the pool's memory."""
        self._pool.close()

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Return False: pools take no wrappers."""
        return [False] * len(list(self._get_indices(indices)))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return `spec` or `render_mode` for each environment; pools have no other attributes."""
        if attr_name not in ("spec", "render_mode"):
            raise AttributeError(f"EnvPool's environments have no attribute {attr_name!r}.")
        return [self.spec if attr_name == "spec" else None for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Refuse: pools have no attributes."""
        raise AttributeError(f"EnvPool's environments have no attribute {attr_name!r}.")

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        """Refuse: pools have no methods."""
        raise AttributeError(f"EnvPool's environments have no method {method_name!r}.")
