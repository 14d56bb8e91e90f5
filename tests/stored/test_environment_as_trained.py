"""The environment as it was trained in: every wrapper made again, or refused by its name."""

import importlib
import shutil
import sys
from contextlib import closing
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import wrappers
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

from helpers import episodes
from helpers.episodes import Jittery, check_all
from whence import KeepAll, ReplayError, RunDirectoryError, replay_episode
from whence.causes import play_episode
from whence.core import WhenceError
from whence.runs import RunDirectory
from whence.sb3 import InfluenceCallback, RecordResets, resume
from whence.sb3.episodes import read_episode
from whence.stored.agents import estimate_advantages, load_round, make_lockstep, measure_returns
from whence.stored.agents.environments import action_labels, box_action_labels, state_names

learn = partial(episodes.learn, rule=KeepAll())  # scores take longer than the rest


def cart(**kwargs):
    return gym.make("CartPole-v1", **kwargs)


class Scaled(gym.RewardWrapper):
    """It multiplies rewards."""

    def __init__(self, env, factor=3.0):
        super().__init__(env)
        self._factor = factor

    def reward(self, reward):
        return self._factor * float(reward)


class Hiding(Scaled):
    """It does not hold its argument under its name."""

    def __init__(self, env, times=2.0):
        super().__init__(env, times)


class Noisy(Jittery):
    """Its noise goes on from episode to episode."""

    def __init__(self, env):
        super().__init__(env, 0)


class Harder(gym.Wrapper):
    """Its rewards fall from episode to episode."""

    def __init__(self, env):
        super().__init__(env)
        self.episodes = 0

    def reset(self, **kwargs):
        self.episodes += 1
        return super().reset(**kwargs)

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward / self.episodes, terminated, truncated, info


