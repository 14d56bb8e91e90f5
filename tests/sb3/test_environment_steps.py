"""What a run stores of its environments: rewards in their units, ends of episodes, infos, raw observations."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecNormalize

from whence import KeepAll, RecordBatch, RunDirectory
from whence.sb3 import InfluenceCallback
from whence.sb3.rounds import load_statistics
from whence.stored.agents import read_reward_scale


class Corridor(gym.Env[Any, Any]):
    """Walk right for 3 a step and left for -1, from 10 to 13; a time limit ends each sixth step."""

    def __init__(self, parts: bool = False) -> None:
        box = spaces.Box(0, 20, (2,), np.float32)
        self.parts = parts
        self.observation_space = spaces.Dict({"place": box, "noise": spaces.Discrete(3)}) if parts else box
        self.action_space = spaces.Discrete(2)

    def observe(self) -> Any:
        place = np.array([self.place, self.steps], np.float32)
        return {"place": place, "noise": self.steps % 3} if self.parts else place

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(**options)
        self.place, self.steps = 10, 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        right = bool(action)
        self.place += 1 if right else -1
        self.steps += 1
        info: dict[str, Any] = {"place": self.place, "right": np.bool_(right), "text": "no number"}
        if right:
            info["fuel"] = np.float32(0.5)
        return self.observe(), 3.0 if right else -1.0, self.place == 13, self.steps == 6, info


class Watch(BaseCallback):
    """Keeps the buffer's rewards, and what the environments returned outside of any wrapper of whence's."""

    def _on_rollout_start(self) -> None:
        self.raw, self.scaled = [], []

    def _on_step(self) -> bool:
        normalised = self.model.get_vec_normalize_env()
        raw = self.locals["rewards"] if normalised is None else normalised.get_original_reward()
        self.raw.append(np.array(raw, np.float32))
        self.scaled.append(np.array(self.locals["rewards"], np.float32))
        return True

    def _on_rollout_end(self) -> None:
        self.trained = self.model.rollout_buffer.rewards.T.reshape(-1).copy()


KINDS: dict[str, Any] = {
    "plain": lambda: DummyVecEnv([Corridor] * 2),
    "processes": lambda: SubprocVecEnv([Corridor] * 2),
    "normalised": lambda: VecNormalize(DummyVecEnv([Corridor] * 2)),
    "normalised, stacked": lambda: VecNormalize(VecFrameStack(DummyVecEnv([Corridor] * 2), 2)),
    "stacked, normalised": lambda: VecFrameStack(VecNormalize(DummyVecEnv([Corridor] * 2)), 2),
    "dict": lambda: VecNormalize(DummyVecEnv([lambda: Corridor(parts=True)] * 2), norm_obs_keys=["place"]),
}


def learn(env: VecEnv, run: Path, algorithm: Any = PPO) -> tuple[RunDirectory, Watch, Any]:
    policy = "MultiInputPolicy" if isinstance(env.observation_space, spaces.Dict) else "MlpPolicy"
    options = {"batch_size": 16, "n_epochs": 1} if algorithm is PPO else {}
    model = algorithm(policy, env, n_steps=24, seed=1, device="cpu", **options)
    watch = Watch()
    model.learn(96, callback=[watch, InfluenceCallback(KeepAll(), run=run)])
    env.close()
    return RunDirectory.open(run), watch, model


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_are_the_environments_and_the_bootstrap_is_apart(kind: str, tmp_path: Path) -> None:
    run, watch, _ = learn(KINDS[kind](), tmp_path / "run", A2C if kind == "plain" else PPO)
    table = run.round("records", 2)
    rewards, trained = table["reward"].to_numpy(), table["trained_reward"].to_numpy()
    assert set(rewards) == {3.0, -1.0}
    assert rewards.tolist() == np.array(watch.raw).T.ravel().tolist()
    assert trained.tolist() == watch.trained.tolist()
    assert RecordBatch.from_polars(table).rewards.tolist() == watch.trained.tolist()
    ends = table["end"].to_list()
    cut = np.array([end == "truncated" for end in ends])
    assert {*ends} == {None, "truncated", "terminated"}
    last = table["step"].to_numpy() == 5
    assert (cut == last & (table["info.place"].to_numpy() != 13)).all()
    assert (table["bootstrap"].is_null().to_numpy() == ~cut).all()
    scaled = np.array(watch.scaled).T.ravel()
    # SB3 scales the reward in place, so what it added is what the buffer holds beyond that.
    assert table["bootstrap"].to_numpy()[cut] == pytest.approx((trained - scaled)[cut], abs=1e-6)
    assert (trained[~cut] == scaled[~cut]).all()
    assert table["info.right"].to_list() == table["action"].cast(bool).to_list()
    assert table["info.fuel"].is_null().to_list() == (table["action"] == 0).to_list()
    assert not {"info.text", "info.TimeLimit.truncated"} & {*table.columns}


@pytest.mark.parametrize("kind", ["normalised", "normalised, stacked", "dict"])
def test_raw_observations_and_statistics_give_back_what_was_normalised(kind: str, tmp_path: Path) -> None:
    run, _, model = learn(KINDS[kind](), tmp_path / "run")
    table, env = run.round("records", 2), model.get_vec_normalize_env()
    name = ".place" if kind == "dict" else ""
    raw, normalised = (np.stack(table[prefix + name].to_numpy()) for prefix in ("raw_observation", "observation"))
    assert (raw[:, -2] == np.where(table["action"] == 1, -1, 1) + table["info.place"].to_numpy()).all()
    assert (raw[:, -1] == table["step"].to_numpy()).all()
    if kind == "dict":
        assert (table["raw_observation.noise"].to_numpy() == table["step"].to_numpy() % 3).all()
    other = KINDS[kind]()
    load_statistics(other, run.policy(2, name="statistics"))
    assert other.ret_rms.var == env.ret_rms.var
    assert read_reward_scale(run, 2) == np.sqrt(env.ret_rms.var + env.epsilon)
    # The statistics have moved since the first steps, and are those of the last one before its own observation.
    again = other.normalize_obs({"place": raw} if name else raw)
    assert np.abs((again["place"] if name else again) - normalised)[-1].max() < 0.05


def test_without_normalisation_nothing_is_stored_twice(tmp_path: Path) -> None:
    model = PPO("MlpPolicy", gym.make("CartPole-v1"), n_steps=32, batch_size=16, n_epochs=1, seed=1, device="cpu")
    model.learn(32, callback=InfluenceCallback(KeepAll(), run=tmp_path / "run"))
    run = RunDirectory.open(tmp_path / "run")
    columns = run.round("records", 1).columns
    assert not {"trained_reward", "bootstrap", "raw_observation"} & {*columns}
    assert read_reward_scale(run, 1) == 1
    assert not run.rounds("statistics")
