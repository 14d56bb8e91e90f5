"""Findings on settings, from a run's metrics."""

import logging
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import whence
from helpers.toys import model
from whence import RunDirectory
from whence.findings import find
from whence.findings.settings import give_advice
from whence.page import write_report
from whence.sb3 import InfluenceCallback


def kinds(**columns: list[Any]) -> dict[str, int]:
    count = len(next(iter(columns.values())))
    table = pl.DataFrame({"round": list(range(1, count + 1)), **columns})
    return {name: finding.round for name, finding in give_advice(table).items()}


def test_a_page_tells_of_interruptions(tmp_path: Path) -> None:
    for notes, told in (({}, 0), ({"resumed": [{"after_round": 3, "reason": "other episodes"}]}, 1)):
        run = RunDirectory.create(tmp_path / str(told), {"experiment": {"arm": "iif", "seed": 4}})
        run.note(**notes)
        write_report(run, tmp_path / "page.html")
        text = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert text.count("iif, seed 4, was interrupted after round 3, and went on otherwise") == told


def test_nearly_all_dropped_and_entropy_that_collapses_after_selection_begins() -> None:
    assert kinds(dropped_share=[0.5, 0.94, 0.95, 0.99]) == {"dropped responses": 3}
    assert kinds(dropped_share=[0.94] * 5) == {}
    losses = [-1.0, -1.0, -0.9, -0.7, -0.4, -0.3]
    begun = {"train/entropy_loss": losses, "dropped_share": [0.0, 0.0, 0.2, 0.2, 0.2, 0.2]}
    assert kinds(**begun) == {"entropy since the first selection": 5}
    # Without selection, or long after it began, it is training's own doing.
    assert kinds(**{"train/entropy_loss": losses, "dropped_share": [0.0] * 6}) == {}
    slow = [-1.0] * 14 + [-0.1]
    assert kinds(**{"train/entropy_loss": slow, "dropped_share": [0.1] * 15}) == {}


# A run whose model came to repeat one word: 16 tokens a response, all of them the same.
COLLAPSE: dict[str, list[Any]] = {
    "train/entropy_loss": [-3.35, -2.9, -1.2, -0.15, -0.008],
    "kl": [0.0, 1.5, 11.0, 31.0, 43.0],
    "length": [12.0, 13.0, 15.0, 16.0, 16.0],
    "ended_share": [0.9, 0.8, 0.4, 0.05, 0.0],
    "dropped_share": [0.0] * 5,
}


def test_a_language_model_that_collapses(tmp_path: Path) -> None:
    table = pl.DataFrame({"round": range(1, 6), **COLLAPSE})
    findings = give_advice(table)
    assert findings.keys() == {"entropy of the tokens", "divergence from the start model", "ends of responses"}
    assert {finding.round for finding in findings.values()} == {4}
    assert "31 nats a response" in findings["divergence from the start model"].title
    assert "fell from 3.35 in the first round to 0.15" in findings["entropy of the tokens"].title
    assert "5% end before the length limit, 90% did" in findings["ends of responses"].title
    for finding in findings.values():
        assert "KL coefficient (`init_kl_coef`; TRL's `beta`), lower `learning_rate`" in finding.advice
        assert "reward pays for" in finding.advice
    run = RunDirectory.create(tmp_path / "run", {"kind": "language"})
    for row in table.to_dicts():
        run.append("metrics", row)
    assert {finding.round for finding in find(run)} == {4}


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
