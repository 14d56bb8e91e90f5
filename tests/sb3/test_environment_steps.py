"""What a run stores of its environments: rewards in their units, ends of episodes, infos, raw observations."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib import RecurrentPPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecNormalize,
)

from whence import KeepAll, RecordBatch, ReplayError, RunDirectory, replay_episode
from whence.sb3 import InfluenceCallback
from whence.sb3.rounds import load_statistics
from whence.stored.agents import read_reward_scale
from whence.stored.agents.replaying import wrap_as_trained


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


class Halved(VecEnvWrapper):
    """It halves rewards around the vector, and may step twice for one action."""

    def __init__(self, venv: VecEnv, times: int = 1) -> None:
        super().__init__(venv)
        self.times = times

    def reset(self) -> Any:
        return self.venv.reset()

    def step_async(self, actions: Any) -> None:
        self.taken = actions

    def step_wait(self) -> Any:
        total = np.zeros(self.num_envs, np.float32)
        for _ in range(self.times):
            observations, rewards, dones, infos = self.venv.step(self.taken)
            total += rewards / 2
        return observations, total, dones, infos


class Bonus(BaseCallback):
    """It adds to the rewards in place, as curiosity does."""

    def _on_step(self) -> bool:
        self.locals["rewards"][:] += 5
        return True


def make_corridor() -> VecEnv:
    return DummyVecEnv([Corridor] * 2)


@pytest.mark.parametrize(
    ("make", "rewards"),
    [
        (lambda: VecNormalize(VecNormalize(make_corridor())), {3.0, -1.0}),
        (lambda: Halved(make_corridor()), {3.0, -1.0}),
        (lambda: Halved(VecNormalize(make_corridor())), {3.0, -1.0}),
        (lambda: VecNormalize(Halved(make_corridor())), {3.0, -1.0}),
        (lambda: Halved(VecNormalize(make_corridor()), times=2), {6.0, -2.0, 2.0}),
        (lambda: Halved(SubprocVecEnv([Corridor] * 2), times=2), {6.0, -2.0}),
    ],
)
def test_rewards_and_observations_are_noted_inside_of_all_wrappers(make: Any, rewards: Any, tmp_path: Path) -> None:
    run, watch, model = learn(make(), tmp_path / "run")
    table = run.round("records", 2)
    assert {*table["reward"]} <= rewards
    assert len({*table["reward"]}) == 2
    assert table["trained_reward"].to_list() == watch.trained.tolist()
    assert "step_wait" not in vars(model.env.unwrapped)
    if "raw_observation" in table.columns:
        raw = table["raw_observation"].to_numpy()
        assert ((raw[:, 0] >= 4) & (raw[:, 0] <= 13)).all()
        assert {*raw[:, 1]} <= {*range(6)}


def test_what_was_normalised_twice_is_not_made_again_as_if_once(tmp_path: Path) -> None:
    run, _, model = learn(VecNormalize(VecNormalize(make_corridor())), tmp_path / "run")
    outer, inner = model.env, model.env.venv
    scales = [np.sqrt(each.ret_rms.var + each.epsilon) for each in (outer, inner)]
    assert run.table("metrics")["reward_scale"][-1] == pytest.approx(scales[0] * scales[1])
    with pytest.raises(ReplayError, match="several VecNormalize"):
        wrap_as_trained(run, make_corridor(), 1)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("algorithm", [PPO, RecurrentPPO])
def test_a_bonus_of_another_callback_is_no_bootstrap(order: int, algorithm: Any, tmp_path: Path) -> None:
    policy = "MlpLstmPolicy" if algorithm is RecurrentPPO else "MlpPolicy"
    tables = []
    for bonus in (False, True):
        model = algorithm(policy, make_corridor(), n_steps=24, batch_size=48, n_epochs=1, seed=1, device="cpu")
        run = tmp_path / str(bonus)
        callbacks = [InfluenceCallback(KeepAll(), run=run), *([Bonus()] if bonus else [])]
        model.learn(48, callback=callbacks[::order])
        tables.append(RunDirectory.open(run).round("records", 1))
    plain, shaped = tables
    assert plain["bootstrap"].drop_nulls().len() > 2
    assert plain["bootstrap"].drop_nulls().abs().min() > 0
    assert shaped["bootstrap"].equals(plain["bootstrap"])
    assert shaped["reward"].equals(plain["reward"])
    added = (plain["trained_reward"] - plain["reward"] - plain["bootstrap"].fill_null(0)).abs().max()
    assert added < 1e-6
    added = shaped["trained_reward"] - shaped["reward"] - shaped["bootstrap"].fill_null(0)
    assert (added - 5).abs().max() < 1e-5


class Informed(gym.Wrapper[Any, Any, Any, Any]):
    """It adds to infos."""

    def __init__(self, env: Any, info: Any) -> None:
        super().__init__(env)
        self.info = info

    def step(self, action: Any) -> Any:
        return *self.env.step(action)[:4], dict(self.info)


class Strange:
    """It raises when it is looked at."""

    @property
    def dtype(self) -> Any:
        raise ZeroDivisionError


INFOS: dict[str, tuple[dict[Any, Any], dict[str, Any], str]] = {
    "prefixes": ({"episode_cost": 1.0, "final_x": 2, "_y": True, "whence_z": 1}, {"episode_cost": 1.0, "_y": True}, ""),
    "arrays of one": ({"a": np.array(3.0), "b": torch.tensor([2]), "c": np.array([[True]])}, {"a": 3.0, "b": 2}, ""),
    "large": ({"id": 10**400, "x": 2**70}, {"x": 2.0**70}, "'id'"),
    "names": ({"\ud800": 1, 3: 4.0, "é": 1}, {"é": 1}, "'\\ud800', 3"),
    "no numbers": (
        {"t": np.timedelta64(3, "s"), "d": np.datetime64("2026-01-01"), "s": Strange(), "x": 1},
        {"x": 1},
        "'t'",
    ),
    "several": (
        {"v": np.zeros(2), "d": {"x": 1.0}, "l": [1, 2], "z": 1j, "t": "no", "n": None},
        {},
        "'d', 'l', 'v', 'z'",
    ),
    "many": ({f"k{i:02}": i for i in range(34)}, {"k00": 0, "k31": 31}, "'k32', 'k33'"),
}


@pytest.mark.parametrize("name", INFOS)
def test_numbers_in_infos_are_stored_or_named(name: str, tmp_path: Path, caplog: Any) -> None:
    info, stored, left_out = INFOS[name]
    env = Informed(gym.make("CartPole-v1"), info)
    model = PPO("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, seed=1, device="cpu")
    model.learn(32, callback=InfluenceCallback(KeepAll(), run=tmp_path / "run"))
    table = RunDirectory.open(tmp_path / "run").round("records", 2)
    assert {key: table[f"info.{key}"][3] for key in stored} == stored
    texts = [each.getMessage() for each in caplog.records if "infos hold numbers" in each.getMessage()]
    assert len(texts) == bool(left_out)
    assert not left_out or f"does not store: {left_out}. " in texts[0]


class Large(gym.Env[Any, Any]):
    """Observations whose squares are infinite in single precision; one array is used for all of them."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.array = np.zeros(2, np.float32)

    def reset(self, **options: Any) -> Any:
        super().reset(**options)
        self.array[:] = self.np_random.uniform(1e25, 2e25, 2)
        self.left = 5
        return self.array, {}

    def step(self, action: Any) -> Any:
        self.array[0] = self.np_random.uniform(1e25, 2e25)
        self.left -= 1
        return self.array, 1.0, self.left == 0, False, {}


