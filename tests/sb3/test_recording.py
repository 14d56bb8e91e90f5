"""`whence.record`: any loop trains as without it, and its run is read like a training's."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import polars as pl
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from stable_baselines3 import DQN
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize
from typer.testing import CliRunner

import whence
from helpers.toys import copy_signed
from whence.cli.app import app
from whence.core import RunDirectoryError, Unsupported, WhenceError
from whence.page import ExploredRun
from whence.page.content.rounds import describe_runs
from whence.runs import RunDirectory
from whence.sb3 import RecordResets
from whence.sb3.recorded_envs import RecordedAgents

COUNT, STEPS = 3, 300


class Walk(gym.Env[Any, Any]):
    """A walk on a line from a random place, paid by its terms; it ends beyond 3, and fills one array."""

    observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata: Mapping[str, Any] = {"render_modes": []}

    def __init__(self) -> None:
        self._seen = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._seen[:] = self.np_random.normal(size=2)
        return self._seen, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._seen[0] += np.float32((2 * int(action) - 1) * 0.5 + 0.3 * self.np_random.normal())
        self._seen[1] = self.np_random.normal()
        x = float(self._seen[0])
        return self._seen, 1 - abs(x), abs(x) > 3, False, {"near": -abs(x), "pulse": 1.0}


class Picture(gym.Wrapper[Any, Any, Any, Any]):
    """A walk that is seen as an image."""

    observation_space = gym.spaces.Box(0, 255, (64, 65, 1), np.uint8)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**kwargs)
        return self._draw(observation), info

    def step(self, action: Any) -> Any:
        observation, *rest = self.env.step(action)
        return self._draw(observation), *rest

    def _draw(self, observation: Any) -> Any:
        return np.full((64, 65, 1), int(20 * abs(observation[0])), np.uint8)


def make_walk() -> gym.Env[Any, Any]:
    return TimeLimit(Walk(), 20)


def make_watched() -> gym.Env[Any, Any]:
    return RecordResets(make_walk())


def make_picture() -> gym.Env[Any, Any]:
    return Picture(make_walk())


def play(env: gym.Env[Any, Any]) -> list[Any]:
    """Play one environment by chance, and return all that is seen."""
    rng, seen = np.random.default_rng(0), [env.reset(seed=5)[0].tobytes()]
    for _ in range(STEPS):
        observation, reward, terminated, truncated, info = env.step(int(rng.integers(2)))
        seen.append((observation.tobytes(), reward, terminated, truncated, info))
        if terminated or truncated:
            observation, info = env.reset()
            seen.append((observation.tobytes(), info))
    return seen


def play_vector(envs: gym.vector.VectorEnv[Any, Any, Any]) -> list[Any]:
    """Play several by chance, where environments that have ended and are not reset by themselves are reset."""
    rng, (observations, infos) = np.random.default_rng(0), envs.reset(seed=5)
    seen = [(observations.tolist(), sorted(infos))]
    for _ in range(STEPS):
        observations, rewards, terminated, truncated, infos = envs.step(rng.integers(2, size=COUNT))
        numbers = {key: infos[key].tolist() for key in ("near", "_near") if key in infos}
        seen.append(
            (observations.tolist(), rewards.tolist(), terminated.tolist(), truncated.tolist(), numbers, sorted(infos))
        )
        done = terminated | truncated
        if envs.metadata["autoreset_mode"] == AutoresetMode.DISABLED and done.any():
            seen.append(envs.reset(options={"reset_mask": done})[0].tolist())
    return seen


def play_vec_env(envs: Any) -> list[Any]:
    rng, seen = np.random.default_rng(0), []
    envs.seed(5)
    seen.append(envs.reset().tolist())
    for _ in range(STEPS):
        observations, rewards, dones, infos = envs.step(rng.integers(2, size=COUNT))
        keys = [sorted(key for key in info if key != "episode" and "whence" not in key) for info in infos]
        seen.append((observations.tolist(), rewards.tolist(), dones.tolist(), keys))
    return seen


def make_sync(mode: AutoresetMode) -> Callable[[], Any]:
    return lambda: SyncVectorEnv([make_walk] * COUNT, autoreset_mode=mode)


def make_vec_env() -> Any:
    return DummyVecEnv([lambda: Monitor(make_walk())] * COUNT)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], list[Any]]]] = {
    "environment": (make_walk, play),
    "picture": (make_picture, play),
    "next step": (make_sync(AutoresetMode.NEXT_STEP), play_vector),
    "same step": (make_sync(AutoresetMode.SAME_STEP), play_vector),
    "disabled": (make_sync(AutoresetMode.DISABLED), play_vector),
    "forked": (lambda: AsyncVectorEnv([make_watched] * COUNT, context="fork"), play_vector),
    "VecEnv": (make_vec_env, play_vec_env),
    "spawned": (lambda: SubprocVecEnv([make_watched] * COUNT, start_method="spawn"), play_vec_env),
    "around VecNormalize": (lambda: VecNormalize(make_vec_env()), play_vec_env),
    "inside of VecNormalize": (make_vec_env, lambda envs: play_vec_env(VecNormalize(envs))),
}


# Spawned workers import all that trains.
NAMED = [pytest.param(name, marks=pytest.mark.long if name == "spawned" else ()) for name in KINDS]


def read(path: Any) -> tuple[whence.RunDirectory, pl.DataFrame]:
    run = whence.open_run(path)
    return run, pl.concat([run.round("records", number) for number in run.rounds()], how="diagonal")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[list[Any], Any]]:
    """Return what a loop of some kind sees while it is recorded, and the path of its run."""
    runs: dict[str, tuple[list[Any], Any]] = {}

    def play_recorded(name: str) -> tuple[list[Any], Any]:
        if name not in runs:
            make, trial = KINDS[name]
            path = tmp_path_factory.mktemp("recorded") / "run"
            env = whence.record(make(), path, round=128)
            runs[name] = trial(env), path
            env.close()
        return runs[name]

    return play_recorded


@pytest.mark.parametrize("name", NAMED)
def test_what_a_loop_sees_is_the_same_and_the_run_holds_it(recorded: Any, name: str) -> None:
    make, trial = KINDS[name]
    if name in ("forked", "spawned"):  # without what notes resets in each
        kind: Any = partial(AsyncVectorEnv, context="fork")
        plain = (kind if name == "forked" else partial(SubprocVecEnv, start_method="spawn"))([make_walk] * COUNT)
        expected = trial(plain)
        plain.close()
    else:
        expected = trial(make())
    seen, path = recorded(name)
    assert seen == expected
    run, table = read(path)
    assert len(run.rounds()) > 2
    assert table["record_id"].to_list() == list(range(len(table)))
    # An environment that acts alone has every step; of several, those that wait for their reset have none.
    ordered = table.sort("env_index", "record_id")
    ends = ordered.filter(pl.col("end").is_not_null())
    waiting = len(ends) if name in ("next step", "forked") else 0
    assert abs(len(table) + waiting - STEPS * run.config["n_envs"]) <= COUNT * (waiting > 0)
    assert set(ends["end"].unique()) == {"terminated", "truncated"}
    assert (ends.filter(end="truncated")["step"] == 19).all()
    # Each episode's steps count from 0 and are of one environment; each but the last ones has an end.
    for _, episode in ordered.group_by("episode_id", maintain_order=True):
        assert episode["step"].to_list() == list(range(len(episode)))
        assert episode["env_index"].n_unique() == 1
        assert episode["end"][:-1].null_count() == len(episode) - 1
    assert table["episode_id"].n_unique() - len(ends) in range(COUNT + 1)
    numbers = table["info.near"].to_numpy()
    assert np.allclose(1 + numbers, table["reward"].to_numpy())
    mean = run.table("metrics")["episode_return"].to_list()
    returns = ordered.group_by("episode_id").agg(pl.col("reward").sum(), pl.col("end").last()).drop_nulls("end")
    if len(returns) <= 100:
        assert mean[-1] == pytest.approx(float(returns["reward"].mean()), rel=1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMED)
def test_an_episode_is_played_again_to_the_bit(recorded: Any, name: str) -> None:
    run, table = read(recorded(name)[1])
    make_again = make_picture if name == "picture" else make_walk
    assert ("observation" in table.columns) == (name != "picture")
    for episode in (0, int(table["episode_id"].max()) // 2):  # type: ignore[arg-type]
        replay = whence.replay_episode(run, episode, env=make_again)
        assert replay.mismatch is None
        assert len(replay.observations) == len(table.filter(episode_id=episode))


def test_a_second_reset_counts_alone(tmp_path: Any) -> None:
    env = whence.record(make_walk(), tmp_path / "run")
    for seed in (3, 4):
        env.reset(seed=seed)
    env.step(1)
    env.reset(seed=5)
    env.step(0)
    env.close()
    run, table = read(tmp_path / "run")
    assert table["episode_id"].to_list() == [0, 1]
    assert all(whence.replay_episode(run, episode, env=make_walk).mismatch is None for episode in range(2))


def test_a_reset_between_rounds_begins_an_episode_of_the_next_one(tmp_path: Any) -> None:
    env: Any = whence.record(make_walk(), tmp_path / "run", round=None)
    for seed in (3, 4):  # the first episode is left before it ends
        env.reset(seed=seed)
        env.end_round()
        env.step(1)
        env.step(0)
    env.close()
    run, table = read(tmp_path / "run")
    assert table["step"].to_list() == [0, 1, 0, 1]
    assert [len(run.round("episodes", number)) for number in run.rounds()] == [1, 1]
    assert all(whence.replay_episode(run, episode, env=make_walk).mismatch is None for episode in range(2))


def test_observations_are_those_before_the_action_and_copies(tmp_path: Any) -> None:
    env = whence.record(make_walk(), tmp_path / "run")
    seen = [env.reset(seed=1)[0].copy()]
    seen += [env.step(1)[0].copy() for _ in range(4)]
    env.close()
    _, table = read(tmp_path / "run")
    assert np.array_equal(np.stack(table["observation"].to_list()), np.stack(seen[:-1]))
    assert table["action"].to_list() == [1] * 4


class Duel:
    """Two agents of PettingZoo's kind: each walks by itself, and the second one leaves after five steps."""

    possible_agents = ("red", "blue")

    def __init__(self) -> None:
        self.walks = {agent: Walk() for agent in self.possible_agents}
        self.closed = False

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return Walk.observation_space

    def action_space(self, agent: str) -> gym.Space[Any]:
        return Walk.action_space

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.steps, self.agents = 0, list(self.possible_agents)
        return {agent: walk.reset(seed=seed)[0] for agent, walk in self.walks.items()}, {"red": {}, "blue": {}}

    def step(self, actions: Mapping[str, int]) -> Any:
        self.steps += 1
        each = {agent: self.walks[agent].step(action) for agent, action in actions.items()}
        out = [{agent: one[part] for agent, one in each.items()} for part in range(5)]
        out[2] = dict.fromkeys(actions, False)
        out[3] = {agent: self.steps == (5 if agent == "blue" else 8) for agent in actions}
        self.agents = [agent for agent in self.agents if not out[3].get(agent, True)]
        return tuple(out)

    def close(self) -> None:
        self.closed = True


