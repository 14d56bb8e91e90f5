"""Episodes played again: bit for bit in Gymnasium, checked, drawn, and continued."""

from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

import whence
from helpers.episodes import Jittery, check_all, learn, train
from helpers.toys import Toy, rewrite
from whence import KeepAll, RecordBatch, ReplayError, RunDirectory, attribute, replay_episode
from whence.sb3 import RecordResets
from whence.stored.agents import load_round

pytest.importorskip("Box2D")  # before EnvPool: see Pool.make


class Summing(gym.Env):
    """It shows the sum of the actions that it was given, within their bounds or not."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gym.spaces.Box(-0.1, 0.1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._sum = self.np_random.normal(size=1).astype(np.float32)
        return self._sum, {}

    def step(self, action):
        self._sum = self._sum + action
        return self._sum, 0.0, bool(self.np_random.random() < 0.1), False, {}


PRESETS = ("frozenlake", "acrobot", "minigrid", "lunarlander", "bipedalwalker")
SLOW = ("acrobot", "bipedalwalker", "highway")  # the cart below is controlled as an acrobot is
HIGHWAY = {"vehicles_count": 10, "observation": {"type": "Kinematics", "vehicles_count": 5}}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in SLOW else ()) for name in (*PRESETS, "highway")]
)
def test_every_record_of_the_six_environments_is_observed_again(tmp_path, name):
    steps = {"highway": 64, "bipedalwalker": 2048}.get(name, 128)  # a walker's first falls would not show its world
    settings = {"preset": f"lda-code/{name}", **({"collect_with": "gymnasium"} if name == "minigrid" else {})}
    if name == "highway":
        settings = {"env": "highway_env:highway-v0", "env_kwargs": {"config": HIGHWAY}}
    directory = train(tmp_path / "run", n_steps=steps, **settings)
    assert check_all(directory) == 2 * steps
    assert directory.round("records", 1)["observation_digest"].null_count() == 0


class Legacy(Summing):
    """It draws from another generator than Gymnasium's."""

    def __init__(self, make):
        self._make = make

    def reset(self, *, seed=None, options=None):
        if seed is not None or self._np_random is None:
            self.np_random = self._make(seed)
        self._sum = self.np_random.normal(size=1).astype(np.float32)
        return self._sum, {}


def legacy(kind):
    return lambda: Legacy(lambda seed: np.random.Generator(kind(seed)))


