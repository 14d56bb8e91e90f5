"""A training that continues in another environment says what differs; in the same one it says nothing."""

import functools
import logging
import operator
from collections import deque
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)

from whence import KeepAll, RunDirectory
from whence.sb3 import InfluenceCallback, RecordResets
from whence.sb3.episodes.resets import ResetTracker

GAIN = 0.5


def cart(**options):
    return gym.make("CartPole-v1", **options)


def train(run, env, rounds, *, seed=None, **options):
    model = PPO("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, seed=seed, device="cpu", **options)
    model.learn(16 * rounds * model.n_envs, callback=InfluenceCallback(KeepAll(), run=run))
    model.env.close()
    return model


def follow(env):
    """Return what has followed environments for some episodes, as a training does; it describes what they hold."""
    vec_env = env if isinstance(env, VecEnv) else DummyVecEnv([lambda: Monitor(env)])
    vec_env.reset()
    tracker = ResetTracker(vec_env)
    with tracker.wrapped():
        for _ in range(40):
            vec_env.step(np.array([vec_env.action_space.sample() for _ in range(vec_env.num_envs)]))
    return tracker


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.WARNING, logger="whence")


def scale(k, reward):
    return k * reward


def scale_by_default(k):
    def scaled(reward, *, gain=k):
        return gain * reward

    return scaled


def scale_by_closure(k):
    return lambda reward: k * reward


@dataclass(slots=True)
class Scale:
    k: float

    def __call__(self, reward):
        return self.k * reward

    def method(self, reward):
        return self.k * reward


class Scaled(gym.Wrapper):
    """It holds what it is given under other names, and counts."""

    def __init__(self, env, config):
        super().__init__(env)
        self.gains = {"reward": config["gain"], "seen": []}
        self.steps, self.recent, self.sums = 0, deque(maxlen=4), [0.0]

    def reset(self, **options):
        returned = super().reset(**options)
        self.unwrapped.force_mag = 10 + self.np_random.uniform()  # the dynamics differ in each episode
        self.goal = self.np_random.normal(size=2)
        return returned

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        self.steps += 1
        self.recent.append(observation)
        self.sums[0] += reward
        return observation, self.gains["reward"] * reward, *rest


class Global(gym.Wrapper):
    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, GAIN * reward, *rest


class OfClass(gym.Wrapper):
    gain = 0.5

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        return observation, self.gain * reward, *rest


class ScaledVec(VecEnvWrapper):
    def __init__(self, venv, k):
        super().__init__(venv)
        self.weights = np.full(300, k)

    def reset(self):
        return self.venv.reset()

    def step_wait(self):
        observations, rewards, dones, infos = self.venv.step_wait()
        return observations, self.weights[0] * rewards, dones, infos


class Strict:
    """It raises another error than AttributeError for a name that it lacks, as configurations may."""

    def __init__(self, **settings):
        vars(self)["settings"] = settings

    def __getattr__(self, name):
        return vars(self)["settings"][name]

    def __getitem__(self, name):
        return self.settings[name]


class Held(gym.RewardWrapper):
    def __init__(self, env, config):
        super().__init__(env)
        self.config = config

    def reward(self, reward):
        return self.config["gain"] * reward


def set_global(k):
    globals()["GAIN"] = k
    return Global(cart())


def set_attribute(k):
    env = cart()
    env.unwrapped.gravity = k
    return env


def transform(function):
    return wrappers.TransformReward(cart(), function)