def test_agents_that_leave_have_no_records(tmp_path: Any) -> None:
    env = Duel()
    recorded = whence.record(env, tmp_path / "run")
    assert isinstance(recorded, RecordedAgents)
    for _ in range(2):
        recorded.reset(seed=1)
        while recorded.agents:
            recorded.step(dict.fromkeys(recorded.agents, 1))
    recorded.close()
    assert env.closed
    _, table = read(tmp_path / "run")
    lengths = table.group_by("env_index", "episode_id", maintain_order=True).len()["len"].to_list()
    assert lengths == [8, 8, 5, 5]
    assert table.filter(end="truncated")["step"].to_list() == [7, 7, 4, 4]
    Duel.observation_space = lambda self, agent: Walk.observation_space if agent == "red" else Walk.action_space  # type: ignore[method-assign,assignment]
    with pytest.raises(WhenceError, match="different spaces"):
        whence.record(Duel(), tmp_path / "other")


def test_rounds_end_where_the_loop_says_and_hold_its_numbers(tmp_path: Any) -> None:
    env: Any = whence.record(make_walk(), tmp_path / "run", round=None)
    env.reset(seed=0)
    for _ in range(2):
        for step in range(7):
            env.step(step % 2)
        env.end_round({"train/approx_kl": 0.02})
    env.end_round()  # nothing was stepped
    env.close()
    run, table = read(tmp_path / "run")
    assert run.rounds() == [1, 2]
    assert run.table("metrics")["train/approx_kl"].to_list() == [0.02, 0.02]
    assert table["step"].to_list() == list(range(14))


