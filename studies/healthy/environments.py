"""The catalogue of public environments, and how one of them is made."""

import importlib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecMonitor

from studies.healthy.agents import AgentsVecEnv

CATALOGUE = Path(__file__).with_name("environments.toml")


@dataclass(frozen=True)
class PublicEnvironment:
    """An environment of a package on the index, and what was measured of it.

    Attributes:
        id: what `gymnasium.make` knows it by, "module:Id" if a module has to be imported first.
        package: its name on the package index; `version`: the one that was measured.
        family: environments of one family are no independent evidence.
        class_path: "module:Class" of a class that its package does not register, or of a function that makes one.
        parallel: what `pettingzoo.make` knows a world by, of which each agent becomes a copy.
        kwargs: arguments of the constructor.
        time_limit: steps after which an episode is truncated, where its package lets it go on for ever.
        wrappers: "module:Class" of each wrapper, from the innermost.
        policy: the policy of Stable-Baselines3 that can be trained on it.
        episode: steps of an episode of random actions; 0 if none ended.
        act_ms, train_ms: milliseconds a step, of random actions and of PPO's training.
        steps: steps of training in about 90 CPU seconds, at most 100,000.
        healthy: false where a fault of the environment, or observations that are constant by design, make a healthy run
            look ill: no part of a reference, but real cases to judge findings by.
        repeats: whether `reset(seed)` and the same actions give the same episode again.
        notes: faults of the environment itself.
    """

    id: str
    package: str
    version: str
    family: str
    policy: str
    episode: int
    act_ms: float
    train_ms: float
    steps: int
    healthy: bool = True
    repeats: bool = True
    class_path: str = ""
    parallel: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    time_limit: int = 0
    wrappers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_environments(file: Path = CATALOGUE) -> list[PublicEnvironment]:
    """Return the environments of a catalogue, in its order."""
    return [PublicEnvironment(**row) for row in tomllib.loads(file.read_text(encoding="utf-8"))["environment"]]


def make_environment(row: PublicEnvironment) -> gym.Env[Any, Any]:
    """Make one copy of an environment, with its wrappers.

    Raises:
        ModuleNotFoundError: its package is not installed.
    """
    env = _resolve(row.class_path)(**row.kwargs) if row.class_path else gym.make(row.id, **row.kwargs)
    if row.time_limit:
        env = gym.wrappers.TimeLimit(env, row.time_limit)
    for wrapper in row.wrappers:
        env = _resolve(wrapper)(env)
    return env


def make_copies(row: PublicEnvironment, copies: int, seed: int) -> VecEnv:
    """Make copies of an environment for training; of a parallel one, the agents are the copies."""
    if not row.parallel:
        return make_vec_env(lambda: make_environment(row), n_envs=copies, seed=seed)
    import pettingzoo

    return VecMonitor(AgentsVecEnv(pettingzoo.make("parallel", row.parallel, **row.kwargs), seed))


def _resolve(path: str) -> Any:
    """Return what "module:name" names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
