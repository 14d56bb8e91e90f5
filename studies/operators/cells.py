"""The environments that faults are planted into, and the runs: an operator, an environment, a size and a seed."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from studies.healthy.environments import PublicEnvironment, make_environment, read_environments
from studies.operators.faults import COPIES, Fault, Task
from studies.operators.operators import OPERATORS
from studies.operators.samples import Sample, list_traits, read_sample

ENVIRONMENTS: Mapping[str, str] = {
    "CartPole-v1": "two actions; the same reward at every step; ends by a fall alone",
    "Hopper-v5": "a robot; three axes; a reward of several terms",
    "scaled/PropofolControl": "medicine; one axis; entries with hard bounds; ends by a limit alone",
    "gym_sailing:SailboatDiscrete-v0": "a boat; three actions; resets that no seed repeats",
    "LunarLander-v3": "four actions; a dense reward with large ones at the end; entries of two values",
    "minigrid:MiniGrid-Empty-5x5-v0": "a small image of bytes; a reward at the end alone; ends by a limit too",
    "scaled/InvManagementBacklog": "an inventory: 33 whole numbers, stocks and orders on their way",
    "gymnasium_trading:GymnasiumTrading-v0": "trading; a reward that is mostly noise",
    "Pendulum-v1": "one axis; always a negative reward; ends by a limit alone",
    "FrozenLake-v1": "an observation that is one number; moves by chance; hardly ever a reward",
    "gymchem/CSTREnv": "process control: a reactor; episodes of 1,000 steps",
    "gymnasium_search_race:gymnasium_search_race/SearchRace-v3": "driving; two axes; a reward at checkpoints alone",
    "maze_world:RandomMaze-11x11-v0": "a dict of two maps; mazes that no seed repeats; every step costs",
    "gym_electric_motor:Finite-SC-PermExDc-v0": "an electric motor; switching states; ends by a limit on currents",
}
"""What each environment is here for. All take less than 0.9 ms a step to train."""

CURVES = [*ENVIRONMENTS][1:5]
"""The environments in which other sizes are tried too."""

TWINS = 4
"""Healthy runs of each environment."""

ROUNDS, STEPS = 20, 256
"""Rounds of a run, and the steps of each copy in one."""

SETTINGS: Mapping[str, Any] = {"n_steps": STEPS, "device": "cpu"}
"""What differs from the defaults of PPO."""


class Cell(NamedTuple):
    """A run: an operator of a size in an environment."""

    environment: str
    operator: str
    size: float
    seed: int = 0

    def place_run(self, runs: Path) -> Path:
        """Return the directory of the run."""
        return runs / _name_folder(self.environment) / f"{self.operator}-{self.size:g}-{self.seed}"

    @property
    def key(self) -> int:
        """A seed that is the same for all sizes."""
        digest = hashlib.sha256(f"{self.environment} {self.operator} {self.seed}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


def _name_folder(environment: str) -> str:
    return environment.replace("/", "_").replace(":", "_")


def list_cells() -> Iterator[Cell]:
    """Yield all runs: each operator at its default size in each environment, more healthy twins, then other sizes.

    Each turn has every operator once, in another environment than the one before: a part of the runs has all of both.
    """
    names = [*ENVIRONMENTS]
    for turn in range(len(names)):
        for number, (operator, row) in enumerate(OPERATORS.items()):
            yield Cell(names[(number + turn) % len(names)], operator, row.sizes[0])
    for seed in range(1, TWINS):
        yield from (Cell(environment, "none", 0.0, seed) for environment in names)
    for turn in range(1, 4):
        for operator, row in OPERATORS.items():
            if turn < len(row.sizes):
                yield from (Cell(environment, operator, row.sizes[turn]) for environment in CURVES)


def find_row(environment: str) -> PublicEnvironment:
    """Return the catalogue's row of an environment."""
    return next(row for row in read_environments() if row.id == environment)


def read_play(environment: str, runs: Path) -> tuple[Sample, set[str]]:
    """Return random play of an environment, from a file if it is there, and the traits of the environment."""
    row = find_row(environment)
    env = make_environment(row)
    sample = read_sample(runs / _name_folder(environment) / "play.npz", env)
    traits = list_traits(env, sample) | ({"repeats"} if row.repeats else set())
    env.close()
    return sample, traits


def make_task(env: gym.Env[Any, Any], cell: Cell, sample: Sample, copy: int) -> Task:
    """Return one copy of an environment with a cell's fault."""
    fault, size = OPERATORS[cell.operator].fault or Fault, cell.size
    if OPERATORS[cell.operator].fault is None:
        size = 0.0
    return Task(env, fault(sample, env.action_space, size, copy, cell.key, ROUNDS * STEPS))


def make_model(cell: Cell, sample: Sample) -> PPO:
    """Return the model of a cell, untrained."""
    row, setting = find_row(cell.environment), OPERATORS[cell.operator].setting
    settings: dict[str, Any] = {**SETTINGS}
    if setting:
        settings[setting] = type(settings.get(setting, 0.0))(cell.size)
    settings["batch_size"] = min(64, COPIES * settings["n_steps"])
    env = DummyVecEnv(
        [
            lambda copy=copy: Monitor(make_task(make_environment(row), cell, sample, copy))  # type: ignore[misc]
            for copy in range(COPIES)
        ]
    )
    return PPO(row.policy, env, seed=cell.key, **settings)
