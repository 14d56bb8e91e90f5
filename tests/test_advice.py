"""What a run's metrics give reason to say, and that it is said once."""

import logging
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor

import whence
from toys import Toy, model
from whence.advice import give_advice
from whence.report.sections import gather_advice
from whence.rounds import METHODS
from whence.sb3 import InfluenceCallback

SGD = {"optimizer": "SGD"}


def kinds(config: dict[str, Any] | None = None, **columns: list[Any]) -> dict[str, int]:
    count = len(next(iter(columns.values())))
    table = pl.DataFrame({"round": list(range(1, count + 1)), **columns})
    return {one.kind: one.round for one in give_advice(table, config or SGD)}


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "RMSprop"])
def test_scores_under_an_adaptive_optimiser(optimizer: str) -> None:
    config = {"optimizer": optimizer}
    assert kinds(config, mean=[None, 0.1, 0.2]) == {"adaptive optimiser": 2}
    assert kinds(config, mean=[None, None]) == {}  # nothing was scored
    assert kinds(SGD, mean=[0.1, 0.2]) == {}
    assert kinds(config | {"score": "crossfit"}, mean=[0.1]) == {"adaptive optimiser": 1}
    for score in METHODS:  # which go through the optimiser's own steps
        assert kinds(config | {"score": score}, mean=[0.1, 0.2]) == {}


def test_a_page_knows_what_an_arm_scores_by() -> None:
    def said(config: dict[str, Any]) -> list[str]:
        table = pl.DataFrame({"round": [1], "mean": [0.1]})
        return list(gather_advice({("arm", 0): SimpleNamespace(config=config, table=lambda name: table)}))  # type: ignore[dict-item]

    assert said({"arm": "iif", "optimizer": "Adam"}) == ["adaptive optimiser"]
    assert said({"arm": "iif-smoothed", "optimizer": "Adam"}) == []
    assert said({"score": "unrolled", "optimizer": "Adam"}) == []


def test_nearly_all_dropped() -> None:
    assert kinds(dropped_share=[0.5, 0.94, 0.95, 0.99]) == {"drops nearly all": 3}
    assert kinds(dropped_share=[0.94] * 5) == {}


def test_a_kept_share_that_collapses() -> None:
    # Ten rounds keep 80%; the mean of the last ten falls below 40% when the sixth of the rounds that keep 10% is in.
    shares = [0.2] * 10 + [0.9] * 10
    assert kinds(dropped_share=shares) == {"kept share collapses": 20}
    assert kinds(dropped_share=[0.2] * 10 + [0.5] * 30) == {}
    assert kinds(dropped_share=shares[:19]) == {}


def test_entropy_that_collapses_after_selection_begins() -> None:
    losses = [-1.0, -1.0, -0.9, -0.7, -0.4, -0.3]
    assert kinds(**{"train/entropy_loss": losses, "dropped_share": [0.0, 0.0, 0.2, 0.2, 0.2, 0.2]}) == {
        "entropy collapses": 5
    }
    # Without selection, or long after it began, it is training's own doing.
    assert kinds(**{"train/entropy_loss": losses, "dropped_share": [0.0] * 6}) == {}
    slow = [-1.0] * 14 + [-0.1]
    assert kinds(**{"train/entropy_loss": slow, "dropped_share": [0.1] * 15}) == {}


def test_returns_that_do_not_rise() -> None:
    rising = [float(number) for number in range(30)]
    assert kinds(episode_return=rising) == {}
    # 0 ... 14, then 15: 2% of the range is 0.3, so ten returns may fall short of 15 by 3 in all: those from 13, 14, 15
    # on, which end in the 23rd, so that the 33rd ends the ten after them. Two rounds had no episode.
    assert kinds(episode_return=[None, None, *rising[:15], *[15.0] * 25]) == {"does not improve": 35}
    assert kinds(episode_return=[5.0] * 19) == {}
    assert kinds(episode_return=[5.0] * 20) == {"does not improve": 20}


def test_nothing_is_said_of_no_rounds() -> None:
    assert give_advice(pl.DataFrame(), SGD) == []


def test_the_callback_says_each_thing_once(caplog: pytest.LogCaptureFixture) -> None:
    class DropMost(whence.KeepAll):
        needs_influence = True

        def select(self, records: Any, influence: Any = None, progress: Any = None) -> whence.Selection:
            keep = super().select(records).keep
            keep[1:] = False
            return whence.Selection.dropping(keep, "test")

    toy = model()
    callback = InfluenceCallback(DropMost())
    with caplog.at_level(logging.WARNING, logger="whence"):
        toy.learn(4 * 32, callback=callback)
    said = [record.getMessage() for record in caplog.records if record.name == "whence"]
    assert len(said) == 2
    assert said[0].startswith("round 1: Scores describe one plain gradient step, but Adam rescales")
    assert said[1].startswith("round 1: 97% of the records were dropped")
    assert [row["round"] for row in callback.metrics] == [1, 2, 3, 4]


def test_the_mean_episode_return_is_that_of_the_monitor() -> None:
    toy = PPO("MlpPolicy", Monitor(Toy()), n_steps=64, batch_size=64, device="cpu", seed=0)
    callback = InfluenceCallback(whence.KeepAll())
    toy.learn(64, callback=callback)
    returns = toy.env.envs[0].get_episode_rewards()
    assert len(returns) > 1
    assert callback.metrics[0]["episode_return"] == pytest.approx(sum(returns) / len(returns), abs=1e-5)