class Plain(gym.Env):
    """It was never registered. Each of its four steps earns ten."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=4):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        self._step += 1
        observation = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return observation, 10.0, self._step == self.length, False, {}


WRAPPED = {
    "Gymnasium's": lambda: wrappers.TransformReward(
        wrappers.FrameStackObservation(wrappers.TimeLimit(cart(), 9), 2), np.sign
    ),
    "statistics": lambda: wrappers.NormalizeReward(wrappers.NormalizeObservation(cart())),
    "arrays": lambda: wrappers.RescaleAction(gym.make("Pendulum-v1"), np.array([-1.0], np.float32), np.float32(1)),
    "one's own": lambda: Scaled(Scaled(cart(), 2.0)),
    "a count of episodes": lambda: Harder(cart()),
    "a generator of its own": lambda: Noisy(cart()),
    "no id": lambda: Scaled(Plain(5)),
    "a monitor inside": lambda: Scaled(wrappers.RecordEpisodeStatistics(cart())),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_environments_are_made_again(tmp_path, name):
    directory = learn(tmp_path / "run", WRAPPED[name]())
    assert check_all(directory) == 128


def test_environments_that_differ_are_made_again_each_in_its_own_way(tmp_path):
    env = DummyVecEnv([cart, lambda: Scaled(cart(), 100.0), cart])
    directory = learn(tmp_path / "run", env)
    assert list(directory.config["other_env_wrappers"]) == ["1"]
    assert check_all(directory) == 2 * 3 * 64
    records = directory.round("records", 1).filter(step=0)
    chosen = [records.filter(env_index=index)["record_id"][0] for index in (0, 1)]
    values = estimate_advantages(directory, 1, chosen, continuations=2)["mc_value"]
    assert values[1] > 20 * values[0]


def test_wrappers_in_other_processes_are_described_there(tmp_path):
    with closing(SubprocVecEnv([lambda: RecordResets(Scaled(cart(), 2.0))] * 2, start_method="fork")) as env:
        directory = learn(tmp_path / "run", env)
    assert check_all(directory) == 2 * 2 * 64


class Local:
    Secret = type("Secret", (gym.Wrapper,), {})


@pytest.mark.parametrize(
    ("make", "wrapper", "reason"),
    [
        (lambda: wrappers.TransformReward(cart(), lambda reward: 2 * reward), "TransformReward", "func"),
        (lambda: Hiding(cart()), "Hiding", "times"),  # an argument that is stored nowhere
        (lambda: Local.Secret(cart()), "Secret", "AttributeError"),  # a class that no module holds
    ],
)
def test_what_cannot_be_made_again_is_refused_by_its_name(tmp_path, make, wrapper, reason):
    directory = learn(tmp_path / "run", make())
    with pytest.raises(ReplayError, match=rf"{wrapper} .*(\({reason}|argument {reason}).*--env module:function"):
        replay_episode(directory, 0)
    assert check_all(directory, env=make) == 128


def test_a_missing_wrapper_that_only_changes_rewards_is_a_mismatch(tmp_path):
    directory = learn(tmp_path / "run", Scaled(cart()))
    replay = replay_episode(directory, 0, env="CartPole-v1", frames="all")
    assert "At step 0 the reward is 1, and 3 was stored" in replay.mismatch
    assert list(replay.frames) == [0]
    with pytest.raises(ReplayError, match="At step 0 the reward"):
        estimate_advantages(directory, 1, directory.round("records", 1)["record_id"].to_list()[:1], env="CartPole-v1")


def test_a_function_of_a_module_in_the_working_directory_makes_it(tmp_path, monkeypatch):
    directory = learn(tmp_path / "run", Hiding(cart()))
    code = "import gymnasium as gym\nfrom test_environment_as_trained import Hiding\n"
    code += "def make(render_mode=None):\n    return Hiding(gym.make('CartPole-v1', render_mode=render_mode))\n"
    code += "def two():\n    from stable_baselines3.common.vec_env import DummyVecEnv\n    return DummyVecEnv([make])\n"
    (tmp_path / "made_here.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert check_all(directory, env="made_here:make") == 128
    assert replay_episode(directory, 0, env="made_here:make", frames=[0]).frames
    noted = learn(tmp_path / "noted", Hiding(cart()), noted={"env": "made_here:make"})
    assert check_all(noted) == 128
    model, callback = resume(noted.path, Hiding(cart()))
    model.learn(256, callback=callback)
    (noted.path / ".signature").unlink()
    with pytest.raises(RunDirectoryError, match="is not signed"):
        resume(noted.path, Hiding(cart()))
    for name in ("made_here:none", "no:make", "make", 3):
        with pytest.raises(WhenceError, match=f"env is {name!r}: .*function without arguments"):
            InfluenceCallback(env=name)
    wrong = {"made_here:two": "returns a DummyVecEnv", "made_here:none": "is registered", "no:make": "No module"}
    for env, match in wrong.items():
        with pytest.raises(WhenceError, match=match):
            replay_episode(directory, 0, env=env)


@pytest.fixture(scope="module")
def normalised(tmp_path_factory):
    """A run with stacked frames, normalised observations and rewards, and a time limit."""
    env = DummyVecEnv([lambda: wrappers.TimeLimit(Plain(6), 4)] * 2)
    env = VecNormalize(VecFrameStack(env, 3), gamma=1.0)
    return learn(tmp_path_factory.mktemp("normalised") / "run", env, gamma=1.0)


def test_continuations_see_normalised_stacks_and_measure_the_environments_rewards(normalised):
    records = normalised.round("records", 2)
    first = records.filter(step=0)["record_id"].to_list()[:4]
    table = estimate_advantages(normalised, 2, first, continuations=4)
    scale = normalised.table("metrics")["reward_scale"][1]
    assert scale > 2
    # Four steps of ten, and the critic's value where the time limit cut the episode.
    bootstraps = records["bootstrap"].drop_nulls().to_numpy() * scale
    assert np.allclose(table["mc_value"].to_numpy() - 40, bootstraps.mean(), atol=0.5 * np.ptp(bootstraps) + 1)
    envs = make_lockstep(normalised, None, 1, 2)
    stored = read_episode(normalised, records["episode_id"][8])
    envs.unwrapped.state = stored.generator_state
    observations, stacks = [envs.reset()[0]], [envs.get_original_obs()[0]]
    for action in stored.records["action"][:2]:
        observations.append(envs.step([action])[0][0])
        stacks.append(envs.get_original_obs()[0])
    # The round's last statistics stand in for those of each step.
    np.testing.assert_allclose(observations, stored.records["observation"].to_numpy()[:3], atol=0.3)
    np.testing.assert_array_equal(stacks, stored.records["raw_observation"].to_numpy()[:3])
    assert (stacks[2][:2] == stacks[0][4:]).all()


def test_an_episode_is_played_now_and_policies_are_tested_behind_the_wrappers(normalised):
    model, _ = load_round(normalised, 2)
    with measure_returns(normalised, model, 2, episodes=2, seed=0) as measure:
        assert measure({}, 0) == 40
    played = play_episode(normalised, seed=1)
    assert len(played) == 4
    assert played.records.observations.shape == (4, 6)


@pytest.mark.long
@pytest.mark.parametrize("name", ["BreakoutNoFrameskip-v4", "ALE/Breakout-v5"])
def test_atari_where_an_episode_is_a_life_and_actions_are_sticky(tmp_path, name):
    ale = pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    gym.register_envs(ale)
    env = VecFrameStack(make_atari_env(name, n_envs=2, seed=0, wrapper_kwargs={"noop_max": 5}), 4)
    small = {"features_extractor_kwargs": {"features_dim": 16}}
    directory = learn(tmp_path / "run", env, policy="CnnPolicy", times=2, policy_kwargs=small)
    assert check_all(directory) == 2 * 2 * 2 * 64
    states = [read_episode(directory, episode).generator_state for episode in range(2, 6)]
    lives = [dict(state["wrappers"])["EpisodicLifeEnv"]["was_real_done"] for state in states]
    assert {"dict": {"plain": False}} in lives
    model, records = load_round(directory, 2)
    assert records.observations.shape == (128, 4, 84, 84)
    values = model.policy.predict_values(records.observations).detach()[:, 0]
    np.testing.assert_allclose(values, records.values, atol=1e-4)
    chosen = directory.round("records", 2).drop_nulls("step")["record_id"].to_list()[:2]
    assert estimate_advantages(directory, 2, chosen, continuations=2)["mc_value"].is_finite().all()


class Named(Plain):
    """It tells what its actions and its observation's entries are."""

    action_names = "left", "right"
    observation_names = ("x", "y")