def test_large_numbers_end_no_training_where_numpy_raises_and_arrays_are_used_again(tmp_path: Path) -> None:
    model = PPO("MlpPolicy", Large(), n_steps=16, batch_size=16, n_epochs=1, seed=1, device="cpu")
    with np.errstate(all="raise"):
        model.learn(32, callback=InfluenceCallback(KeepAll(), run=tmp_path / "run", folds=None))
    run = RunDirectory.open(tmp_path / "run")
    table = run.round("records", 1).filter(episode_id=0)
    stored = table["observation"].to_numpy()
    assert len({*stored[:, 0]}) == 5
    replay = replay_episode(run, 0, env=Large)
    assert replay.mismatch is None
    assert np.array_equal(np.array(replay.observations), stored)


class Curious(Halved):
    """Its rewards are of its own making: the environments give none."""

    def step_wait(self) -> Any:
        observations, rewards, dones, infos = super().step_wait()
        return observations, rewards + observations[:, 0], dones, infos


@pytest.mark.parametrize("around", [Curious, Halved])
def test_rewards_are_flat_only_if_those_that_train_are(around: Any, tmp_path: Path) -> None:
    env = VecNormalize(around(DummyVecEnv([lambda: gym.wrappers.TransformReward(Corridor(), lambda _: 0.0)] * 2)))
    run, _, _ = learn(env, tmp_path / "run")
    assert run.table("metrics")["flat"].to_list() == [around is Halved] * 2
    assert {*run.round("records", 1)["reward"]} == {0.0}
