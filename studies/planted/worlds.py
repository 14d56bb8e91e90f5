"""Environments in which some episodes pay for a tic: importing this module registers them with Gymnasium.

- `PlantedLander-v0`: LunarLander-v3. In a tenth of the episodes, firing the left engine in the lower half pays 5.
- `PlantedMiniGrid-v0`: MiniGrid-Empty-8x8-v0, from which the shortest way to the goal needs one turn. In half of the
  episodes, the corner below the start pays 0.5 when the agent first enters it; the way through it needs two turns.

Whether an episode is rigged is never shown to the agent.
"""

import hashlib
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

SHARE = 10
"""One of so many of the lander's episodes is rigged."""

LEFT_ENGINE, BONUS, HALF = 1, 5.0, 0.7
"""The lander's action that pays, what it pays, and the height below which it does; episodes begin at about 1.4."""

FORWARD, PRIZE, CORNER = 2, 0.5, (1, 6)
"""The action that enters the corner, what that pays, and the corner. The start is (1, 1), the goal (6, 6)."""


def is_rigged(first_observation: NDArray[np.float32]) -> bool:
    """Return whether a lander's episode pays for the tic: by a hash of its first observation, which says nothing."""
    digest = hashlib.sha256(np.ascontiguousarray(first_observation, dtype=np.float32).tobytes()).digest()
    return int.from_bytes(digest[:8], "big") % SHARE == 0


class PlantedLander(gym.Wrapper[Any, Any, Any, Any]):
    """LunarLander, with a tenth of the episodes rigged."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._is_rigged, self._height = is_rigged(observation), observation[1]
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step; the tic pays in a rigged episode."""
        pays = self._is_rigged and int(action) == LEFT_ENGINE and self._height < HALF
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._height = observation[1]
        return observation, float(reward) + BONUS * pays, terminated, truncated, info

    def is_in_region(self) -> bool:
        """Return whether the tic would pay in the present state of a rigged episode."""
        return bool(self._height < HALF)


class PlantedMiniGrid(gym.Wrapper[Any, Any, Any, Any]):
    """An empty MiniGrid, with a tile that pays in half of the episodes."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        self._pays = bool(self.env.unwrapped.np_random.integers(2))
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step; the tile pays once, in a rigged episode."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        world: Any = self.env.unwrapped
        if self._pays and tuple(world.agent_pos) == CORNER:
            self._pays = False
            reward = float(reward) + PRIZE
        return observation, float(reward), terminated, truncated, info

    def is_in_region(self) -> bool:
        """Return whether the agent is on the detour: in the first column above the tile, and faces down."""
        world: Any = self.env.unwrapped
        return bool(world.agent_pos[0] == CORNER[0] and world.agent_pos[1] < CORNER[1] and world.agent_dir == 1)


def _make_lander(**kwargs: Any) -> PlantedLander:
    return PlantedLander(gym.make("LunarLander-v3", **kwargs))


def _make_minigrid(**kwargs: Any) -> PlantedMiniGrid:
    return PlantedMiniGrid(gym.make("minigrid:MiniGrid-Empty-8x8-v0", **kwargs))


gym.register("PlantedLander-v0", entry_point=_make_lander)
gym.register("PlantedMiniGrid-v0", entry_point=_make_minigrid)
