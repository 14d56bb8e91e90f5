"""Lines are judged by what is wrong or by the place, and rivals at the same rate of false lines."""

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO

from studies.operators import cells, judging, run, tables
from studies.operators.cells import Cell
from studies.operators.faults import Task
from studies.operators.judging import is_named, is_planted, read_lines, set_thresholds
from studies.operators.operators import OPERATORS
from studies.operators.rivals import Records, boost, check, pivot, rank_cells, read_log, read_records
from studies.operators.samples import play
from whence.lab import read_rows
from whence.runs import RunDirectory


def make_row(operator: str, *, place: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    said = {method: {"seconds": 0.0, "strengths": [], "texts": []} for method in tables.METHODS}
    row = {"environment": "CartPole-v1", "operator": operator, "size": OPERATORS[operator].sizes[0], "seed": 0}
    return {
        **row,
        **said,
        "family": "classic",
        "steps": 1.0,
        "rewards": 0.0,
        "place": json.dumps(place or {}),
        **values,
    }


@pytest.mark.parametrize(
    ("operator", "right", "wrong"),
    [
        ("sign", "reward: Rewards have the opposite sign where x > 1", "reward: Rewards are not paid where x > 1"),
        ("unpaid", "reward: Rewards are not paid where x > 1", "reward: Rewards are late"),
        ("copy-swap", "dynamics: In copy 1 two actions are swapped", "dynamics: Copy 1 begins elsewhere"),
        ("stale", "observation: Every fifth observation repeats the one before", "observation: An entry is noise"),
        ("limit-as-end", "episode: The time limit is reported as an end", "episode: Episodes are random"),
        ("copy-reward", "reward: Copy 1 pays 10 times as much reward", "reward: Rewards change in round 11"),
        ("rate-high", "setting: Steps are too long: lower learning_rate", "setting: Raise gamma"),
    ],
)
def test_a_line_names_a_fault_by_what_is_wrong(operator: str, right: str, wrong: str) -> None:
    assert is_named(make_row(operator), right)
    assert not is_named(make_row(operator), wrong)
    assert not is_named(make_row("none"), right)


def test_a_line_of_a_place_names_a_fault_that_is_there() -> None:
    line = "place: reward of action 1, entry 3 = 2: -0.5"
    assert is_named(make_row("sign", place={"entry": 3, "bound": 0.1}), line)
    assert not is_named(make_row("sign", place={"entry": 13, "bound": 0.1}), line)
    assert not is_named(make_row("sign", place={"entry": 3}), line.replace("entry 3", "entry 33"))
    assert is_named(make_row("copy-reward", place={"copy": 1}), "place: reward of action 0, copy = 1: 3")
    assert not is_named(make_row("no-reward"), line)


def test_a_fault_counts_where_it_was_met() -> None:
    assert is_planted(make_row("sign", steps=0.0, rewards=0.2))
    assert not is_planted(make_row("sign", steps=0.04, rewards=0.05))
    assert is_planted(make_row("limit-as-end", steps=0.001))
    assert not is_planted(make_row("limit-as-end", steps=0.0))


def test_a_rival_has_few_lines_on_healthy_runs() -> None:
    twins = [
        make_row("none", pivots={"seconds": 0.0, "strengths": [float(number), 0.5], "texts": ["place: a", "place: b"]})
        for number in range(50)
    ]
    thresholds = set_thresholds(twins, 0.04)
    heard = [bool(read_lines(row, "pivots", thresholds["pivots"], frozenset())) for row in twins]
    assert sum(heard) == 2
    assert not any(read_lines(row, "SB3's log", thresholds["SB3's log"], frozenset()) for row in twins)


def make_records(rewards: np.ndarray, observations: np.ndarray, actions: np.ndarray) -> Records:
    size = len(rewards)
    steps = np.arange(size) % 50
    columns = {"reward": rewards, "advantage": np.zeros(size), "env_index": np.zeros(size), "step": steps}
    columns |= {"round": np.arange(size) // 100, "episode_id": np.arange(size) // 50}
    return Records(columns, actions, observations, np.array([4, 9]))


@pytest.fixture
def records() -> Records:
    """Rewards are the first entry, but have the other sign for action 1 where the second is high, in the last round."""
    rng = np.random.default_rng(0)
    observations, actions = rng.normal(size=(2_000, 2)), rng.integers(2, size=(2_000, 1)).astype(float)
    rewards = 1 + observations[:, 0] / 10
    rewards[(actions[:, 0] == 1) & (observations[:, 1] > 0.5)] *= -1
    return make_records(rewards, observations, actions)


def test_a_pivot_finds_the_cell_that_differs(records: Records) -> None:
    assert pivot(records)[0].text.startswith("reward of action 1, entry 9 = 2: -")
    assert rank_cells(np.ones(2_000), records, "reward")[0].strength == pytest.approx(0, abs=1e-3)


def test_trees_miss_what_other_episodes_do_not_show() -> None:
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(0)
    observations, actions = rng.normal(size=(2_000, 2)), rng.integers(2, size=(2_000, 1)).astype(float)
    rewards = observations[:, 0] + 3.0 * (np.arange(2_000) % 50 == 0)
    assert "first step = 1" in boost(make_records(rewards, observations, actions))[0].text


def test_the_next_observation_is_of_the_same_episode(records: Records) -> None:
    following = records.next_observations
    assert np.isnan(following[49::50]).all()
    assert np.array_equal(following[:49], records.observations[1:50])


def test_checks_say_what_is_wrong_with_an_environment() -> None:
    sample = play(gym.make("Pendulum-v1"), steps=300)

    def make(operator: str) -> Task:
        cell = Cell("Pendulum-v1", operator, OPERATORS[operator].sizes[0])
        return cells.make_task(gym.make("Pendulum-v1"), cell, sample, 1)

    healthy = {line.text for line in check(lambda: make("none"))}
    faulty = {line.text for line in check(lambda: make("unscaled-observation"))}
    assert any("observation" in text for text in faulty - healthy)


@pytest.mark.long  # what it puts together is tested above, part by part
def test_a_run_is_trained_judged_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ROUNDS", 5)
    monkeypatch.setattr(judging, "boost", lambda records: [])  # its library is not installed everywhere
    for operator in ("none", "rate-low"):
        cell = Cell("CartPole-v1", operator, OPERATORS[operator].sizes[0])
        run.train(cell, tmp_path)
        run.try_judging(cell, {}, tmp_path, tmp_path / "results")
    row = read_rows(tmp_path / "results" / tables.ROWS, judging.KEYS)[("CartPole-v1", "rate-low", 1e-7, 0)]
    assert row["seen"]["small steps"]["statistic"] > 2
    said = {"seconds": 0.0, "strengths": [0.5], "texts": ["setting: learning_rate: too low, raise it"]}
    run.try_judging(cell, {"SB3's log": said}, tmp_path, tmp_path / "results")
    again = read_rows(tmp_path / "results" / tables.ROWS, judging.KEYS)[("CartPole-v1", "rate-low", 1e-7, 0)]
    assert (again["SB3's log"], again["check_env"]["texts"]) == (said, row["check_env"]["texts"])
    tables.write_tables(tmp_path / "results")
    page = (tmp_path / "results" / "tables.md").read_text(encoding="utf-8")
    assert "| rate-low | 1 | 1 / 1 |" in page
    assert "| findings: wrong | 1 / 1 of 1 |" in page


def test_a_log_says_that_steps_are_short(tmp_path: Path) -> None:
    from whence.sb3 import InfluenceCallback

    model = PPO("MlpPolicy", "CartPole-v1", n_steps=64, learning_rate=1e-7, seed=0, device="cpu")
    model.learn(192, callback=InfluenceCallback(run=tmp_path / "run", save_every=0))
    directory = RunDirectory.open(tmp_path / "run")
    strongest = read_log(directory.table("metrics"))[0]
    assert "too low" in strongest.text
    assert strongest.strength > 100
    assert read_records(directory).observations.shape == (192, 4)
