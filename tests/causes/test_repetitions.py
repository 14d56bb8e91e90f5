"""Trainings continued from a round with other seeds, unchanged and changed."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import polars as pl
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from whence.causes import Repetition, repeat
from whence.causes.conditions import select_where
from whence.causes.repetitions import PLAIN, RANDOM, WITHOUT
from whence.core import WhenceError
from whence.findings import find_drop, read_returns
from whence.runs import RunDirectory, list_checkpoints
from whence.sb3 import InfluenceCallback
from whence.statistics import share_difference, share_interval

ROUNDS, STEPS = 24, 64


class Levers(gym.Env[Any, Any]):
    """One step: of two levers, the one that a light shows pays 1."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = gym.spaces.Box(0, 1, (2,)), gym.spaces.Discrete(2)

    def _light(self) -> np.ndarray:
        self.lit = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self.lit]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._light(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self.lit)
        return self._light(), reward, True, False, {}


def rate(remaining: float) -> float:
    """Grow a thousandfold in the last third."""
    return 3e-3 if remaining > 1 / 3 else 3.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    path = tmp_path_factory.mktemp("runs") / "levers"
    settings: dict[str, Any] = {"n_steps": STEPS // 8, "batch_size": 32, "gamma": 0.5, "max_grad_norm": 1e9, "seed": 0}
    model = PPO("MlpPolicy", make_vec_env(Levers, 8), learning_rate=rate, policy_kwargs={"net_arch": [16]}, **settings)
    model.learn(ROUNDS * STEPS, callback=InfluenceCallback(run=path, save_every=1, folds=None))
    return RunDirectory.open(path)


def ask(run: RunDirectory, **options: Any) -> Repetition:
    return repeat(run, env=Levers, learning_rate=rate, seeds=options.pop("seeds", 3), **options)


class TestRepeat:
    def test_a_rate_that_breaks_it_breaks_it_again_and_another_prevents_it(self, run: RunDirectory) -> None:
        drop = find_drop(*read_returns(run))
        assert drop is not None
        assert drop.round in (17, 18, 19)
        generator = torch.get_rng_state().clone()
        repetition = ask(run, changes={"learning_rate": 3e-3})
        assert torch.get_rng_state().equal(generator)
        assert repetition.start in list_checkpoints(run.path)
        assert repetition.start <= drop.round - 2
        assert repetition.rounds == ROUNDS - repetition.start
        assert repetition.counts == {PLAIN: (3, 3), "with learning_rate = 0.003": (0, 3)}
        assert not repetition.notes
        plain, cured = repetition.summarise()
        assert plain["return"]["mean"] < 0.8 < cured["return"]["mean"]
        assert cured["change_high"] < 0
        assert "With learning_rate = 0.003, 0 of 3 break: fewer than unchanged." in repetition.text

    def test_what_was_measured_is_kept(self, run: RunDirectory) -> None:
        stages: list[str] = []
        first = ask(run, rounds=2, seeds=1, on_stage=stages.append)
        again = ask(run, rounds=2, seeds=2, on_stage=stages.append)
        assert stages == [f"seed 1 of 1: {PLAIN}", f"seed 2 of 2: {PLAIN}"]
        assert first.file == again.file
        assert again.table.head(2).equals(first.table)

    def test_other_seeds_are_other_trainings_and_the_same_seed_the_same(self, run: RunDirectory) -> None:
        table = ask(run, start=10, rounds=3, seeds=2).table
        values = table.filter(table["outcome"] == "return")["value"].to_list()
        assert len({*values}) > 1
        file = next((run.path / "again").glob("*.json"))
        for each in (run.path / "again").iterdir():
            each.unlink()
        assert file
        assert ask(run, start=10, rounds=3, seeds=2).table.equals(table)

    def test_without_records_and_without_as_many_random_ones(self, run: RunDirectory) -> None:
        repetition = ask(run, start=12, rounds=2, seeds=2, without="record_id % 4 = 0 and x0 = 1")
        assert [*repetition.counts] == [PLAIN, WITHOUT, RANDOM]
        table = repetition.table.filter(pl.col("outcome") == "left out")
        without, random = (table.filter(pl.col("variant") == name)["value"] for name in (WITHOUT, RANDOM))
        assert (without > 0).all()
        assert (random > 0).all()
        assert repetition.notes[-1].endswith("records were left out in a training.")

    def test_more_than_half_cannot_be_compared(self, run: RunDirectory) -> None:
        with pytest.raises(WhenceError, match="and as many others are needed to compare with"):
            ask(run, start=12, rounds=1, seeds=1, without="reward > -1")

    def test_without_a_checkpoint_the_optimiser_begins_anew(self, run: RunDirectory) -> None:
        start = next(number for number in range(1, ROUNDS) if number not in list_checkpoints(run.path))
        assert ask(run, start=start, rounds=1, seeds=1).notes[0].endswith("the optimiser begins anew.")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"start": 99}, "The round to continue after is 99; give one from 1 to 24"),
            ({"changes": {"rate": 1.0}}, "rate is no hyper-parameter of PPO"),
            ({"start": 12, "without": "rewards > 0"}, "--without is 'rewards > 0'"),
        ],
    )
    def test_what_is_refused(self, run: RunDirectory, options: dict[str, Any], message: str) -> None:
        with pytest.raises(WhenceError, match=message):
            ask(run, seeds=1, rounds=1, **options)

    def test_a_run_that_did_not_break_names_no_round(self, tmp_path: Path) -> None:
        model = PPO("MlpPolicy", Levers(), n_steps=STEPS, seed=0, policy_kwargs={"net_arch": [4]})
        model.learn(2 * STEPS, callback=InfluenceCallback(run=tmp_path / "run", folds=None))
        with pytest.raises(WhenceError, match="did not fall, so nothing says where to begin"):
            repeat(RunDirectory.open(tmp_path / "run"), env=Levers)


class TestShares:
    def test_of_newcombes_paper(self) -> None:
        """Newcombe (1998), Statistics in Medicine 17, table II, column (a), method 10: .0524 to .3339."""
        assert share_difference((56, 70), (48, 80)) == pytest.approx((0.0524, 0.3339), abs=5e-5)

    def test_wilson_by_hand(self) -> None:
        z = 1.959964
        centre, half = (0 + z**2 / 2) / (8 + z**2), z / (8 + z**2) * np.sqrt(z**2 / 4)
        assert share_interval(0, 8) == pytest.approx((centre - half, centre + half), abs=1e-6)


def test_a_condition_that_is_unknown_holds_not() -> None:
    table = pl.DataFrame({"reward": [1.0, None, -1.0]})
    assert select_where(table, "reward > 0").to_list() == [True, False, False]