FORMS = {
    "partial": (lambda k: transform(functools.partial(scale, k)), "TransformReward.func.args.0 was 0.5, now 0.9"),
    "closure": (lambda k: transform(scale_by_closure(k)), "TransformReward.func.k was 0.5, now 0.9"),
    "default": (lambda k: transform(scale_by_default(k)), "TransformReward.func.gain was 0.5, now 0.9"),
    "object": (lambda k: transform(Scale(k)), "TransformReward.func.k was 0.5, now 0.9"),
    "method": (lambda k: transform(Scale(k).method), "TransformReward.func.__self__.k was 0.5, now 0.9"),
    "dict": (lambda k: Scaled(cart(), {"gain": k}), "Scaled.gains.reward was 0.5, now 0.9"),
    "two of a class": (
        lambda k: Scaled(Scaled(cart(), {"gain": 1}), {"gain": k}),
        "Scaled.gains.reward was 0.5, now 0.9",
    ),
    "inner of a class": (
        lambda k: Scaled(Scaled(cart(), {"gain": k}), {"gain": 1}),
        "Scaled 2.gains.reward was 0.5, now 0.9",
    ),
    "attribute": (set_attribute, "CartPoleEnv.gravity was 0.5, now 0.9"),
    "global": (set_global, "Global.step.GAIN was 0.5, now 0.9"),
    "class": (
        lambda k: OfClass(cart()) if setattr(OfClass, "gain", k) is None else None,
        "OfClass.gain was 0.5, now 0.9",
    ),
    "around the vector": (lambda k: ScaledVec(DummyVecEnv([cart]), k), "ScaledVec.weights was 'float64 (300,) "),
    "one of two": (
        lambda k: DummyVecEnv([lambda: Scaled(cart(), {"gain": 1}), lambda: Scaled(cart(), {"gain": k})]),
        "environment 1: Scaled.gains.reward was 0.5, now 0.9",
    ),
    "set": (
        lambda k: transform(functools.partial(lambda least, r: max(least) * r, {0.1, k})),
        "TransformReward.func.args.0.1 was 0.5, now 0.9",
    ),
    "tensor": (
        lambda k: transform(functools.partial(lambda gain, r: float(gain) * r, torch.tensor(k, dtype=torch.float64))),
        "TransformReward.func.args.0.values was 0.5, now 0.9",
    ),
    "getter": (
        lambda k: transform(functools.partial(lambda get, r: get([0, r] * 5), operator.itemgetter(int(10 * k)))),
        "TransformReward.func.args.0.0 was 5, now 9",
    ),
    "global of an inner function": (
        lambda k: transform(lambda r: next(GAIN * each for each in [r])) if set_global(k) else None,
        "TransformReward.func.GAIN was 0.5, now 0.9",
    ),
    "strict object": (lambda k: Held(cart(), Strict(gain=k)), "Held.config.settings.gain was 0.5, now 0.9"),
    "code": (lambda k: transform((lambda r: 0.5 * r) if k == 0.5 else (lambda r: 0.9 * r)), "the code of "),
    "normalised twice": (
        lambda k: VecNormalize(VecNormalize(DummyVecEnv([cart]), clip_obs=k)),
        "VecNormalize 2.clip_obs was 0.5, now 0.9",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_differs_is_named(form):
    make, change = FORMS[form]
    before = {"constants": follow(make(0.5)).read_constants()}
    assert follow(make(0.5)).list_changes(before) == []
    assert follow(make(0.9)).list_changes(before)[0].startswith(change)


TRAINED = ("closure", "dict", "around the vector", "one of two", "code")


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in TRAINED else pytest.mark.long) for form in FORMS]
)
def test_what_differs_is_named_before_anything_is_trained(form, tmp_path, caplog):
    make, change = FORMS[form]
    train(tmp_path, make(0.5), 2)
    train(tmp_path, make(0.5), 3)
    assert "not as if" not in caplog.text
    train(tmp_path, make(0.9), 4)
    assert f"What is trained after round 3 is not as if nothing had happened: {change}" in caplog.text
    (note,) = RunDirectory.open(tmp_path).notes["resumed"]
    assert note["reason"].startswith(change)
    assert note["after_round"] == 3