def test_a_loop_that_starts_again_adds_rounds(tmp_path: Any, caplog: Any) -> None:
    for part in range(2):
        env = whence.record(make_walk(), tmp_path / "run", round=100)
        play(env)
        env.close()
        assert ("began anew" in caplog.text) == bool(part)
    run, table = read(tmp_path / "run")
    assert run.rounds() == [*range(1, 7)]
    assert run.notes["resumed"][0]["after_round"] == 3
    assert table["record_id"].is_unique().all()
    starts = table.filter("episode_start")
    assert starts["episode_id"].is_unique().all()
    with pytest.raises(RunDirectoryError, match=r"n_envs|observation_space"):
        whence.record(make_vec_env(), tmp_path / "run")
    whence.record(make_vec_env(), tmp_path / "run", overwrite=True).close()


def record_a_part(path: Any) -> Any:
    env = whence.record(make_walk(), path, round=50)
    env.reset(seed=0)
    for _ in range(120):
        if any(env.step(1)[2:4]):
            env.reset()
    return env


def record_and_die(path: Any) -> None:
    record_a_part(path)
    os.kill(os.getpid(), signal.SIGKILL)


def check_that_it_goes_on(path: Any) -> None:
    run, table = read(path)
    assert run.rounds() == [1, 2]
    assert len(table) == 100
    env = whence.record(make_walk(), path, round=50)
    play(env)
    env.close()
    assert len(read(path)[0].rounds()) == 8