PLAYED = {
    "discrete": (lambda: gym.make("CartPole-v1"), None, 128),
    "continuous": (lambda: gym.make("Pendulum-v1"), None, 128),
    "clipped actions": (Summing, Summing, 128),
    "a world that is fresh in its first episode": (lambda: gym.make("BipedalWalker-v3"), None, 128),
    **{
        kind.__name__: (lambda kind=kind: RecordResets(legacy(kind)()), legacy(kind), 128)
        for kind in (np.random.MT19937, np.random.Philox, np.random.SFC64)
    },
    "normalised": (lambda: VecNormalize(make_vec_env("CartPole-v1", 2)), None, 2 * 2 * 64),
    "stacked": (lambda: VecFrameStack(make_vec_env("CartPole-v1", 2), 3), None, 2 * 2 * 64),
}
"""Environments in training, what makes them again where their id does not, and how many records there are."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in ("Philox", "SFC64") else ()) for name in PLAYED]
)
def test_a_callbacks_run_is_played_again(tmp_path, name):
    make, again, count = PLAYED[name]
    directory = learn(tmp_path / "run", make(), rule=KeepAll())
    assert check_all(directory, **({} if again is None else {"env": again})) == count
    assert name != "normalised" or directory.config["vec_wrappers"] == [{"class": "VecNormalize"}]


def test_dict_observations(tmp_path):
    env = DummyVecEnv([lambda: gym.wrappers.TimeLimit(Toy(observation="dict"), 9)])
    small = {"features_extractor_kwargs": {"cnn_output_dim": 4}}
    directory = learn(tmp_path / "run", env, policy="MultiInputPolicy", policy_kwargs=small, rule=KeepAll())
    with pytest.raises(ReplayError, match=r"Toy .*argument observation"):
        replay_episode(directory, 0)
    assert check_all(directory, env=lambda: gym.wrappers.TimeLimit(Toy(observation="dict"), 9)) == 2 * 64


def test_subprocesses_need_the_wrapper(tmp_path):
    # Those that have it are played again in test_environment_as_trained.py.
    settings = {"vec_env_cls": SubprocVecEnv, "vec_env_kwargs": {"start_method": "fork"}}
    with closing(make_vec_env("CartPole-v1", 2, **settings)) as env:
        plain = learn(tmp_path / "plain", env, rule=KeepAll())
    with pytest.raises(ReplayError, match=r"RecordResets"):
        replay_episode(plain, 0)


def test_learning_goes_on_and_episodes_cross_rounds(tmp_path):
    directory = learn(tmp_path / "run", gym.make("MountainCar-v0"), times=3, rule=KeepAll())
    assert check_all(directory) == 3 * 2 * 64
    first = directory.round("records", 1)["episode_id"].to_list()
    crossing = set(first) & set(directory.round("records", 2)["episode_id"].to_list())
    assert crossing
    assert len(replay_episode(directory, crossing.pop()).record_ids) > 64


def test_hidden_randomness_is_detected_and_not_drawn(tmp_path):
    directory = learn(tmp_path / "run", Jittery(gym.make("CartPole-v1")), rule=KeepAll())
    other = {"env": lambda: Jittery(gym.make("CartPole-v1", render_mode="rgb_array"), seed=5)}
    assert replay_episode(directory, 1, **other).mismatch is None  # what it holds comes back at a reset
    replay = replay_episode(directory, 0, **other, frames="all")  # the first reset is not noted
    assert "At step 0 the observation differs" in replay.mismatch
    assert "generator of its own" in replay.mismatch
    assert replay.frames == {}


@pytest.fixture(scope="module")
def cart(tmp_path_factory):
    return train(tmp_path_factory.mktemp("cart") / "run", env="CartPole-v1", n_steps=64)


def test_frames_of_the_steps_asked_for(cart):
    state = np.random.get_state()[1].tolist(), torch.get_rng_state()
    replay = replay_episode(cart, 0, frames=[0, 3], last_step=5)
    assert sorted(replay.frames) == [0, 3]
    assert replay.frames[3].shape == (400, 600, 3)
    assert replay.frames[3].dtype == np.uint8
    assert (replay.frames[0] != replay.frames[3]).any()
    assert len(replay.observations) == len(replay.rewards) == 6
    assert (np.random.get_state()[1].tolist(), True) == (state[0], torch.equal(torch.get_rng_state(), state[1]))
    with pytest.raises(ReplayError, match="Episode 999"):
        replay_episode(cart, 999)


def test_envpools_episodes_are_not_played_again(tmp_path):
    pytest.importorskip("envpool")
    directory = train(tmp_path / "run", env="CartPole-v1", collect_with="envpool", rounds=1, n_steps=64)
    with pytest.raises(ReplayError, match=r"EnvPool tells none: .*--collect-with gymnasium"):
        replay_episode(directory, 0, frames=[0])


def test_records_come_back_from_a_table(cart):
    model, records = load_round(cart, 2)
    table = records.to_polars(observations=True)
    again = RecordBatch.from_polars(table, space=model.observation_space, gamma=0.99, gae_lambda=0.95)
    assert again.fingerprint == records.fingerprint
    for name, column in records.columns.items():
        assert torch.equal(again.columns[name], column), name
    with pytest.raises(whence.InvalidRecords, match="no column `log_prob`"):
        RecordBatch.from_polars(table.drop("log_prob"))
    with pytest.raises(whence.InvalidRecords, match="load_round"):
        RecordBatch.from_polars(table.drop("observation"))


@pytest.mark.parametrize(
    ("algorithm", "kwargs"),
    [(PPO, {"net_arch": [8], "activation_fn": torch.nn.ReLU}), (A2C, {"ortho_init": False})],
)
def test_a_callbacks_run_is_scored_again(tmp_path, algorithm, kwargs):
    directory = learn(tmp_path / "run", gym.make("CartPole-v1"), algorithm=algorithm, policy_kwargs=kwargs)
    model, records = load_round(directory, 2)
    influence = attribute(model.policy, records, target=whence.Return(), objective=whence.sb3.model_objective(model))
    np.testing.assert_allclose(influence.scores, directory.round("records", 2)["score"], rtol=1e-4, atol=1e-6)


def test_what_cannot_be_built_by_name_is_named(tmp_path):
    directory = learn(tmp_path / "run", gym.make("CartPole-v1"))
    extractor = {"features_extractor_class": "os.system"}
    rewrite(directory.path / "config.json", lambda document: document["config"].update(policy_kwargs=extractor))
    with pytest.raises(whence.RunDirectoryError, match=r"features_extractor_class is .os\.system."):
        load_round(RunDirectory.open(directory.path), 1)
