"""The trainings that `studies.reliability.kills` interrupts, each resumed by starting it again, and how two are
compared."""

import json
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

import whence.experiments.rl.training as training
from studies.reliability import language as kills_language
from whence import IIF
from whence.experiments import configure, run
from whence.page import write_run_report
from whence.runs import RunDirectory
from whence.runs.checkpoints import list_checkpoints, read_latest
from whence.sb3 import InfluenceCallback
from whence.sb3.checkpoint.training_run import TrainingRun

STAGES = ("start", "collection", "scoring", "records", "optimisation", "checkpoint", "evaluation", "report", "end")
"""What a training may be doing when it is killed."""

_SMALL = {"n_steps": 256, "batch_size": 64, "n_epochs": 4}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "FrozenLake": {"env": "FrozenLake-v1", "env_kwargs": {"is_slippery": True}, "rounds": 8, "eval_episodes": 20},
    "LunarLander": {"env": "LunarLander-v3", "n_envs": 2, "rounds": 6, "eval_episodes": 4},
    "MiniGrid": {"preset": "lda-code/minigrid", "evaluate_with": "gymnasium", "rounds": 5, "eval_episodes": 4},
    "BipedalWalker": {"env": "BipedalWalker-v3", "rounds": 6, "eval_episodes": 2},
    "Pendulum, gSDE": {"env": "Pendulum-v1", "n_envs": 2, "rounds": 6, "eval_episodes": 4},
}
"""Runs of `whence train`, by name."""


def train(world: str, path: Path, enter: Callable[[str], None]) -> None:
    """Train a world in a directory, or go on with it, to the end, and write its page.

    Args:
        world: a key of `WORLDS`.
        path: the run's directory.
        enter: called with the name of each stage as it begins.
    """
    if world in LANGUAGE:
        enter("collection")
        kills_language.start(path, LANGUAGE[world])
        enter("end")
        return
    _report_stages(enter)
    if world == _VECTOR:
        _train_vector(path)
    else:
        settings = dict(CONFIGS[world])
        sde = {"use_sde": True, "sde_sample_freq": 8} if "gSDE" in world else {}
        config = configure(**{"arm": "iif", "seed": 7, "hyperparameters": {**_SMALL, **sde}, **settings})
        run(config, path)
    enter("report")
    write_run_report(RunDirectory.open(path), path / "report.html")
    enter("end")


_VECTOR = "CartPole, 8 environments, VecNormalize"

LANGUAGE: Mapping[str, Any] = {f"language model, {kind.upper()}": kind for kind in ("ppo", "grpo", "rloo")}
"""Trainings of language models; their stages are not told apart."""

WORLDS = (*CONFIGS, _VECTOR, *LANGUAGE)
"""The names of all trainings."""


def _train_vector(path: Path) -> None:
    """Train as a script does, with the callback."""
    env = VecNormalize(make_vec_env("CartPole-v1", n_envs=8, seed=5))
    model = PPO("MlpPolicy", env, seed=5, n_steps=64, batch_size=64, n_epochs=4, device="cpu")
    model.learn(8 * 64 * 8, callback=InfluenceCallback(IIF(0.5), run=path))
    env.close()


def _report_stages(enter: Callable[[str], None]) -> None:
    """Let the parts of a training say when they begin; this process trains once and ends."""

    def announce(owner: Any, name: str, stage: str, after: str | None = None) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            enter(stage)
            result = original(*args, **kwargs)
            if after is not None:
                enter(after)
            return result

        setattr(owner, name, call)

    announce(InfluenceCallback, "_on_rollout_start", "collection")
    announce(InfluenceCallback, "choose", "scoring")
    announce(TrainingRun, "write_round", "records", after="optimisation")
    announce(TrainingRun, "end_round", "records")
    announce(TrainingRun, "_save_checkpoint", "checkpoint")
    announce(training, "measure_return", "evaluation")


class StageBoard:
    """The stage of a training, readable by another process even after it was killed.

    Args:
        path: a file for it.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(2))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 2)

    def enter(self, stage: str) -> None:
        """Say that a stage begins."""
        self._memory[1] = (self._memory[1] + 1) % 256
        self._memory[0] = STAGES.index(stage)

    @property
    def stage(self) -> str:
        """The present stage."""
        return STAGES[self._memory[0]]

    @property
    def count(self) -> int:
        """How many stages have begun, modulo 256."""
        return self._memory[1]


def find_differences(path: Path, reference: Path) -> list[str]:
    """List in what a run differs from the uninterrupted one: files by their bytes, the last checkpoint by its tensors.

    Timings, and clocks inside checkpoints, differ between any two runs, and are left out.
    """
    if (path / "trl").exists() or RunDirectory.open(path).config.get("kind") == "language":
        return kills_language.find_differences(path, reference)
    names = {
        file.relative_to(root).as_posix()
        for root in (path, reference)
        for file in root.rglob("*")
        if file.is_file() and file.parent.name != "checkpoints" and file.name not in _CLOCKED
    }
    differences = [name for name in sorted(names) if _read(path / name) != _read(reference / name)]
    ours, theirs = (read_latest(folder) for folder in (path, reference))
    if ours is None or theirs is None or ours.round != theirs.round:
        return [*differences, f"last checkpoint: {ours and ours.round}, {theirs and theirs.round}"]
    return differences + _compare("checkpoint", ours.content, theirs.content)


_CLOCKED = {"timings.parquet", "report.html", ".lock"}
_CLOCKS = {"t", "episode_times", "episodes"}
"""Keys of a checkpoint under which Monitor's clocks are; `episodes` is looked through without them."""


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _compare(name: str, one: Any, other: Any) -> list[str]:
    """List the leaves in which two trees of a checkpoint differ, clocks left out."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return [f"{name}: other keys"]
        return [
            difference
            for key in one
            if key not in ("t", "episode_times")
            for difference in _compare(f"{name}/{key}", one[key], other[key])
        ]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [f"{name}: other length"]
        pairs = enumerate(zip(one, other, strict=True))
        return [difference for place, (a, b) in pairs for difference in _compare(f"{name}/{place}", a, b)]
    if isinstance(one, torch.Tensor):
        return [] if isinstance(other, torch.Tensor) and torch.equal(one, other) else [name]
    if hasattr(one, "tobytes"):
        return [] if hasattr(other, "tobytes") and one.tobytes() == other.tobytes() else [name]
    return [] if json.dumps(one) == json.dumps(other) else [name]


def check_readable(path: Path) -> list[str]:
    """List what cannot be read of a run directory, however its writer ended: none is the promise."""
    if not (path / "config.json").exists():
        return []  # killed before the run began
    failures = []
    directory = RunDirectory.open(path)
    reads: dict[str, Callable[[], object]] = {
        "metrics": lambda: directory.table("metrics"),
        "timings": lambda: directory.table("timings"),
        "evaluations": lambda: directory.table("evaluations"),
    }
    for number in directory.rounds():
        reads[f"records {number}"] = lambda number=number: directory.round("records", number)
    for number in directory.policies():
        reads[f"policy {number}"] = lambda number=number: directory.policy(number)
    if list_checkpoints(path):
        reads["checkpoint"] = lambda: read_latest(path)
    for name, read in reads.items():
        try:
            read()
        except Exception as failure:
            failures.append(f"{name}: {type(failure).__name__}: {failure}")
    return failures


def preload() -> None:
    """Import what the trainings need, so that processes that are forked from this one begin at once."""
    for name in ("FrozenLake-v1", "LunarLander-v3", "BipedalWalker-v3", "Pendulum-v1", "CartPole-v1"):
        gym.make(name).close()