def test_what_the_disk_holds_amid_a_recording_is_gone_on_with(tmp_path: Any) -> None:
    env = record_a_part(tmp_path / "alive")
    check_that_it_goes_on(copy_signed(tmp_path / "alive", tmp_path / "run"))
    env.close()


@pytest.mark.long
def test_a_kill_leaves_what_was_recorded(tmp_path: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=record_and_die, args=(tmp_path / "run",))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    check_that_it_goes_on(tmp_path / "run")


def test_dqn_trains_to_the_same_bits_and_commands_read_its_run(tmp_path: Any) -> None:
    def train(env: Any) -> list[torch.Tensor]:
        model = DQN("MlpPolicy", env, learning_starts=50, seed=0)
        model.learn(300)
        env.close()
        return [parameter.detach() for parameter in model.policy.parameters()]

    plain = train(make_walk())
    recorded = train(whence.record(make_walk(), tmp_path / "run", round=100, names={"actions": ["left", "right"]}))
    assert all(map(torch.equal, plain, recorded))
    run, runner = str(tmp_path / "run"), CliRunner()
    for words in (("findings",), ("report",), ("show", "--record", "50")):
        result = runner.invoke(app, [words[0], run, *words[1:]])
        assert result.exit_code == 0, result.output
    assert "left" in result.output
    (shown,) = describe_runs([ExploredRun(RunDirectory.open(run))])["runs"]
    assert {"record_id", "reward"} <= (names := {column["key"] for column in shown["columns"]})
    assert not names & {"score", "error"}
    for words in (("why", run, "--record", "50"), ("prove", run, "--where", "reward > 0"), ("attribute", run)):
        result = runner.invoke(app, list(words))
        assert isinstance(result.exception, RunDirectoryError)
        assert "recorded around its environments alone" in str(result.exception)


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (object(), {}, "got a object"),
        (make_walk(), {"round": 0}, "round is 0"),
        (make_walk(), {"names": ["left"]}, "names"),
        (make_walk(), {"env_factory": "nowhere"}, "module:function"),
    ],
)
def test_bad_arguments_are_refused_at_the_door(tmp_path: Any, env: Any, options: Any, message: str) -> None:
    with pytest.raises(WhenceError, match=message):
        whence.record(env, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


class Told(gym.ObservationWrapper[Any, Any, Any]):
    """A walk with a text of what to do, as MiniGrid's."""

    observation_space = gym.spaces.Dict(mission=gym.spaces.Text(8), walk=Walk.observation_space)

    def observation(self, observation: Any) -> Any:
        return {"mission": "go", "walk": observation}


def make_told() -> gym.Env[Any, Any]:
    return Told(make_walk())


def test_texts_are_left_out_and_episodes_are_played_again_all_the_same(tmp_path: Any, caplog: Any) -> None:
    env = whence.record(make_told(), tmp_path / "run", round=128)
    env.reset(seed=1)
    for _ in range(200):
        if any(env.step(1)[2:4]):
            env.reset()
    env.close()
    assert "mission cannot be stored" in caplog.text
    run, table = read(tmp_path / "run")
    assert [name for name in table.columns if name.startswith("observation.")] == ["observation.walk"]
    assert whence.replay_episode(run, 2, env=make_told).mismatch is None
    assert whence.inspect(run)


@pytest.mark.parametrize(
    ("observations", "actions"),
    [
        (gym.spaces.Tuple([Walk.observation_space]), Walk.action_space),
        (gym.spaces.Dict(a=gym.spaces.Text(3)), Walk.action_space),
        (Walk.observation_space, gym.spaces.Dict(a=Walk.action_space)),
        (Walk.observation_space, gym.spaces.Text(3)),
    ],
)
def test_spaces_that_no_run_holds_are_refused_at_the_door(tmp_path: Any, observations: Any, actions: Any) -> None:
    env = Walk()
    env.observation_space, env.action_space = observations, actions
    with pytest.raises(Unsupported, match="cannot hold"):
        whence.record(env, tmp_path / "run")


def test_a_second_recording_of_a_directory_ends_the_first(tmp_path: Any, caplog: Any) -> None:
    envs = []
    for _ in range(2):
        envs.append(whence.record(make_walk(), tmp_path / "run"))
        envs[-1].reset(seed=0)
        for _ in range(8):
            envs[-1].step(0)
    assert "recorded anew" in caplog.text
    envs[0].step(0)
    for env in envs:
        env.close()
        env.close()
    run = whence.open_run(tmp_path / "run")
    assert [len(run.round("records", number)) for number in run.rounds()] == [8, 8]


def test_actions_are_those_that_were_sent(tmp_path: Any) -> None:
    class Doubling(gym.ActionWrapper[Any, Any, Any]):
        def action(self, action: Any) -> Any:
            action *= 0
            return int(action[0])

    env = whence.record(Doubling(make_walk()), tmp_path / "run")
    env.reset(seed=0)
    env.step(np.array([1]))
    env.close()
    assert read(tmp_path / "run")[1]["action"].to_list() == [1]


def test_numbers_of_a_round_keep_what_whence_counts(tmp_path: Any) -> None:
    env: Any = whence.record(make_walk(), tmp_path / "run", round=None)
    env.reset(seed=0)
    env.step(1)
    env.end_round({"round": 9, "loss": None, "kl": np.float32(0.5)})
    env.close()
    assert whence.open_run(tmp_path / "run").table("metrics").drop("episode_return").rows() == [(1, 0.5, 1, 1, 1)]


def test_a_number_that_is_not_finite_is_found_and_spoils_no_figure(tmp_path: Any) -> None:
    class Broken(gym.RewardWrapper[Any, Any]):
        def reward(self, reward: Any) -> Any:
            return np.nan if reward > 0.9 else reward

    env = whence.record(Broken(make_walk()), tmp_path / "run")
    play_on = np.random.default_rng(0)
    env.reset(seed=0)
    for _ in range(900):
        if any(env.step(int(play_on.integers(2)))[2:4]):
            env.reset()
    env.close()
    findings = whence.find(tmp_path / "run")
    assert "Numbers are not finite: the reward in" in findings[0].title
    assert "nan" not in " ".join(finding.title + finding.evidence for finding in findings)