class Meaning(Plain):
    """It tells its actions as Atari does, and more names of entries than there are."""

    observation_names = ("x", "y", "z")

    def get_action_meanings(self):
        return ["NOOP", "FIRE"]


STACKED = ["x (1 back)", "y (1 back)", "x", "y"]
NAMES = {
    "the environment's": (lambda: Scaled(Named()), {}, ["left", "right"], ["x", "y"]),
    "the user's first": (Named, {"actions": ("no", "yes")}, ["no", "yes"], ["x", "y"]),
    "Atari's": (Meaning, {}, ["NOOP", "FIRE"], None),
    "none": (Plain, {}, None, None),
    "stacked": (lambda: VecFrameStack(DummyVecEnv([Named]), 2), {}, ["left", "right"], STACKED),
    "stacked, the user's": (lambda: VecFrameStack(DummyVecEnv([Plain]), 2), {"observations": "xy"}, None, STACKED),
    "of axes": (lambda: gym.make("Pendulum-v1"), {"actions": ["torque"]}, ["torque"], None),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_the_users_or_the_environments(tmp_path, name):
    make, names, actions, observations = NAMES[name]
    names = {kind: [*listed] for kind, listed in names.items()}
    config = learn(tmp_path / "run", make(), noted={"names": names}).config
    find = box_action_labels if config["action_space"]["type"] == "Box" else action_labels
    assert (find(None, config), state_names(None, config)) == (actions, observations)
    assert len(config.get("names", {})) == (actions is not None) + (observations is not None)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["left", "right"], "names is .*lists of texts"),
        ({"action": ["left", "right"]}, "lists of texts"),
        ({"actions": "lr"}, "lists of texts"),
        ({"actions": ["left", "left"]}, "that differ"),
        ({"actions": ["left"]}, r"1 actions \(left\); Discrete\(2\) has 2"),
        ({"observations": ["x", "y", "z"]}, r"3 observations .*Box\(.* has 2\."),
    ],
)
def test_other_names_are_refused_before_anything_is_written(tmp_path, names, message):
    with pytest.raises(WhenceError, match=message):
        learn(tmp_path / "run", Plain(), noted={"names": names})
    assert not (tmp_path / "run").exists()


WORLD = """
from test_environment_as_trained import Plain

def pay(step):
    return 2.0 * step

class World(Plain):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, pay(reward), *rest

def make():
    return World()
"""


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Return a function that writes and imports the module `world`, with a text replaced, and returns its `make`."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(old="", new=""):
        (tmp_path / "world.py").write_text(WORLD.replace(old, new) if old else WORLD)
        sys.modules.pop("world", None)
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        return importlib.import_module("world").make

    yield write
    sys.modules.pop("world", None)


# Of other processes test_environment_changes.py tells the same.
@pytest.mark.parametrize("kind", [DummyVecEnv, pytest.param(SubprocVecEnv, marks=pytest.mark.long)])
def test_a_run_that_goes_on_in_an_edited_environment_says_so(tmp_path, build, caplog, kind):
    def train(make, total):
        env = DummyVecEnv([make]) if kind is DummyVecEnv else SubprocVecEnv([lambda: RecordResets(make())], "fork")
        with closing(env):
            model = PPO("MlpPolicy", env, n_steps=64, batch_size=64, n_epochs=1, seed=1, device="cpu")
            model.learn(total, callback=InfluenceCallback(KeepAll(), run=tmp_path / "run"))
        return RunDirectory.open(tmp_path / "run")

    train(build(), 128)
    assert train(build(), 256).notes.get("resumed") is None
    run = train(build("return 2.0", "return 3.0"), 384)
    (resumed,) = run.notes["resumed"]
    assert resumed["after_round"] == 4
    assert resumed["reason"] == "the code of World.step.pay differs"
    assert resumed["reason"] in caplog.text
