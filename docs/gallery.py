"""The gallery: small trainings, a sound one and others with a planted fault, with the page of each.

Run: `python docs/gallery.py [NAME ...]` trains those named, or all, into out/gallery/runs, and writes what whence
says of them next to it: a page each, and for all of them a list in Markdown.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

import whence
from whence.page import ExploredRun, write_report
from whence.sb3 import InfluenceCallback

OUT, SEED = Path("out/gallery"), 1

COPIES, STEPS, ROUNDS = 8, 64, 8
"""Environments of a training, steps of each in a round, and rounds; of the collapse others."""

Env: TypeAlias = gym.Env[Any, Any]
Stepped: TypeAlias = tuple[Any, Any, bool, bool, dict[str, Any]]


class Swapped(gym.ActionWrapper[Any, Any, Any]):
    """Two actions are taken for each other."""

    def action(self, action: int) -> int:
        """Return the action that is taken."""
        return 1 - action


class Late(gym.Wrapper[Any, Any, Any, Any]):
    """Rewards are paid one step late."""

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self.due = 0.0
        return self.env.reset(**options)

    def step(self, action: Any) -> Stepped:
        """Take a step."""
        observation, reward, *rest = self.env.step(action)
        paid, self.due = self.due, float(reward)
        return observation, paid, *rest


class Stale(gym.Wrapper[Any, Any, Any, Any]):
    """Every second step shows the observation before it."""

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        self.is_stale = False
        self.shown, info = self.env.reset(**options)
        return self.shown, info

    def step(self, action: Any) -> Stepped:
        """Take a step."""
        observation, *rest = self.env.step(action)
        self.is_stale = not self.is_stale
        self.shown = self.shown if self.is_stale else observation
        return self.shown, *rest


class Aborted(gym.Wrapper[Any, Any, Any, Any]):
    """One step in twenty ends the episode, by chance."""

    def step(self, action: Any) -> Stepped:
        """Take a step."""
        observation, reward, terminated, *rest = self.env.step(action)
        return observation, reward, terminated or bool(self.np_random.random() < 0.05), *rest


class Unlimited(gym.Wrapper[Any, Any, Any, Any]):
    """A time limit is reported as an end."""

    def step(self, action: Any) -> Stepped:
        """Take a step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated or truncated, False, info


class Bonus(gym.Wrapper[Any, Any, Any, Any]):
    """Whoever comes to cell 5 of a grid is paid 0.2, each time."""

    def step(self, action: Any) -> Stepped:
        """Take a step."""
        before = self.unwrapped.s
        observation, reward, *rest = self.env.step(action)
        return observation, float(reward) + 0.2 * (observation == 5 != before), *rest


class Broken(gym.ObservationWrapper[Any, Any, Any]):
    """After 900 observations, the third number of each is 3."""

    count = 0

    def observation(self, observation: Any) -> Any:
        """Return what is observed."""
        self.count += 1
        return np.where(np.arange(4) == 2, np.float32(3), observation) if self.count > 900 else observation


def make(name: str, *faults: Callable[[Env], Env], **options: Any) -> Env:
    """Return an environment in its faults."""
    env = gym.make(name, **options)
    for fault in faults:
        env = fault(env)
    return env


def train_ppo(
    run: Path, makers: Sequence[Callable[[], Env]], steps: int = STEPS, rounds: int = ROUNDS, **settings: Any
) -> None:
    """Train PPO of Stable-Baselines3, recorded and scored by the callback."""
    env = DummyVecEnv([lambda make=make: Monitor(make()) for make in makers])
    settings = {"n_epochs": 4, "batch_size": 128, "learning_rate": 1e-3, **settings}
    model = PPO("MlpPolicy", env, n_steps=steps, seed=SEED, device="cpu", **settings)
    model.learn(rounds * steps * len(makers), callback=InfluenceCallback(run=run, save_every=0))