@pytest.mark.parametrize("form", ["closure", "dict"])
def test_a_change_back_is_named_and_the_new_value_is_kept(form, tmp_path, caplog):
    make, _ = FORMS[form]
    train(tmp_path, make(0.5), 3)
    train(tmp_path, make(0.9), 4)
    train(tmp_path, make(0.5), 4)
    assert "All 4 rounds were made before this changed" in caplog.text
    caplog.clear()
    train(tmp_path, make(0.9), 5)
    assert "not as if" not in caplog.text


@pytest.mark.parametrize("kind", ["config", "partial"])
def test_the_training_continues_with_the_new_value(kind, tmp_path):
    def make(k):
        return Scaled(cart(), {"gain": k}) if kind == "config" else transform(functools.partial(scale, k))

    train(tmp_path, make(0.5), 2)
    train(tmp_path, make(0.9), 4)
    run = RunDirectory.open(tmp_path)
    assert [{*run.round("records", number)["reward"]} for number in (2, 3, 4)] == [
        {np.float32(0.5)},
        {np.float32(0.9)},
        {np.float32(0.9)},
    ]


def test_in_other_processes_it_is_noticed_through_record_resets(tmp_path, caplog):
    for gain, rounds in ((0.5, 2), (0.5, 3), (0.9, 4)):
        env = [lambda gain=gain: RecordResets(Scaled(cart(), {"gain": gain}))] * 2
        assert "not as if" not in caplog.text
        train(tmp_path, SubprocVecEnv(env, start_method="fork"), rounds)
    assert "Scaled.gains.reward was 0.5, now 0.9" in caplog.text


SAME = {
    "cart": cart,
    "lander": lambda: gym.make("LunarLander-v3", enable_wind=True),
    "walker": lambda: RecordResets(gym.make("BipedalWalker-v3")),
    "counting": lambda: Scaled(cart(), {"gain": 0.5}),
    "limited": lambda: Monitor(wrappers.TimeLimit(wrappers.RecordEpisodeStatistics(cart()), 7)),
    "stacked": lambda: wrappers.FrameStackObservation(cart(), 3),
    "statistics": lambda: wrappers.NormalizeReward(wrappers.NormalizeObservation(cart())),
    "normalised": lambda: VecNormalize(VecMonitor(DummyVecEnv([cart] * 2))),
    "normalised, stacked": lambda: VecFrameStack(VecNormalize(DummyVecEnv([cart] * 2)), 3),
}
TRAINED_ON = ("counting", 1), ("walker", None), ("normalised, stacked", None)


@pytest.mark.filterwarnings("ignore")  # Box2D's import ends the process if its warning is an error
@pytest.mark.parametrize("name", SAME)
def test_the_same_environment_holds_the_same(name):
    before = {"constants": follow(SAME[name]()).read_constants()}
    assert follow(SAME[name]()).list_changes(before) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=() if (name, seed) in TRAINED_ON else pytest.mark.long)
        for seed in (None, 1)
        for name in SAME
    ],
)
def test_of_the_same_environment_nothing_is_said(name, seed, tmp_path, caplog):
    for rounds in (1, 2, 3):
        train(tmp_path, SAME[name](), rounds, seed=seed)
    assert ", now " not in caplog.text
    assert "the code of" not in caplog.text


def test_a_global_that_is_called_as_an_attribute_is_no_change(tmp_path, caplog, monkeypatch):
    for k, rounds in ((0.5, 2), (0.9, 3)):
        monkeypatch.setitem(globals(), "config", k)
        train(tmp_path, Held(cart(), {"gain": 1.0}), rounds)
    assert "not as if" not in caplog.text


def test_how_it_is_shown_and_what_is_written_next_to_it_are_no_change(tmp_path, caplog):
    train(tmp_path, wrappers.TransformReward(cart(), lambda r: 0.1 * r), 2)
    train(tmp_path, wrappers.TransformReward(cart(render_mode="rgb_array"), lambda r: 0.1 * r), 3)
    assert "not as if" not in caplog.text
    assert RunDirectory.open(tmp_path).rounds() == [1, 2, 3]
