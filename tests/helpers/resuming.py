"""Trainings of SB3's models that are interrupted, and whether two runs are the same."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO, RecurrentPPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecMonitor, VecNormalize

from helpers import toys
from whence import KeepAll
from whence.sb3 import InfluenceCallback, RecordResets

STEPS, ROUNDS = 32, 5
RULE = KeepAll()
"""Scores take longer than the rest of such a training; with this rule there are none."""


class Interrupt(BaseCallback):
    """Raise KeyboardInterrupt at a time step."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def _on_step(self):
        if self.num_timesteps >= self.at:
            raise KeyboardInterrupt
        return True


class Walk(gym.Env):
    """A walk with noise whose episodes last about as long as two rounds."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Box(-1, 1, (3,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=3)
        return self.place.astype(np.float32), {}

    def step(self, action):
        self.place = self.place + 0.1 * action + 0.1 * self.np_random.normal(size=3)
        done = bool(self.np_random.random() < 0.5 / STEPS)
        return self.place.astype(np.float32), -float(np.abs(self.place).sum()), done, False, {"is_success": done}


def monitored(make, n=1):
    env = DummyVecEnv([lambda: Monitor(make())] * n)
    env.seed(3)
    return env


def in_processes(make):
    env = SubprocVecEnv([make] * 2, start_method="fork")
    env.seed(3)
    return env


def gymnasium_env():
    return gym.wrappers.TimeLimit(Walk(), 40)


def small(env, algorithm=PPO, **kwargs):
    options = {"n_steps": STEPS, "seed": 3, "device": "cpu", "policy_kwargs": {"net_arch": [8]}}
    if algorithm is not A2C:
        options |= {"batch_size": 16, "n_epochs": 2}
    policy = "MultiInputPolicy" if isinstance(env.observation_space, spaces.Dict) else "MlpPolicy"
    return algorithm(policy, env, **options | kwargs)


MODELS = {
    "walk": lambda: small(monitored(Walk)),
    "normalised": lambda: small(VecNormalize(monitored(gymnasium_env, 3))),
    "frames": lambda: small(VecFrameStack(VecMonitor(DummyVecEnv([Walk] * 2)), 3)),
    "a2c": lambda: small(monitored(Walk, 2), A2C),
    "plain a2c": lambda: small(monitored(Walk, 2), A2C, use_rms_prop=False),
    "a2c as tensorflow's": lambda: small(
        monitored(Walk, 2), A2C, policy_kwargs={"net_arch": [8], "optimizer_class": RMSpropTFLike}
    ),
    "processes": lambda: small(in_processes(lambda: RecordResets(gymnasium_env()))),
    "gsde": lambda: small(monitored(Walk), use_sde=True, sde_sample_freq=4),
    "schedule": lambda: small(monitored(Walk), learning_rate=lambda left: 3e-3 * left, clip_range=lambda left: left),
    "masked": lambda: toys.model(MaskablePPO, seed=3, n_envs=2),
    "masked dict": lambda: toys.model(MaskablePPO, observation="dict", n_steps=16, seed=3),
    "recurrent": lambda: toys.model(RecurrentPPO, n_steps=16, seed=3, n_envs=2),
    "dict": lambda: toys.model(observation="dict", n_steps=16, seed=3),
    "image": lambda: toys.model(observation="image", seed=3),
}


def total(model):
    return ROUNDS * model.n_steps * model.n_envs


def train(make, path, *, until=None, rule=None, **options):
    """Train a fresh model with a run directory; interrupted after the share `until` of all steps."""
    model = make()
    callbacks = [InfluenceCallback(rule or RULE, run=path, **{"save_every": 1, "folds": None, **options})]
    if until is None:
        model.learn(total(model), callback=callbacks)
    else:
        with pytest.raises(KeyboardInterrupt):
            model.learn(total(model), callback=[*callbacks, Interrupt(until * total(model))])
    return model


CLOCKED = {".lock", ".signature", "timings.parquet"}


def contents(path):
    """The bytes of a run's files whose contents do not depend on clocks."""
    files = [file for file in path.rglob("*") if file.is_file() and file.name not in CLOCKED]
    return {str(file.relative_to(path)): file.read_bytes() for file in files if file.parent.name != "checkpoints"}


def assert_same_run(path, other):
    ours, theirs = contents(path), contents(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def assert_same_model(model, other):
    toys.assert_close(model.policy.state_dict(), other.policy.state_dict())
    ours, theirs = (each.policy.optimizer.state_dict()["state"] for each in (model, other))
    assert ours.keys() == theirs.keys()
    for index, state in theirs.items():
        assert all(
            torch.equal(torch.as_tensor(ours[index][key]), torch.as_tensor(value)) for key, value in state.items()
        )
    assert model.num_timesteps == other.num_timesteps
    normalised = [each.get_vec_normalize_env() for each in (model, other)]
    if normalised[0] is not None:
        for key in ("mean", "var"):
            assert np.array_equal(*(getattr(each.obs_rms, key) for each in normalised))
    assert [episode["r"] for episode in model.ep_info_buffer] == [episode["r"] for episode in other.ep_info_buffer]
