"""Every agent's run, of the command or of a script, is read, gone on with and trained again by the same functions."""

import json

import gymnasium as gym
import numpy as np
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecTransposeImage

import whence.sb3
from whence import IIF
from whence.cli import app
from whence.core import preserve_rng_state
from whence.lab.agents import RunConfig, run
from whence.runs import RunDirectory
from whence.sb3 import InfluenceCallback
from whence.stored.agents.rounds import compare_policies, load_round

SETTINGS = {"n_steps": 32, "batch_size": 16, "n_epochs": 2, "learning_rate": 0.01}
CONFIG = RunConfig("FrozenLake-v1", "iif", 3, hyperparameters=SETTINGS, rounds=4, eval_episodes=10, n_envs=2)


def test_resume_goes_on_with_a_run_of_the_command_to_the_same_bits(tmp_path):
    run(CONFIG, tmp_path / "whole")

    def stop(number, metrics):
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(CONFIG, tmp_path / "parts", stop)
    env = DummyVecEnv([lambda: Monitor(gym.make("FrozenLake-v1"))] * 2)
    model, callback = whence.sb3.resume(tmp_path / "parts", env)
    model.learn(CONFIG.rounds * 64, callback=callback)
    assert not whence.lab.is_finished(CONFIG, tmp_path / "parts")
    run(CONFIG, tmp_path / "parts")  # measures the test returns that are missing
    whole, parts = (RunDirectory.open(tmp_path / name) for name in ("whole", "parts"))
    assert parts.config == whole.config
    assert "resumed" not in parts.notes
    for table in ("metrics", "evaluations"):
        assert_frame_equal(parts.table(table), whole.table(table), check_exact=True)
    for number in range(1, CONFIG.rounds + 1):
        assert_frame_equal(parts.round("records", number), whole.round("records", number), check_exact=True)
    for name, tensor in whole.policy(CONFIG.rounds + 1).items():
        assert torch.equal(tensor, parts.policy(CONFIG.rounds + 1)[name])


def test_the_command_takes_the_run_of_a_script(tmp_path, capsys):
    env = gym.make("FrozenLake-v1", is_slippery=False)
    model = PPO("MlpPolicy", env, seed=0, **SETTINGS)
    model.learn(64, callback=InfluenceCallback(IIF(0.5), run=tmp_path, recordings=[2]))
    options = ["--where", "advantage > 1", "--rounds", "2", "--seeds", "1", "--test-episodes", "2", "--json"]
    assert app(["prove", str(tmp_path), *options], standalone_mode=False) is None
    assert len(json.loads(capsys.readouterr().out)["outcomes"]) == 8


class Pixel(gym.Env):
    """A pixel that falls, and is moved left or right."""

    observation_space = gym.spaces.Box(0, 255, (40, 40, 1), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row, self.column = 0, int(self.np_random.integers(40))
        return self._draw(), {}

    def step(self, action):
        self.row, self.column = self.row + 3, (self.column + 3 * int(action) - 3) % 40
        return self._draw(), float(self.column < 20), self.row > 30, False, {}

    def _draw(self):
        image = np.zeros((40, 40, 1), np.uint8)
        image[self.row : self.row + 4, self.column : self.column + 4] = 255
        return image


@pytest.mark.parametrize("transposed_first", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_run_on_stacked_images_shows_what_its_round_changed(tmp_path, transposed_first):
    base = DummyVecEnv([Pixel] * 4)
    env = VecFrameStack(VecTransposeImage(base), 4) if transposed_first else VecTransposeImage(VecFrameStack(base, 4))
    settings = {"n_steps": 16, "batch_size": 32, "n_epochs": 1, "seed": 0, "learning_rate": 0.01}
    with preserve_rng_state():
        model = PPO("CnnPolicy", env, policy_kwargs={"features_extractor_kwargs": {"features_dim": 8}}, **settings)
    callback = InfluenceCallback(IIF(0.5), run=tmp_path)
    seen = []
    callback.choose = lambda records: seen.append(records) or InfluenceCallback.choose(callback, records)
    model.learn(128, callback=callback)
    directory = RunDirectory.open(tmp_path)
    assert not any(
        name.startswith("observation") and "digest" not in name for name in directory.round("records", 1).columns
    )
    _, records = load_round(directory, 2, env=Pixel)
    assert torch.equal(records.observations, seen[1].observations)
    changes = compare_policies(directory, 1, env=Pixel)
    assert changes.height == 64
    assert changes["divergence"].max() > 0
    assert pl.Series(changes["value_before"]).is_finite().all()
