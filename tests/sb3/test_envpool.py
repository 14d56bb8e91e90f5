"""EnvPool beside Gymnasium: the same steps, ends and beginnings; the same returns within what chance allows."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from scipy import stats
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv

import whence
from whence import IIF, RunDirectory, WhenceError
from whence.core import preserve_rng_state
from whence.lab.agents import RunConfig, configure, make_evaluation_env, make_training_env, run
from whence.lab.agents.environments import EnvPoolVecEnv
from whence.lab.agents.training import make_model
from whence.lab.arms import read_presets
from whence.sb3 import InfluenceCallback
from whence.sb3.episodes import Pool, evaluate_pool
from whence.stored.agents import load_round, measure_returns
from whence.stored.agents.environments import measure_return

pytest.importorskip("Box2D")  # before EnvPool: see Pool.make
pytest.importorskip("envpool")

GRID = RunConfig("minigrid:MiniGrid-Empty-8x8-v0", "ppo", 0, observe="image")


def test_a_grid_without_chance_is_stepped_alike() -> None:
    # Turned about and walked through at random, until time limits have cut episodes off and goals have ended others.
    plain = make_evaluation_env(GRID, 3)
    pool = EnvPoolVecEnv(Pool("minigrid:MiniGrid-Empty-8x8-v0", {}, "image"), 3, 0)
    rng = np.random.default_rng(0)
    assert np.array_equal(plain.reset(), pool.reset())
    ends = {"reached": 0, "cut off": 0}
    for _ in range(700):
        actions = rng.choice([0, 1, 2, 2, 2], size=3)
        mine, theirs = pool.step(actions), plain.step(actions)
        assert np.array_equal(mine[0], theirs[0])
        assert np.allclose(mine[1], theirs[1])
        assert np.array_equal(mine[2], theirs[2])
        for one, other in zip(mine[3], theirs[3], strict=True):
            assert ("terminal_observation" in one) == ("terminal_observation" in other)
            if "terminal_observation" in one:
                assert np.array_equal(one["terminal_observation"], other["terminal_observation"])
                assert one["TimeLimit.truncated"] == other["TimeLimit.truncated"]
                assert one["episode"]["l"] == other["episode"]["l"]
                assert one["episode"]["r"] == pytest.approx(other["episode"]["r"], abs=1e-5)
                ends["cut off" if one["TimeLimit.truncated"] else "reached"] += 1
    assert min(ends.values()) > 0, ends


HIGHWAY = RunConfig(
    "highway_env:highway-v0",
    "ppo",
    0,
    env_kwargs={"config": {"vehicles_count": 10}},
    pool_kwargs=read_presets()["lda-code/highway"]["pool_kwargs"],
)
"""What the preset trains in, by Gymnasium's names."""


IDLE, SLOWER = 1, 4
SHORT = {"max_episode_steps": 300}
"""A walker that does not fall would stand for 1600 steps."""


