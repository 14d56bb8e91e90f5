"""`whence.record` of an environment that is a batch of several, as Isaac Lab's, and of copies of recorded ones."""

import copy
import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import polars as pl
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

import whence
from helpers.examples import script
from whence.core import WhenceError
from whence.sb3.episodes import digest_observation, digest_rows

ISAAC = script("ppo_isaac")
COUNT, STEPS = 5, 230


def play(env: Any) -> list[torch.Tensor]:
    """Push all points by chance, and return all that is seen."""
    torch.manual_seed(0)
    seen = [env.reset()[0]["policy"].clone()]
    for _ in range(STEPS):
        observations, *rest, extras = env.step(2 * torch.randn(COUNT, 2))
        seen += [each.clone() for each in (observations["policy"], *rest, *extras["log"].values())]
    return seen


def read(path: Any) -> pl.DataFrame:
    run = whence.open_run(path)
    return pl.concat([run.round("records", number) for number in run.rounds()])


def test_a_batch_of_tensors_is_recorded_as_its_environments(tmp_path: Any) -> None:
    expected = play(ISAAC.Reach(COUNT))
    env: Any = whence.record(ISAAC.Reach(COUNT), tmp_path / "run", round=100 * COUNT)
    seen = play(env)
    assert len(expected) == len(seen)
    assert all(map(torch.equal, expected, seen))
    assert env.num_envs == COUNT
    assert isinstance(env, gym.Env)
    env.close()
    run, table = whence.open_run(tmp_path / "run"), read(tmp_path / "run")
    assert run.rounds() == [1, 2, 3]
    assert run.config["n_envs"] == COUNT
    assert len(table) == STEPS * COUNT
    terms = [f"info.{name}" for name in ("tracking", "effort", "smoothness", "termination")]
    assert np.allclose(table.select(pl.sum_horizontal(terms)).to_series(), table["reward"], atol=1e-6)
    parts = 4 + 4  # of a step, in `seen`
    for index in range(COUNT):
        ordered = table.filter(env_index=index).sort("record_id")
        observations = torch.stack([seen[0], *seen[1::parts][:-1]])[:, index]
        assert np.array_equal(np.stack(ordered["observation.policy"].to_list()), observations.numpy())
        assert np.array_equal(ordered["reward"], torch.stack(seen[2::parts])[:, index].numpy())
        assert np.array_equal(ordered["info.effort"], torch.stack(seen[6::parts])[:, index].numpy())
        ends = (torch.stack(seen[3::parts]) | torch.stack(seen[4::parts]))[:, index].numpy()
        assert np.array_equal(ordered["end"].is_not_null(), ends)
        assert np.array_equal(ordered["step"].to_numpy()[1:] == 0, ends[:-1])
    assert (table.filter(end="truncated")["step"] == 99).all()
    assert {"terminated", "truncated"} <= {*table["end"]}


def test_a_batch_that_cannot_be_read_is_refused_with_its_remedy(tmp_path: Any) -> None:
    env = ISAAC.Reach(COUNT)
    del env.single_action_space
    with pytest.raises(WhenceError, match="num_envs = 5, and has no single_action_space"):
        whence.record(env, tmp_path / "run")
    env = ISAAC.Reach(COUNT)
    env.observation_space = env.single_observation_space
    env.count, env.reset_rows = env.num_envs, lambda rows: None
    del env.num_envs
    recorded = whence.record(env, tmp_path / "run")
    recorded.recording.start({"policy": torch.zeros(COUNT, 6)}, {})
    with pytest.raises(WhenceError, match=r"shape \(5,\).*let it have num_envs"):
        recorded.step(torch.zeros(COUNT, 2))


def test_a_batch_warns_once_of_numbers_that_it_does_not_store(tmp_path: Any, caplog: Any) -> None:
    class Means(ISAAC.Reach):  # type: ignore[name-defined,misc]
        def step(self, actions: Any) -> Any:
            *rest, extras = super().step(actions)
            return *rest, {**extras, "means": {"mean": torch.tensor(1.0)}, "critic": torch.zeros(COUNT, 3)}

    env = whence.record(Means(COUNT), tmp_path / "run", round=20 * COUNT)
    play(env)
    env.close()
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "'critic', 'mean'. A round stores up to 32 keys that are texts, with one number each."
    ]


