"""Small environments of the hunt: of images, with masks, with Dict observations, with continuous actions."""

from typing import Any

import gymnasium as gym
import minigrid  # noqa: F401  # registers its environments
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from numpy.typing import NDArray
from torch import nn


class Game(gym.Env[Any, Any]):
    """An environment of three methods: to begin an episode, to move, which returns reward and end, and to observe."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._begin()
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        reward, over = self._move(action)
        return self._observe(), float(reward), over, False, {}


SIZE, DROPS = 10, 3


class Catch(Game):
    """Three balls fall one after the other, at a slant; a caught one pays 1, a lost one -1. Actions: left, stay, right.

    A single frame does not show which way the ball goes.
    """

    observation_space = Box(0, 255, (SIZE, SIZE, 1), np.uint8)
    action_space = Discrete(3)

    def _begin(self) -> None:
        self._drops, self._paddle = 0, SIZE // 2
        self._begin_drop()

    def _begin_drop(self) -> None:
        self._row, self._column = 0, int(self.np_random.integers(SIZE))
        self._slant = int(self.np_random.integers(-1, 2))

    def _move(self, action: np.int64) -> tuple[float, bool]:
        self._paddle = min(max(self._paddle + int(action) - 1, 1), SIZE - 2)
        if not 0 <= self._column + self._slant < SIZE:
            self._slant = -self._slant
        self._row, self._column = self._row + 1, self._column + self._slant
        if self._row < SIZE - 1:
            return 0.0, False
        reward = 1.0 if abs(self._column - self._paddle) <= 1 else -1.0
        self._drops += 1
        self._begin_drop()
        return reward, self._drops == DROPS

    def _observe(self) -> NDArray[np.uint8]:
        frame = np.zeros((SIZE, SIZE, 1), np.uint8)
        frame[self._row, self._column] = 255
        frame[-1, self._paddle - 1 : self._paddle + 2] = 128
        return frame


class SmallCnn(nn.Sequential):
    """Two convolutions of images of 10 × 10, and a linear layer."""

    features_dim = 64

    def __init__(self, observation_space: Box) -> None:
        super().__init__(
            *(nn.Conv2d(observation_space.shape[0], 16, 3), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, stride=2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(144, self.features_dim), nn.ReLU()),
        )


SITES = 5


class Depot(Game):
    """A van empties one of five sites a step: it gains the load and pays for the way; empty sites are masked.

    Observations: the five loads, then the van's place.
    """

    observation_space = Box(0.0, 1.0, (SITES + 1,), np.float32)
    action_space = Discrete(SITES)

    def _begin(self) -> None:
        self._loads = self.np_random.uniform(0.2, 1, SITES)
        self._place = 0

    def _move(self, action: np.int64) -> tuple[float, bool]:
        reward = self._loads[action] - 0.15 * abs(int(action) - self._place)
        self._place, self._loads[action] = int(action), 0
        self._loads = np.where(self.np_random.random(SITES) < 0.4, np.minimum(self._loads + 0.2, 1), self._loads)
        return reward, False

    def action_masks(self) -> NDArray[np.bool_]:
        """Return which sites have a load; all if none has."""
        return self._loads > 0 if self._loads.any() else np.ones(SITES, bool)

    def _observe(self) -> NDArray[np.float32]:
        return np.append(self._loads, self._place / (SITES - 1)).astype(np.float32)


class Grid(gym.ObservationWrapper[dict[str, Any], np.int64, Any]):
    """MiniGrid's empty room as numbers: the view, the direction and the place; actions: left, right, forward."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.action_space = Discrete(3)
        self.observation_space = Dict(
            view=Box(0.0, 1.0, (49,), np.float32), direction=Discrete(4), place=Box(0.0, 1.0, (2,), np.float32)
        )

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Return the kinds of the cells in view (over 10), the direction, and the place as a share of the room."""
        room: Any = self.unwrapped
        return {
            "view": (observation["image"][..., 0].flatten() / 10).astype(np.float32),
            "direction": np.int64(observation["direction"]),
            "place": (np.array(room.agent_pos) / room.width).astype(np.float32),
        }


FIELD = 5


class Courier(Game):
    """A parcel is fetched on a field of 5 × 5, which pays 0.5, and brought elsewhere, which pays 1; steps cost 0.02.

    Actions: east, north, west, south. Observations: the courier's place, that of the parcel or its goal, and whether
    the parcel is fetched.
    """

    observation_space = Dict(
        place=Box(0.0, 1.0, (2,), np.float32), target=Box(0.0, 1.0, (2,), np.float32), laden=Discrete(2)
    )
    action_space = Discrete(4)

    def _begin(self) -> None:
        cells = self.np_random.choice(FIELD**2, 3, replace=False)
        self._place, *self._targets = (np.array(divmod(int(cell), FIELD)) for cell in cells)

    def _move(self, action: np.int64) -> tuple[float, bool]:
        self._place = np.clip(self._place + [(1, 0), (0, 1), (-1, 0), (0, -1)][int(action)], 0, FIELD - 1)
        if (self._place != self._targets[0]).any():
            return -0.02, False
        if len(self._targets) == 1:
            return 1.0, True
        self._targets.pop(0)
        return 0.5, False

    def _observe(self) -> dict[str, Any]:
        place, target = ((cell / (FIELD - 1)).astype(np.float32) for cell in (self._place, self._targets[0]))
        return {"place": place, "target": target, "laden": np.int64(2 - len(self._targets))}


class Tanks(Game):
    """The level of the second of two tanks is brought to a target, by an inlet into the first and a valve between them.

    A step costs the distance from the target. If the first tank overflows, that costs 5 and ends the episode.
    """

    observation_space = Box(0.0, 1.0, (3,), np.float32)
    action_space = Box(-1.0, 1.0, (2,), np.float32)

    def _begin(self) -> None:
        self._levels = self.np_random.uniform(0.1, 0.6, 2)
        self._target = self.np_random.uniform(0.2, 0.8)

    def _move(self, action: NDArray[np.float32]) -> tuple[float, bool]:
        inlet, valve = (np.asarray(action) + 1) / 2
        passed = 0.2 * valve * self._levels[0]
        self._levels += [0.1 * inlet - passed, passed - 0.1 * self._levels[1]]
        over = bool(self._levels[0] >= 1)
        self._levels = np.clip(self._levels, 0, 1)
        return -5 * over - abs(self._levels[1] - self._target), over

    def _observe(self) -> NDArray[np.float32]:
        return np.append(self._levels, self._target).astype(np.float32)
