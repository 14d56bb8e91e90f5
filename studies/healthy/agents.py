"""The agents of a PettingZoo world as copies of one environment, which share a policy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv


class AgentsVecEnv(VecEnv):
    """A parallel world of PettingZoo, of which each agent is a copy.

    Args:
        world: its agents have the same spaces, and end together.
        seed: of the first episode.

    Raises:
        ValueError: the agents' spaces differ, or one of them ends before the others.
    """

    def __init__(self, world: Any, seed: int) -> None:
        self._world, self._names = world, list(world.possible_agents)
        spaces = [(world.observation_space(name), world.action_space(name)) for name in self._names]
        if any(pair != spaces[0] for pair in spaces):
            raise ValueError("The agents' spaces differ: a policy that all share cannot act in them.")
        super().__init__(len(self._names), *spaces[0])
        self.seed(seed)

    def reset(self) -> NDArray[Any]:
        """Begin an episode; a seed counts once."""
        observations, _ = self._world.reset(seed=self._seeds[0])
        self._reset_seeds()
        return self._stack(observations)

    def step_async(self, actions: NDArray[Any]) -> None:
        """Take the agents' actions, in their order."""
        self._actions = dict(zip(self._names, actions, strict=True))

    def step_wait(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], list[dict[str, Any]]]:
        """Move all agents, and begin another episode where they have ended."""
        observations, rewards, terminated, truncated, _ = self._world.step(self._actions)
        ends = np.array([terminated[name] or truncated[name] for name in self._names])
        if ends.any() and not ends.all():
            raise ValueError("An agent ends before the others: only worlds whose agents end together can be copies.")
        stacked, infos = self._stack(observations), [dict[str, Any]() for _ in self._names]
        if ends.all():
            for name, info, last in zip(self._names, infos, stacked, strict=True):
                info |= {"terminal_observation": last, "TimeLimit.truncated": not terminated[name]}
            stacked = self.reset()
        return stacked, np.array([rewards[name] for name in self._names], np.float32), ends, infos

    def close(self) -> None:
        """Close the world."""
        self._world.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of the world once for each agent."""
        return [getattr(self._world, attr_name, None) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of the world."""
        setattr(self._world, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Call a method of the world once for each agent."""
        return [getattr(self._world, method_name)(*args, **kwargs) for _ in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """Return that no wrapper of Gymnasium is there."""
        return [False for _ in self._get_indices(indices)]

    def _stack(self, observations: dict[str, NDArray[Any]]) -> NDArray[Any]:
        rows: Sequence[NDArray[Any]] = [observations[name] for name in self._names]
        return np.stack(rows).astype(self.observation_space.dtype)
