"""The catalogue of public environments says what can be installed, and makes what it says."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from studies.healthy.agents import AgentsVecEnv
from studies.healthy.environments import CATALOGUE, make_copies, make_environment, read_environments

ENVIRONMENTS = read_environments()
REQUIREMENTS = Path(CATALOGUE.with_name("requirements.txt")).read_text(encoding="utf-8").splitlines()
SHARED = ("gymnasium", "minigrid", "highway-env", "ale-py", "pettingzoo", "mujoco")


def test_each_environment_is_there_once_and_can_be_installed() -> None:
    assert len({row.id for row in ENVIRONMENTS}) == len(ENVIRONMENTS) >= 60
    assert len({row.family for row in ENVIRONMENTS if row.healthy}) >= 12
    assert len([row for row in ENVIRONMENTS if row.healthy]) >= 45
    assert len({row.package for row in ENVIRONMENTS} - {*SHARED}) >= 15
    assert {f"{row.package}=={row.version}" for row in ENVIRONMENTS} <= {*REQUIREMENTS}


def test_packages_that_are_kept_for_judging_are_not_there() -> None:
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in {row.package for row in ENVIRONMENTS}}
    assert {name for name, digest in digests.items() if digest[0] > "7"} <= {*SHARED}


@pytest.mark.parametrize("name", ["CartPole-v1", "minigrid:MiniGrid-Empty-5x5-v0", "CliffWalking-v1"])
def test_an_environment_is_made_as_its_row_says(name: str) -> None:
    row = next(row for row in ENVIRONMENTS if row.id == name)
    env = make_environment(row)
    assert env.spec is not None
    assert env.spec.id == name.rpartition(":")[2]
    observation, _ = env.reset(seed=3)
    assert env.observation_space.contains(observation)
    copies = make_copies(row, 2, seed=3)
    assert copies.num_envs == 2
    assert copies.observation_space.shape == env.observation_space.shape


def test_a_time_limit_truncates_an_episode_that_never_ends() -> None:
    row = replace(next(row for row in ENVIRONMENTS if row.id == "CliffWalking-v1"), time_limit=3)
    env = make_environment(row)
    env.reset(seed=3)
    assert [env.step(0)[3] for _ in range(3)] == [False, False, True]


class _Race:
    """Two agents that end together after two steps; the second may stop after one."""

    possible_agents = ("ann", "bob")

    def __init__(self, early: bool = False) -> None:
        self.early = early

    def observation_space(self, name: str) -> Box:
        return Box(-9.0, 9.0, (1,), np.float32)

    def action_space(self, name: str) -> Discrete:
        return Discrete(2)

    def reset(self, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.steps, self.place = 0, dict.fromkeys(self.possible_agents, np.zeros(1, np.float32))
        return self.place, {}

    def step(self, actions: dict[str, int]) -> tuple[dict[str, Any], ...]:
        self.steps += 1
        self.place = {name: place + actions[name] for name, place in self.place.items()}
        rewards = {name: float(place[0]) for name, place in self.place.items()}
        stops = {name: self.early and name == "bob" for name in self.possible_agents}
        return self.place, rewards, stops, dict.fromkeys(self.possible_agents, self.steps == 2), {}


def test_agents_are_copies_and_their_last_observation_is_not_lost() -> None:
    copies = AgentsVecEnv(_Race(), seed=3)
    assert copies.reset().tolist() == [[0.0], [0.0]]
    assert copies.step(np.array([0, 1]))[1].tolist() == [0.0, 1.0]
    observations, rewards, ends, infos = copies.step(np.array([1, 1]))
    assert (observations.tolist(), rewards.tolist(), ends.tolist()) == ([[0.0], [0.0]], [1.0, 2.0], [True, True])
    assert [info["terminal_observation"].tolist() for info in infos] == [[1.0], [2.0]]
    assert [info["TimeLimit.truncated"] for info in infos] == [True, True]


def test_agents_that_end_one_by_one_are_refused() -> None:
    copies = AgentsVecEnv(_Race(early=True), seed=3)
    copies.reset()
    with pytest.raises(ValueError, match="end together"):
        copies.step(np.array([0, 1]))