@pytest.mark.parametrize(
    ("config", "episodes", "steps"),
    [
        pytest.param(RunConfig("Acrobot-v1", "ppo", 0), 256, 12_288, marks=pytest.mark.long),
        (RunConfig("LunarLander-v3", "ppo", 0), 64, 1_024),
        pytest.param(
            RunConfig("BipedalWalker-v3", "ppo", 0, env_kwargs=SHORT, pool_kwargs=SHORT),
            *(40, 4_096),
            marks=pytest.mark.long,
        ),
        pytest.param(
            replace(GRID, policy="CnnPolicy", policy_kwargs={"features_extractor_class": "MiniGridCNN"}),
            *(128, 8_192),
            marks=pytest.mark.long,
        ),
        pytest.param(HIGHWAY, 24, 0, marks=pytest.mark.long),
    ],
    ids=lambda given: given.env.rpartition(":")[2] if isinstance(given, RunConfig) else str(given),
)
def test_one_policy_has_the_same_mean_return(config: RunConfig, episodes: int, steps: int) -> None:
    if config is HIGHWAY:
        pytest.importorskip("highway_env")
    fast_learner = {"n_steps": 128, "batch_size": 256, "learning_rate": 3e-3}
    training = replace(config, collect_with="envpool", n_envs=16, hyperparameters=fast_learner)
    model = make_model(training, make_training_env(training))
    model.learn(steps)  # until returns vary
    # An environment that is through with its episodes is stepped on until the last one is: fewer waste less.
    envs = make_evaluation_env(config, 1 if config is HIGHWAY else min(episodes // 3, 32))
    mean, error = measure_return(model, envs, episodes=episodes, seed=1)
    returns = evaluate_pool(model, Pool(config.env, config.pool_kwargs, config.observe), episodes=256, seed=1)
    assert stats.mode(returns).count < 0.3 * len(returns)
    apart = abs(returns.mean() - mean)
    assert apart <= stats.norm.ppf(0.975) * (error + stats.sem(returns))


def test_evaluations_are_reproducible_and_change_nothing() -> None:
    model = PPO("MlpPolicy", gym.make("CartPole-v1"), device="cpu", seed=0)
    model.policy.train()
    state = torch.get_rng_state()
    first = evaluate_pool(model, Pool("CartPole-v1", {}), episodes=30, seed=5)
    assert np.array_equal(first, evaluate_pool(model, Pool("CartPole-v1", {}), episodes=30, seed=5))
    assert not np.array_equal(first, evaluate_pool(model, Pool("CartPole-v1", {}), episodes=30, seed=6))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.policy.training
    # In CartPole an episode's return is its length: each is one whole episode, long ones not cut, short ones once.
    assert first.min() >= 8
    assert len(set(first.tolist())) > 10


def test_continuous_actions_are_clipped_as_sb3_clips_them() -> None:
    model = PPO("MlpPolicy", gym.make("Pendulum-v1"), device="cpu", seed=0, policy_kwargs={"log_std_init": 2.0})
    config = RunConfig("Pendulum-v1", "ppo", 0)
    mean, error = measure_return(model, make_evaluation_env(config, 64), episodes=64, seed=1)
    returns = evaluate_pool(model, Pool("Pendulum-v1", {}), episodes=128, seed=1)
    assert abs(returns.mean() - mean) <= stats.norm.ppf(0.975) * (error + stats.sem(returns))


def test_training_collects_from_a_pool(tmp_path: Any) -> None:
    config = configure(
        preset="lda-code/highway", arm="iif", rounds=2, eval_episodes=4, hyperparameters={"n_steps": 64}, n_envs=2
    )
    run(config, tmp_path)
    directory = RunDirectory.open(tmp_path)
    assert directory.table("evaluations").height == 3
    assert directory.table("metrics")["episode_return"].null_count() == 0
    model, records = load_round(directory, 2)
    scores = whence.attribute(
        model.policy, records, target=whence.Return(), objective=whence.PPOClip(clip_range=0.2)
    ).scores
    torch.testing.assert_close(scores, torch.tensor(directory.round("records", 2)["score"].to_list()))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"env": "LunarLandr-v3", "collect_with": "envpool"},
            "EnvPool has no environment 'LunarLandr-v3'.*LunarLander",
        ),
        (
            {"env": "Acrobot-v1", "evaluate_with": "envpool", "pool_kwargs": {"gravity": 3}},
            "EnvPool's Acrobot-v1 refuses {'gravity': 3}",
        ),
        ({"env": "Acrobot-v1", "evaluate_with": "envpol"}, "evaluate_with 'envpol' is unknown. Did you mean"),
        ({"env": "Acrobot-v1", "observe": "image"}, "Acrobot-v1 has no part 'image' to observe.*a Box"),
        (
            {"env": GRID.env, "observe": "picture"},
            "no part 'picture' to observe; its observations are direction, image",
        ),
        (
            {"env": GRID.env, "observe": "image", "policy_kwargs": {"features_extractor_class": "MiniCNN"}},
            "MiniGridCNN",
        ),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(WhenceError, match=message):
        configure(**asked)


def test_missing_envpool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(whence.Unsupported, match=r"pip install '.\[fast\]'"):
        configure(env="Acrobot-v1", evaluate_with="envpool")


class Flat(BaseFeaturesExtractor):
    def __init__(self, observation_space: gym.spaces.Dict) -> None:
        super().__init__(observation_space, features_dim=4 + 7 * 7 * 3)

    def forward(self, observations: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.flatten(1) for part in (observations["direction"], observations["image"])], dim=1)