def search(run: Path, env: Env, steps: int = 4000) -> None:
    """Search the weights of a linear policy by chance, an episode for each try; the environment is recorded."""
    env, rng = whence.record(env, run, round=steps // ROUNDS), np.random.default_rng(SEED)
    best, highest, count = np.zeros((env.action_space.n, *env.observation_space.shape)), -np.inf, 0
    while count < steps:
        weights = best + rng.normal(size=best.shape)
        observation, _ = env.reset(seed=SEED + count)
        total, is_over = 0.0, False
        while not is_over and count < steps:
            action = int(np.argmax(weights @ observation))
            observation, reward, terminated, truncated, _ = env.step(action)
            total, count, is_over = total + reward, count + 1, terminated or truncated
        best, highest = (weights, total) if total > highest else (best, highest)
    env.close()


class Training(NamedTuple):
    """A training of the gallery.

    Attributes:
        title: a few words.
        about: what is trained, and what is planted.
        train: trains it, and records it in a directory.
    """

    title: str
    about: str
    train: Callable[[Path], None]


CART = partial(make, "CartPole-v1")
FIELD = {"desc": ["SFFF", "FFFF", "FFFF", "FFFG"], "is_slippery": False, "max_episode_steps": 100}

TRAININGS = {
    "sound": Training(
        "A sound training",
        "PPO learns CartPole, and nothing is planted.",
        partial(train_ppo, makers=[CART] * COPIES, learning_rate=2e-3),
    ),
    "swapped": Training(
        "Swapped actions",
        "PPO learns CartPole in eight copies; in the last one, left and right are taken for each other.",
        partial(train_ppo, makers=[*[CART] * (COPIES - 1), partial(CART, Swapped)]),
    ),
    "late": Training(
        "Late rewards",
        "A random search, in a loop that `whence.record` records, learns MountainCar; rewards are paid one step late.",
        partial(search, env=make("MountainCar-v0", Late)),
    ),
    "stale": Training(
        "Old observations",
        "The same search learns Acrobot; every second step shows the observation before it again.",
        partial(search, env=make("Acrobot-v1", Stale)),
    ),
    "aborted": Training(
        "Ends by chance",
        "The same search learns MountainCar; one step in twenty ends the episode, whatever happened.",
        partial(search, env=make("MountainCar-v0", Aborted)),
    ),
    "unlimited": Training(
        "A limit as an end",
        "The same search learns CartPole; its limit of 100 steps is reported as `terminated`.",
        partial(search, env=make("CartPole-v1", Unlimited, max_episode_steps=100)),
    ),
    "gamed": Training(
        "A gamed reward",
        "PPO learns to walk to a goal that pays 1, and a cell on the way pays 0.2 each time it is entered.",
        partial(train_ppo, makers=[partial(make, "FrozenLake-v1", Bonus, **FIELD)] * COPIES, learning_rate=3e-3),
    ),
    "collapse": Training(
        "A collapse",
        "PPO learns to balance CartPole for 40 steps, until the sensor of the pole's angle breaks and always says 3.",
        partial(
            train_ppo,
            makers=[partial(CART, Broken, max_episode_steps=40)] * COPIES,
            **{"steps": 48, "rounds": 24, "n_epochs": 6, "learning_rate": 5e-3},
        ),
    ),
}


def write(name: str) -> str:
    """Train one, write its page, and return its entry in the list."""
    title, about, train = TRAININGS[name]
    run = OUT / "runs" / name
    rmtree(run, ignore_errors=True)
    train(run)
    shown = ExploredRun(run)
    write_report(shown, OUT / f"{name}.html")
    says = [f"**{one['rank']}**: {one['title']}." for one in shown.list_findings()]
    first = (says or [shown.describe_checks()["silence"]])[0]
    return f"## [{title}](gallery/{name}.html)\n\n{about} The page says first:\n\n> {first}\n\n" + (
        f"`python docs/gallery.py {name}`, seed {SEED}\n"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    entries = [write(name) for name in sys.argv[1:] or TRAININGS]
    if len(entries) == len(TRAININGS):
        (OUT / "list.md").write_text("\n".join(entries), encoding="utf-8")
