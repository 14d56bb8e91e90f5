"""The trainings of the study: healthy ones, ones that break by themselves, and ones that a planted change breaks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, SupportsFloat

import gymnasium as gym
import numpy as np
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

Kind = Literal["healthy", "natural", "planted"]

STEPS = 2048
"""Records of a round."""


@dataclass(frozen=True)
class World:
    """A training.

    Attributes:
        env: the environment's name.
        steps: the steps of its training.
        kind: whether it is healthy, breaks by itself, or is broken.
        change: what an environment does otherwise, from the share `since` of the training on; None: nothing.
        cause: the numbers of a round that name a planted cause; any of them will do.
        copies: of the environment.
        normalises: whether VecNormalize is there.
        settings: of PPO.
        schedules: settings by name that are `then` from the share `since` on.
    """

    env: str
    steps: int
    kind: Kind
    change: str | None = None
    cause: tuple[str, ...] = ()
    copies: int = 1
    normalises: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    schedules: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    since: float = 0.6

    def make_settings(self) -> dict[str, Any]:
        """Return the settings, with schedules as functions of what is left of the training."""
        schedules = {name: pair for name, pair in self.schedules.items() if name != "ent_coef"}  # SB3's is a number
        steps = {name: partial(_step, since=self.since, before=a, then=b) for name, (a, b) in schedules.items()}
        return {**self.settings, **steps}


def _step(remaining: float, since: float, before: float, then: float) -> float:
    return before if 1 - remaining < since else then


_FLAT = {"policy_kwargs": {"net_arch": [64, 64]}}
_MINIGRID = {"ent_coef": 0.0, **_FLAT}
_LANDER = {"gamma": 0.999, "gae_lambda": 0.98, "n_epochs": 4, "ent_coef": 0.01}
_WALKER = {"n_epochs": 10, "gae_lambda": 0.95}

WORLDS: Mapping[str, World] = {
    "cartpole": World("CartPole-v1", 80_000, "healthy"),
    "acrobot": World("Acrobot-v1", 80_000, "healthy", copies=4),
    "frozenlake": World("FrozenLake-v1", 80_000, "healthy", copies=4),
    "pendulum": World("Pendulum-v1", 120_000, "healthy", copies=4, settings={"gamma": 0.9, "learning_rate": 1e-3}),
    "lunarlander": World("LunarLander-v3", 150_000, "healthy", copies=8, settings=_LANDER),
    "minigrid-empty": World("MiniGrid-Empty-5x5-v0", 80_000, "healthy", copies=4, settings=_MINIGRID),
    "minigrid-doorkey": World("MiniGrid-DoorKey-5x5-v0", 120_000, "healthy", copies=8, settings=_MINIGRID),
    "hopper": World("Hopper-v5", 120_000, "healthy", normalises=True),
    "bipedalwalker": World("BipedalWalker-v3", 120_000, "healthy", copies=8, normalises=True, settings=_WALKER),
    "double-pendulum": World("InvertedDoublePendulum-v5", 100_000, "healthy", copies=4),
    # They break by themselves.
    "cartpole-3e-2": World("CartPole-v1", 120_000, "natural", settings={"learning_rate": 3e-2}),
    "cartpole-unclipped": World(
        "CartPole-v1",
        120_000,
        "natural",
        settings={"learning_rate": 1e-3, "clip_range": 100.0, "max_grad_norm": 1e9, "n_epochs": 20},
    ),
    "acrobot-1e-2": World("Acrobot-v1", 120_000, "natural", copies=4, settings={"learning_rate": 1e-2, "n_epochs": 30}),
    "frozenlake-3e-2": World("FrozenLake-v1", 80_000, "natural", copies=4, settings={"learning_rate": 3e-2}),
    "double-pendulum-1e-2": World(
        "InvertedDoublePendulum-v5", 100_000, "natural", copies=4, settings={"learning_rate": 1e-2}
    ),
    "walker2d-1e-2": World("Walker2d-v5", 120_000, "natural", normalises=True, settings={"learning_rate": 1e-2}),
    "minigrid-optimum": World(
        "MiniGrid-Empty-5x5-v0", 200_000, "natural", copies=4, settings={**_MINIGRID, "learning_rate": 3e-3}
    ),
    "doorkey-1e-2": World(
        "MiniGrid-DoorKey-5x5-v0", 160_000, "natural", copies=8, settings={**_MINIGRID, "learning_rate": 1e-2}
    ),
    "hopper-1e-2": World("Hopper-v5", 160_000, "natural", normalises=True, settings={"learning_rate": 1e-2}),
    "lunarlander-1e-2": World(
        "LunarLander-v3", 160_000, "natural", copies=8, settings={**_LANDER, "learning_rate": 1e-2}
    ),
    "lunarlander-entropy": World(
        "LunarLander-v3",
        200_000,
        "natural",
        copies=8,
        settings={"learning_rate": 1e-3, "n_epochs": 20, "ent_coef": 0.0},
    ),
    "pendulum-sde": World(
        "Pendulum-v1",
        160_000,
        "natural",
        copies=4,
        settings={"use_sde": True, "sde_sample_freq": 4, "learning_rate": 1e-2, "gamma": 0.9},
    ),
    "hopper-sde": World(
        "Hopper-v5", 120_000, "natural", normalises=True, settings={"use_sde": True, "learning_rate": 5e-3}
    ),
    "cartpole-outliers": World("CartPole-v1", 120_000, "natural", "rare outliers", settings={"learning_rate": 3e-3}),
    "cartpole-curriculum": World("CartPole-v1", 120_000, "natural", "curriculum", settings={"learning_rate": 1e-3}),
    # Something changes at 60% of the training.
    "planted-rate": World(
        "CartPole-v1",
        120_000,
        "planted",
        cause=("learning rate", "divergence"),
        schedules={"learning_rate": (3e-4, 5e-2)},
    ),
    "planted-clip": World(
        "Acrobot-v1",
        160_000,
        "planted",
        cause=("clip range", "divergence"),
        copies=4,
        settings={"learning_rate": 1e-2, "max_grad_norm": 100.0, "n_epochs": 20},
        schedules={"clip_range": (0.02, 100.0)},
    ),
    "planted-outliers": World(
        "LunarLander-v3", 240_000, "planted", "outliers", ("reward", "advantage", "return"), copies=8, settings=_LANDER
    ),
    "planted-sensor": World("CartPole-v1", 120_000, "planted", "sensor", ("observation",)),
    "planted-entropy": World(
        "Acrobot-v1", 120_000, "planted", cause=("entropy",), copies=4, schedules={"ent_coef": (0.0, 1.0)}
    ),
    "planted-swap": World(
        "LunarLander-v3", 240_000, "planted", "swap", ("action", "dynamics"), copies=8, settings=_LANDER
    ),
}

SEEDS: Mapping[Kind, tuple[int, ...]] = {"healthy": (0, 1, 2), "natural": (0, 1), "planted": (0,)}


class Changed(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that does something else from a step on, counted over episodes."""

    def __init__(self, env: gym.Env[Any, Any], change: str, since: int) -> None:
        super().__init__(env)
        self.change, self.since, self.count = change, since, 0
        self.level, self.returns, self.total = 0, list[float](), 0.0
        self.generator = np.random.default_rng(0)

    @property
    def is_changed(self) -> bool:
        """Whether the change has come."""
        return self.count >= self.since

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, of a curriculum at its level."""
        if self.change == "curriculum":
            self.returns = [*self.returns, self.total][-20:]
            if len(self.returns) == 20 and np.mean(self.returns) > 400 and not self.level:
                self.level, self.unwrapped.force_mag = 1, -self.unwrapped.force_mag / 2  # type: ignore[attr-defined]
        self.total = 0.0
        observation, info = self.env.reset(**options)
        return self._see(observation), info

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Take a step."""
        if self.change == "swap" and self.is_changed:
            action = [0, 3, 2, 1][int(action)]
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.count += 1
        self.total += float(reward)
        if self.change == "rare outliers" and self.generator.random() < 2e-4:
            reward = -1e4
        if self.change == "outliers" and self.is_changed and self.generator.random() < 2e-3:
            reward = -1e4
        return self._see(observation), reward, terminated, truncated, info

    def _see(self, observation: Any) -> Any:
        if self.change == "sensor" and self.is_changed:
            observation = observation.copy()
            observation[2] = 3.0
        return observation


def make_env(name: str, done: int = 0) -> gym.Env[Any, Any]:
    """Return a world's environment, of whose steps so many are done."""
    world = WORLDS[name]
    if world.env.startswith("MiniGrid"):
        from minigrid.wrappers import ImgObsWrapper

        env: gym.Env[Any, Any] = gym.wrappers.FlattenObservation(ImgObsWrapper(gym.make(world.env)))
    else:
        env = gym.make(world.env)
    if world.change is not None:
        env = Changed(env, world.change, int(world.steps * world.since) // world.copies - done // world.copies)
    return env


def make_copies(name: str, seed: int, done: int = 0) -> VecEnv:
    """Return a world's environments."""
    world = WORLDS[name]
    factory: Callable[[], gym.Env[Any, Any]] = partial(make_env, name, done)
    env = make_vec_env(factory, world.copies, seed=seed)
    return VecNormalize(env, gamma=world.settings.get("gamma", 0.99)) if world.normalises else env
