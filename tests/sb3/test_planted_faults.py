"""Faults that are planted in an environment are named, by whichever way it was recorded."""

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from stable_baselines3 import DQN
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import nn
from torch.distributions import Categorical

import whence
from whence.sb3 import InfluenceCallback

COUNT, STEPS, LIMIT = 4, 2500, 40


class Glider(gym.Env[Any, Any]):
    """A point on a line that is pushed against wind and drag; it ends beyond 20."""

    observation_space = gym.spaces.Box(-99, 99, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata: Mapping[str, Any] = {"render_modes": []}

    def __init__(self, frozen: float | None = None) -> None:
        self.frozen = frozen

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.speed, self.wind, self.heat = self.np_random.normal(size=4)
        return self._observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.wind = 0.9 * self.wind + 0.4 * self.np_random.normal()
        self.speed += 0.3 * (2 * int(action) - 1) - 0.1 * self.speed + 0.1 * self.wind
        self.x += 0.3 * self.speed
        self.heat = 0.8 * self.heat + 0.1 * self.speed**2 + 0.2 * self.np_random.normal()
        return self._observe(), float(1 - 0.1 * self.x**2), abs(self.x) > 20, False, {}

    def _observe(self) -> Any:
        seen = np.array([self.x, self.speed, self.wind, self.heat], np.float32)
        if self.frozen is not None:
            seen[2] = self.frozen
        return seen


class Swapped(gym.ActionWrapper[Any, Any, Any]):
    def action(self, action: Any) -> Any:
        return 1 - action


class LimitAsEnd(gym.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated or truncated, False, info


def make(fault: str, index: int = 0) -> gym.Env[Any, Any]:
    """Return an environment with a fault; actions are swapped in that of index 2 alone."""
    env: gym.Env[Any, Any] = TimeLimit(Glider({"zero": 0.0, "constant": 1.5}.get(fault)), LIMIT)
    if fault == "swap" and index == 2:
        return Swapped(env)
    return LimitAsEnd(env) if fault == "limit" else env


def makers(fault: str) -> list[Callable[[], gym.Env[Any, Any]]]:
    return [lambda index=index: make(fault, index) for index in range(COUNT)]  # type: ignore[misc]


def play_env(fault: str, path: Any) -> None:
    env, rng = whence.record(make(fault), path), np.random.default_rng(0)
    env.reset(seed=0)
    for _ in range(STEPS * COUNT):
        if any(env.step(int(rng.integers(2)))[2:4]):
            env.reset()
    env.close()


def play_vector(fault: str, path: Any) -> None:
    env, rng = whence.record(SyncVectorEnv(makers(fault)), path), np.random.default_rng(0)
    env.reset(seed=0)
    for _ in range(STEPS):
        env.step(rng.integers(2, size=COUNT))
    env.close()


def train_dqn(fault: str, path: Any, callback: Any = None) -> None:
    env = DummyVecEnv(makers(fault))
    env = env if callback else whence.record(env, path)
    model = DQN("MlpPolicy", env, learning_starts=100, train_freq=16, policy_kwargs={"net_arch": [8]}, seed=0)
    model.learn(STEPS * COUNT, callback=callback)
    env.close()


def train_dqn_with_callback(fault: str, path: Any) -> None:
    train_dqn(fault, path, InfluenceCallback(run=path))


class Agents:
    """Each environment as an agent of PettingZoo's kind; those that have ended wait for the others."""

    possible_agents = tuple("abcd")

    def __init__(self, fault: str) -> None:
        self.envs = dict(zip(self.possible_agents, (make() for make in makers(fault)), strict=True))

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return Glider.observation_space

    def action_space(self, agent: str) -> gym.Space[Any]:
        return Glider.action_space

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.agents = [*self.possible_agents]
        seeds = [None if seed is None else seed + number for number in range(COUNT)]
        each = [env.reset(seed=seed) for env, seed in zip(self.envs.values(), seeds, strict=True)]
        return tuple(dict(zip(self.agents, part, strict=True)) for part in zip(*each, strict=True))

    def step(self, actions: Mapping[str, int]) -> Any:
        each = {agent: self.envs[agent].step(action) for agent, action in actions.items()}
        parts = [{agent: one[part] for agent, one in each.items()} for part in range(5)]
        self.agents = [agent for agent in self.agents if not (parts[2][agent] or parts[3][agent])]
        return tuple(parts)

    def close(self) -> None:
        pass


def play_agents(fault: str, path: Any) -> None:
    env: Any = whence.record(Agents(fault), path)
    rng = np.random.default_rng(0)
    for episode in range(STEPS // LIMIT):
        env.reset(seed=COUNT * episode)
        while env.agents:
            env.step({agent: int(rng.integers(2)) for agent in env.agents})
    env.close()


def read_actor(actor: Any, inputs: Any) -> whence.Outputs:
    policy = Categorical(logits=actor(inputs["observations"]))
    return whence.Outputs(policy.log_prob(inputs["actions"]), entropy=policy.entropy())


def run_loop(fault: str, path: Any) -> None:
    """Collect in CleanRL's manner, and write the learner's side alone."""
    torch.manual_seed(0)
    actor, run = nn.Linear(4, 2), whence.Run(path, whence.KeepAll())
    envs = SyncVectorEnv(makers(fault), autoreset_mode=AutoresetMode.SAME_STEP)
    seen, start = envs.reset(seed=0)[0], np.ones(COUNT, bool)
    for _ in range(STEPS // 500):
        rows = []
        for _ in range(500):
            with torch.no_grad():
                policy = Categorical(logits=0.1 * actor(torch.as_tensor(seen)))
                actions = policy.sample()
            following, rewards, terminated, truncated, _ = envs.step(actions.numpy())
            rows.append((seen, actions, policy.log_prob(actions), rewards.astype("f"), start, terminated, truncated))
            seen, start = following, terminated | truncated
        columns = [torch.as_tensor(np.stack(column)) for column in zip(*rows, strict=True)]
        names = "observations", "actions", "log_probs", "rewards", "episode_starts"
        records = whence.RecordBatch.from_rollout(
            **dict(zip(names, columns, strict=False)), advantages=torch.randn(500, COUNT)
        )
        run.write_round(whence.ModuleView(actor, read_actor), records, ends=(columns[5], columns[6]))
    run.close()


class Batch(gym.Env[Any, Any]):
    """The environments as one object of tensors, in Isaac Lab's manner."""

    def __init__(self, fault: str) -> None:
        self.envs, self.num_envs = [make() for make in makers(fault)], COUNT
        self.single_observation_space, self.single_action_space = Glider.observation_space, Glider.action_space
        self.observation_space = gym.vector.utils.batch_space(Glider.observation_space, COUNT)
        self.action_space = gym.vector.utils.batch_space(Glider.action_space, COUNT)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        seeds = [None if seed is None else seed + number for number in range(COUNT)]
        each = [env.reset(seed=one)[0] for env, one in zip(self.envs, seeds, strict=True)]
        return torch.as_tensor(np.stack(each)), {}

    def step(self, action: Any) -> Any:
        each = [[*env.step(int(one))[:4]] for env, one in zip(self.envs, action, strict=True)]
        for env, parts in zip(self.envs, each, strict=True):
            parts[0] = env.reset()[0] if parts[2] or parts[3] else parts[0]
        return *(torch.as_tensor(np.stack(part)) for part in zip(*each, strict=True)), {}


def play_batch(fault: str, path: Any) -> None:
    env = whence.record(Batch(fault), path)
    torch.manual_seed(0)
    env.reset(seed=0)
    for _ in range(STEPS):
        env.step(torch.randint(2, (COUNT,)))
    env.close()


def train_rllib(fault: str, path: Any) -> None:
    pytest.importorskip("ray")
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.tune import register_env

    register_env("glider", lambda config: whence.record(make(fault), path, overwrite=True))
    config = PPOConfig().environment("glider").debugging(seed=0).rl_module(model_config={"fcnet_hiddens": [8]})
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=1)
    config.training(train_batch_size_per_learner=2000, minibatch_size=500, num_epochs=1)
    algorithm = config.build_algo()
    for _ in range(STEPS * COUNT // 2000):
        algorithm.train()
    algorithm.env_runner.env.close()
    algorithm.stop()
    ray.shutdown()


WAYS = {
    "environment": play_env,
    "vector": play_vector,
    "DQN": train_dqn,
    "callback": train_dqn_with_callback,
    "agents": play_agents,
    "loop": run_loop,
    "batch": play_batch,
    "RLlib": train_rllib,
}

NAMED = {
    "swap": "swapped in environment 2",
    "limit": "is reported as an end",
    "zero": "x2 is always 0",
}
"""What a finding's title says of a fault. A constant other than 0 is not named: it may be a parameter of the world."""

ALONE = "environment", "RLlib"
"""Ways that record one environment, which has no copies to compare actions with."""

SHORT = ("vector", "none"), ("vector", "swap"), ("loop", "limit")
"""What is not left to long tests: reading a run takes seconds."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*Overriding environment:UserWarning")
@pytest.mark.parametrize(
    ("way", "fault"),
    [
        pytest.param(way, fault, marks=() if (way, fault) in SHORT else pytest.mark.long)
        for way in WAYS
        for fault in ("none", *NAMED)
        if fault != "swap" or way not in ALONE
    ],
)
def test_a_fault_is_named_and_a_sound_environment_is_not_accused(tmp_path: Any, way: str, fault: str) -> None:
    WAYS[way](fault, tmp_path / "run")
    titles = [finding.title for finding in whence.find(tmp_path / "run")]
    if fault == "none":
        assert titles == []
    else:
        assert any(NAMED[fault] in title for title in titles), titles
        others = [text for other, text in NAMED.items() if other != fault]
        assert not any(text in title for text in others for title in titles), titles
