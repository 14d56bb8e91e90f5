"""Advice from a run's metrics, each kind once."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

import whence
from toys import model
from whence.advice import give_advice
from whence.page.html import gather_advice
from whence.sb3 import InfluenceCallback


def kinds(config: dict[str, Any] | None = None, **columns: list[Any]) -> dict[str, int]:
    count = len(next(iter(columns.values())))
    table = pl.DataFrame({"round": list(range(1, count + 1)), **columns})
    return {advice.kind: advice.round for advice in give_advice(table, config or {})}


def test_a_page_tells_of_interruptions() -> None:
    def list_kinds(config: dict[str, Any], **notes: Any) -> list[str]:
        table = pl.DataFrame({"round": [1], "dropped_share": [0.99 if config else 0.0]})
        run: Any = SimpleNamespace(config=config, table=lambda name: table, notes=notes, path=Path("run"))
        return list(gather_advice({("arm", 0): run}))

    assert list_kinds({"arm": "iif"}) == ["drops nearly all"]
    assert list_kinds({}, resumed=[{"after_round": 3, "reason": "other episodes"}]) == ["interrupted"]


def test_a_page_tells_settings_once() -> None:
    table = pl.DataFrame({"round": range(1, 5), "train/explained_variance": [0.0] * 4, "dropped_share": [0.99] * 4})
    run: Any = SimpleNamespace(config={}, table=lambda name: table, notes={}, path=Path("run"))
    assert {*gather_advice({("arm", 0): run})} == {"critic is dead", "drops nearly all"}
    assert {*gather_advice({("arm", 0): run}, [run.path])} == {"drops nearly all"}


def test_nearly_all_dropped() -> None:
    assert kinds(dropped_share=[0.5, 0.94, 0.95, 0.99]) == {"drops nearly all": 3}
    assert kinds(dropped_share=[0.94] * 5) == {}


def test_entropy_that_collapses_after_selection_begins() -> None:
    losses = [-1.0, -1.0, -0.9, -0.7, -0.4, -0.3]
    assert kinds(**{"train/entropy_loss": losses, "dropped_share": [0.0, 0.0, 0.2, 0.2, 0.2, 0.2]}) == {
        "entropy collapses": 5
    }
    # Without selection, or long after it began, it is training's own doing.
    assert kinds(**{"train/entropy_loss": losses, "dropped_share": [0.0] * 6}) == {}
    slow = [-1.0] * 14 + [-0.1]
    assert kinds(**{"train/entropy_loss": slow, "dropped_share": [0.1] * 15}) == {}


def test_steps_that_are_short_or_long() -> None:
    name = "train/approx_kl"
    assert kinds(**{name: [9.0] + [0.004] * 10 + [0.02] * 9}) == {"steps are short or long": 11}
    assert kinds(**{name: [9.0] + [0.11] * 10}) == {"steps are short or long": 11}
    assert kinds(**{name: [9.0] + [0.004] * 4 + [0.06] * 6}) == kinds(**{name: [0.004] * 10}) == {}
    assert kinds(**{name: [0.001] * 20, "length": [7.0] * 20}) == {}
    # Measured before the only step of a round, it is 0.
    one_step = {"hyperparameters": {"n_epochs": 1, "batch_size": 64}}
    assert kinds(one_step, **{name: [0.0] * 12, "kept": [64] * 12}) == {}
    assert kinds(one_step, **{name: [0.0] * 12, "kept": [99] * 12}) == {"steps are short or long": 11}
    metrics = pl.DataFrame({"round": range(1, 13), name: [0.00375] * 12})
    (advice,) = give_advice(metrics, {})
    assert "0.0037 nats" in advice.text or "0.0038 nats" in advice.text
    assert "rounds 2 to 11" in advice.text
    assert "Try three times the `learning_rate`" in advice.text
    (advice,) = give_advice(metrics.with_columns(pl.lit(0.24).alias(name)), {})
    assert "Try a third of the `learning_rate`" in advice.text


def test_returns_that_do_not_rise() -> None:
    rising = [float(number) for number in range(30)]
    assert kinds(episode_return=rising) == {}
    # 0 ... 14, then 15: 2% of the range is 0.3, so ten returns may fall short of 15 by 3 in all: those from 13, 14, 15
    # on, which end in the 23rd, so that the 33rd ends the ten after them. Two rounds had no episode.
    assert kinds(episode_return=[None, None, *rising[:15], *[15.0] * 25]) == {"does not improve": 35}
    assert kinds(episode_return=[5.0] * 19) == {}
    assert kinds(episode_return=[5.0] * 20) == {"does not improve": 20}


# A run whose model came to repeat one word: 16 tokens a response, all of them the same.
COLLAPSE: dict[str, list[Any]] = {
    "train/entropy_loss": [-3.35, -2.9, -1.2, -0.15, -0.008],
    "kl": [0.0, 1.5, 11.0, 31.0, 43.0],
    "length": [12.0, 13.0, 15.0, 16.0, 16.0],
    "ended_share": [0.9, 0.8, 0.4, 0.05, 0.0],
    "dropped_share": [0.0] * 5,
}


def test_a_language_model_that_collapses() -> None:
    expected = {"responses become alike": 4, "leaves the start model": 4, "responses do not end": 4}
    assert kinds(**COLLAPSE) == expected
    table = pl.DataFrame({"round": range(1, 6), **COLLAPSE})
    texts = {advice.kind: advice.text for advice in give_advice(table, {})}
    assert "31 nats a response" in texts["leaves the start model"]
    assert "fell from 3.35 in the first round to 0.15" in texts["responses become alike"]
    assert "5% end before the length limit, 90% did" in texts["responses do not end"]
    for text in texts.values():
        assert "KL coefficient (`init_kl_coef`; TRL's `beta`), lower `learning_rate`" in text
        assert "reward pays for" in text


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
    messages = [record.getMessage() for record in caplog.records if record.name == "whence"]
    assert len(messages) == 1
    assert messages[0].startswith("round 1: 97% of the records were dropped")
    assert [row["round"] for row in callback.metrics] == [1, 2, 3, 4]