class Bowl(gym.Env[Any, Any]):
    """A walk that names its actions, returns no info, or one that is too rich."""

    observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    observation_names = ("x", "noise")

    def __init__(self, info: Any = None) -> None:
        self.info = info

    def get_action_meanings(self) -> list[str]:
        return ["left", "right"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.x = self.np_random.normal()
        return self._observe(), self.info

    def step(self, action: int) -> Any:
        self.x += 2 * int(action) - 1 + self.np_random.normal()
        return self._observe(), -abs(self.x), abs(self.x) > 5, False, self.info

    def _observe(self) -> Any:
        return np.array([self.x, self.np_random.normal()], np.float32)


def make_bowl() -> gym.Env[Any, Any]:
    return TimeLimit(Bowl({}), 30)


def walk(env: Any) -> list[Any]:
    seen = [env.reset(seed=3)[0].tolist()]
    for step in range(60):
        observation, *rest = env.step(step % 2 if isinstance(env, gym.Env) else np.array([step % 2, 1]))
        seen.append((observation.tolist(), *map(np.array, rest[:3])))
        if np.ndim(rest[1]) == 0 and (rest[1] or rest[2]):
            env.reset()
    return seen


def walk_vec_env(envs: Any) -> list[Any]:
    envs.seed(3)
    seen = [envs.reset().tolist()]
    for step in range(60):
        observations, rewards, dones, _ = envs.step(np.array([step % 2, 1]))
        seen.append((observations.tolist(), rewards, dones))
    return seen


@pytest.mark.parametrize(
    ("make", "trial", "copies"),
    [
        (make_bowl, walk, copy.deepcopy),
        (make_bowl, walk, lambda env: pickle.loads(pickle.dumps(env))),  # noqa: S301
        (lambda: SyncVectorEnv([make_bowl] * 2), walk, copy.deepcopy),
        (lambda: DummyVecEnv([lambda: Monitor(make_bowl())] * 2), walk_vec_env, copy.deepcopy),
    ],
    ids=["copied", "pickled", "vector", "VecEnv"],
)
def test_a_copy_is_played_and_not_recorded(tmp_path: Any, make: Any, trial: Any, copies: Any) -> None:
    expected = trial(make())
    env = whence.record(make(), tmp_path / "run", round=None)
    one = copies(env)
    assert repr(trial(one)) == repr(expected)
    one.end_round()
    one.close()
    assert not whence.open_run(tmp_path / "run").rounds()
    assert repr(trial(env)) == repr(expected)
    env.close()
    assert len(read(tmp_path / "run")) >= 60


def test_names_are_the_environments_and_are_counted(tmp_path: Any) -> None:
    kinds = [make_bowl(), SyncVectorEnv([make_bowl] * 2), DummyVecEnv([make_bowl] * 2)]
    for number, env in enumerate(kinds):
        whence.record(env, tmp_path / str(number)).close()
        names = whence.open_run(tmp_path / str(number)).config["names"]
        assert names == {"actions": ["left", "right"], "observations": ["x", "noise"]}
    whence.record(make_bowl(), tmp_path / "mine", names={"actions": ["l", "r"]}).close()
    assert whence.open_run(tmp_path / "mine").config["names"]["actions"] == ["l", "r"]
    with pytest.raises(WhenceError, match="names has 3 actions"):
        whence.record(make_bowl(), tmp_path / "other", names={"actions": ["a", "b", "c"]})
    assert not (tmp_path / "other").exists()


def test_a_round_of_numpys_numbers_and_infos_that_are_none(tmp_path: Any, caplog: Any) -> None:
    for number, info in enumerate((None, {"grid": np.zeros(3)})):
        env = whence.record(TimeLimit(Bowl(info), 30), tmp_path / str(number), round=np.int64(32))  # type: ignore[arg-type]
        walk(env)
        assert whence.open_run(tmp_path / str(number)).rounds() == [1]
        env.close()
    assert [record.getMessage() for record in caplog.records if "'grid'" in record.getMessage()] == [
        "The environments' infos hold numbers that this run does not store: 'grid'. A round stores up to 32 keys that "
        "are texts, with one number each."
    ]


SPACES = gym.spaces
NESTED = SPACES.Dict(b=SPACES.Discrete(3), a=SPACES.Dict(z=SPACES.Box(-1, 1, (2,)), y=SPACES.MultiBinary(2)))


def gather(observations: list[Any], name: str = "observation") -> dict[str, Any]:
    """Return columns of observations, each part by its name."""
    if not isinstance(observations[0], dict):
        return {name: np.array(observations)}
    parts = (gather([each[key] for each in observations], f"{name}.{key}") for key in observations[0])
    return {key: column for part in parts for key, column in part.items()}


@pytest.mark.parametrize(
    "space",
    [
        SPACES.Box(-1, 1, (3,)),
        SPACES.Box(0, 255, (4, 5, 1), np.uint8),
        SPACES.Box(-1, 1, ()),
        SPACES.Discrete(5),
        SPACES.MultiDiscrete([3, 4]),
        NESTED,
    ],
    ids=str,
)
def test_digests_of_columns_are_those_of_each_observation(space: Any) -> None:
    observations = [space.sample() for _ in range(7)]
    columns = gather(observations)
    digests = digest_rows(columns, space)
    assert digests == [digest_observation(each, space) for each in observations]
    assert len({*digests}) > 1
    assert digest_rows({name: column[:0] for name, column in columns.items()}, space) == []