def test_a_policy_of_all_parts_is_trained_by_the_seed_and_evaluated_on_a_pool() -> None:
    pool = Pool("minigrid:MiniGrid-Empty-Random-6x6-v0", {})  # whose episodes begin at random places

    def train() -> tuple[PPO, InfluenceCallback]:
        env, callback = EnvPoolVecEnv(pool, 2, seed=3), InfluenceCallback(IIF(0.5))
        options: dict[str, Any] = {"n_steps": 32, "batch_size": 32, "device": "cpu", "seed": 0}
        model = PPO("MultiInputPolicy", env, policy_kwargs={"features_extractor_class": Flat}, **options)
        return model.learn(3 * 64, callback=callback), callback

    (model, callback), (twin, _) = train(), train()
    assert callback.round.number == 3
    assert callback.round.records.observations["image"].shape == (64, 3, 7, 7)
    assert all(torch.equal(a, b) for a, b in zip(model.policy.parameters(), twin.policy.parameters(), strict=True))
    returns = evaluate_pool(model, pool, episodes=8, seed=1)
    assert len(set(returns.tolist())) > 1


class Still(gym.Env[Any, Any]):
    """Always the same observation; notes the actions of each episode."""

    def __init__(self, length: int) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = gym.spaces.Box(-100, 100, (1,), np.float32)
        self.length, self.episodes = length, list[list[float]]()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.episodes.append([])
        return np.ones(3, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.episodes[-1].append(round(float(action[0]), 4))
        return np.ones(3, np.float32), float(action[0]), len(self.episodes[-1]) == self.length, False, {}


class StillPool:
    """A pool of such environments."""

    def __init__(self, envs: list[Still]) -> None:
        self.envs = envs

    def reset(self) -> Any:
        return np.stack([env.reset()[0] for env in self.envs]), {"env_id": np.arange(len(self.envs), dtype=np.int32)}

    def step(self, actions: Any, ids: Any) -> Any:
        steps = [self.envs[env].step(action) for env, action in zip(ids, actions, strict=True)]
        return *(np.array(column) for column in list(zip(*steps, strict=True))[:4]), {"env_id": ids}

    def close(self) -> None:
        pass


def played_with_gymnasium(model: PPO, seed: int, monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    envs = [Still(5) for _ in range(4)]
    measure_return(model, DummyVecEnv([lambda env=env: Monitor(env) for env in envs]), episodes=12, seed=seed)
    return [episode for env in envs for episode in env.episodes[:3]]


def played_in_a_pool(model: PPO, seed: int, monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    envs = [Still(length) for length in (5, 1, 3, 4, 9)]
    monkeypatch.setattr(Pool, "make", lambda *_: StillPool(envs))
    evaluate_pool(model, Pool("Still-v0", {}), episodes=5, seed=seed)
    return [episode for env in envs for episode in env.episodes]


@pytest.mark.parametrize("played", [played_with_gymnasium, played_in_a_pool])
@pytest.mark.parametrize("every", [-1, 1, 2])
def test_state_dependent_noise_is_each_episodes_own(every: int, played: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"device": "cpu", "seed": 0, "policy_kwargs": {"log_std_init": 0.0}}
    model = PPO("MlpPolicy", Still(5), use_sde=True, sde_sample_freq=every, **options)
    own = model.policy.action_dist
    before = {name: id(value) for name, value in vars(own).items()}
    noise = own.exploration_mat.detach().clone(), own.exploration_matrices.detach().clone()
    episodes = played(model, 1, monkeypatch)
    # In one state and with one noise, actions are one number: it tells how long a noise stays, and who has it.
    held = max(map(len, episodes)) if every < 0 else every
    blocks = [tuple(episode[at : at + held]) for episode in episodes for at in range(0, len(episode), held)]
    assert all(len(set(block)) == 1 for block in blocks)
    assert len({block[0] for block in blocks}) == len(blocks)
    assert episodes == played(model, 1, monkeypatch)
    assert episodes != played(model, 2, monkeypatch)
    assert model.policy.action_dist is own
    assert {name: id(value) for name, value in vars(own).items()} == before
    assert torch.equal(own.exploration_mat, noise[0])
    assert torch.equal(own.exploration_matrices, noise[1])


def test_a_run_that_was_evaluated_in_a_pool_is_measured_in_one(tmp_path: Path) -> None:
    config = configure(env="CartPole-v1", evaluate_with="envpool", rounds=1, hyperparameters={"n_steps": 64})
    with preserve_rng_state():
        run(config, tmp_path)
    directory = RunDirectory.open(tmp_path)
    model, _ = load_round(directory, 1)
    params = {name: tensor.detach().clone() for name, tensor in model.policy.named_parameters()}
    seed = int(np.random.SeedSequence([7, 0]).generate_state(1)[0])
    with measure_returns(directory, model, 1, episodes=8, seed=7) as measure:
        measured = measure(params, 0)
    assert measured == evaluate_pool(model, Pool("CartPole-v1", {}), episodes=8, seed=seed >> 1).mean()
