"""The highest and the lowest of a score left out: each training as if it were alone, and what its curve says."""

from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from test_rounds import assert_untouched, model_of, recorded, state_of

from studies.faithfulness import removals
from studies.faithfulness.outcomes import measure_outcomes
from studies.faithfulness.removals import leave_out
from whence import IIF, Return, WhenceError
from whence.lab import attribute_round
from whence.lab.rounds import retrain

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")


@pytest.fixture(scope="module", params=["Adam"])
def case(request: pytest.FixtureRequest) -> Any:
    model = model_of(request.param)
    return model, recorded(model)


class RetrainSpy:
    """`retrain`, which also stores its arguments and results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, Any]] = []
        self.params: list[Any] = []
        monkeypatch.setattr(removals, "retrain", self)

    def __call__(self, policy: Any, recording: Any, kept: Any, *, orders: Any, memory: int) -> Any:
        self.calls.append((kept, orders))
        self.params.append(retrain(policy, recording, kept, orders=orders, memory=memory))
        return self.params[-1]


def weight(params: Any, repetition: int) -> float:
    return float(params["action_net.weight"].sum()) + repetition * float(params["action_net.bias"][0])


def select_rows(table: pl.DataFrame, **columns: Any) -> pl.DataFrame:
    return table.filter(*(pl.col(name).eq_missing(value) for name, value in columns.items()))


def test_curves_are_the_outcomes_without_the_highest_and_the_lowest(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, recording = case
    rng = np.random.default_rng(0)
    scores = {"one": rng.normal(size=64), "two": rng.normal(size=64)}
    spy, before, stages = RetrainSpy(monkeypatch), state_of(model), []
    settings = {"target": Return(), "shares": (0.5, 0.1, 0.11), "draws": 3, "orders": 2, "evaluate": weight}
    table = leave_out(model.policy, recording, scores, **settings, on_stage=stages.append)
    assert_untouched(before, state_of(model))
    assert dict(table.schema) == removals.SCHEMA
    assert stages[0] == "leaving out: training 22 times, recorded"
    assert stages[2] == "leaving out: training 22 times, reshuffled, order 2 of 2"
    sizes = [6, 7, 32]
    assert table.height == 2 * 3 * len(sizes) * (2 * len(scores) + 1)

    (kept, none), *shuffled = spy.calls
    assert none is None
    assert bool(kept[0].all())
    at_random = {count: [mask for mask in kept[1:] if 64 - int(mask.sum()) == count][4:] for count in sizes}
    assert {len({tuple(mask.tolist()) for mask in masks}) for masks in at_random.values()} == {3}

    def masks(score: str | None, side: str, count: int) -> Any:
        if score is None:
            return at_random[count]
        ranked = np.argsort(scores[score])
        mask = torch.ones(64, dtype=torch.bool)
        mask[ranked[-count:] if side == "top" else ranked[:count]] = False
        return [mask]

    assert len(shuffled) == 2
    assert all(torch.equal(mask, kept) for mask, _ in shuffled)
    first, second = (minibatches[0][0] for _, minibatches in shuffled)  # of training on everything
    assert not torch.equal(first, second)
    runs = [
        measure_outcomes(model.policy, recording, params, Return(), weight, number)
        for number, params in enumerate(spy.params)
    ]
    places = {tuple(mask.tolist()): place for place, mask in enumerate(kept)}
    for (truth, score, side, count), rows in table.group_by("truth", "score", "side", "removed"):
        chosen = [places[tuple(mask.tolist())] for mask in masks(score, side, count)]
        for row in rows.to_dicts():
            by_order = [run[row["outcome"]] for run in (runs[:1] if truth == "recorded" else runs[1:])]
            changes = np.array([values[chosen] - values[0] for values in by_order])
            repeated = changes.mean(axis=0) if side == "random" else changes[:, 0]
            spread = None if len(repeated) == 1 else repeated.std(ddof=1) / np.sqrt(len(repeated))
            assert (row["change"], row["spread"]) == (pytest.approx(changes.mean()), spread and pytest.approx(spread))


def test_the_lowest_left_out_raise_the_target_and_the_highest_lower_it() -> None:
    # Small steps of SGD are nearly linear in the weights, so the exact derivative knows which records help.
    model = model_of("SGD", n_envs=4, batch_size=32, learning_rate=0.01)
    recording = recorded(model)
    scores = attribute_round(model.policy, recording, target=Return(), method="unrolled").scores.double().numpy()
    table = leave_out(model.policy, recording, {"unrolled": scores}, target=Return(), shares=(0.05, 0.2), draws=6)
    for truth in ("recorded", "reshuffled"):
        for count in (6, 25):
            rows = select_rows(table, truth=truth, outcome="target", removed=count)
            top, bottom, random = (
                select_rows(rows, side=side).row(0, named=True) for side in ("top", "bottom", "random")
            )
            assert top["change"] < 0 < bottom["change"]
            assert top["change"] < random["change"] - 2 * random["spread"]
            assert bottom["change"] > random["change"] + 2 * random["spread"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shares": (0.5, 0.01)}, "A share of 0.01 of 64 records .* at least one record .* 1/64 to 62/64"),
        ({"scores": {"short": np.zeros(63)}}, r"The scores 'short' have shape \(63,\).* for each of the 64"),
        ({"scores": {"odd": np.where(np.arange(64) == 5, np.nan, 0.0)}}, "'odd' .* 63 of them finite"),
    ],
)
def test_what_is_refused(case: Any, changed: dict[str, Any], message: str) -> None:
    model, recording = case
    settings = {"scores": {"zero": np.zeros(64)}, "target": Return(), "shares": (0.1,)} | changed
    with pytest.raises(WhenceError, match=message):
        leave_out(model.policy, recording, settings.pop("scores"), **settings)


def test_what_a_rule_dropped_is_not_left_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    recording = recorded(model, IIF(drop=1.0))
    dropped = set(range(64)) - set(recording.trained.tolist())
    assert dropped
    spy = RetrainSpy(monkeypatch)
    scores = {"mine": np.array([-1.0 if position in dropped else position for position in range(64)])}
    leave_out(model.policy, recording, scores, target=Return(), shares=(0.1,), draws=2, orders=1)
    share = len(recording.trained) // 10
    for kept, _ in spy.calls:
        without = [set((~mask).nonzero().flatten().tolist()) for mask in kept]
        assert without[0] == dropped
        assert all(dropped < removed and len(removed) == len(dropped) + share for removed in without[1:])
        top, bottom = (sorted(removed - dropped) for removed in without[1:3])
        assert bottom == recording.trained[:share].tolist()
        assert top == recording.trained[-share:].tolist()
