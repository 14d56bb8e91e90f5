"""Scores held against trainings under both truths, how far repeated outcomes agree, and the highest scores left out."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from helpers.recorded_rounds import assert_untouched, model_of, recorded, state_of
from studies.faithfulness.retraining import DRAWS, leave_out, measure_agreement, measure_outcomes, study
from studies.faithfulness.scores import compute_scores
from whence import Return
from whence.lab.rounds import attribute_round, draw_subsets, open_round, retrain

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")


@pytest.fixture(scope="module", params=[pytest.param("SGD", marks=pytest.mark.long), "Adam"])
def case(request: pytest.FixtureRequest) -> Any:
    model = model_of(request.param)
    return model, recorded(model)


def test_the_ceiling_is_what_the_true_means_reach() -> None:
    # Signal and noise of one variance: two repetitions correlate by 1/2, and their mean with the signal by the root of
    # 2/3. Ranks correlate a little less.
    rng = np.random.default_rng(0)
    signal = rng.normal(size=20_000)
    values = signal + rng.normal(size=(2, 20_000))
    reached = np.corrcoef(signal, values.mean(axis=0))[0, 1]
    assert reached == pytest.approx(np.sqrt(2 / 3), abs=0.01)
    assert measure_agreement(values) == pytest.approx(reached, abs=0.02)


def test_scores_are_held_against_both_truths(case: Any) -> None:
    model, recording = case
    before, repetitions = state_of(model), []

    def evaluate(params: Any, repetition: int) -> float:
        repetitions.append(repetition)
        return float(params["action_net.weight"].sum())

    scores = compute_scores(model.policy, recording, target=Return(), methods=["unrolled"])
    result = study(
        model.policy, recording, scores, target=Return(), share=0.5, count=6, orders=2, evaluate=evaluate, seed=0
    )
    assert_untouched(before, state_of(model))
    assert torch.equal(result.kept, draw_subsets(64, 0.5, 6, torch.Generator().manual_seed(0)))
    assert result.table.height == len(scores) * 2 * 3
    assert repetitions == [0] * 6 + [1] * 6 + [2] * 6
    for row in result.table.to_dicts():
        values = result.outcomes[row["truth"]][row["outcome"]]
        assert values.shape == ({"recorded": 1, "reshuffled": 2}[row["truth"]], 6)
        sums = result.kept.double().numpy() @ scores[row["score"]]
        assert row["lds"] == pytest.approx(stats.spearmanr(sums, values.mean(axis=0)).statistic)
        certain = row["truth"] == "recorded" and row["outcome"] != "evaluated"
        assert (row["ceiling"] == 1) == certain
    settings = {"target": Return(), "share": 0.5, "count": 6, "orders": 2, "seed": 0}
    alone = study(model.policy, recording, scores, recorded=False, **settings).outcomes
    assert [*alone] == ["reshuffled"]
    assert np.array_equal(alone["reshuffled"]["target"], result.outcomes["reshuffled"]["target"])
    round = open_round(model.policy, recording)
    fourth = {name: tensor[3] for name, tensor in retrain(model.policy, recording, result.kept).items()}
    with torch.no_grad():
        target = float(Return()(round.view, fourth, round.records))
        outputs = round.view(fourth, round.inputs)
    assert result.outcomes["recorded"]["target"][0, 3] == pytest.approx(target, rel=1e-5)
    ratio = (outputs.log_prob - round.records.log_probs).exp()
    surrogate = float((ratio * round.records.advantages).mean())
    assert result.outcomes["recorded"]["surrogate"][0, 3] == pytest.approx(surrogate, rel=1e-4)


def test_policies_are_measured_in_eval_mode_and_repetitions_seed_generators(case: Any) -> None:
    model, recording = case
    trained = {name: torch.stack([p, p]) for name, p in recording.end.items()}
    modes, numbers = [], []

    def target(view: Any, params: Any, records: Any) -> Any:
        modes.append(view.module.training)
        return Return()(view, params, records)

    def evaluate(params: Any, repetition: int) -> float:
        numbers.append((float(torch.rand(())), float(np.random.random()), random.random()))
        return 0.0

    model.policy.train()
    before = state_of(model)
    for number in (1, 2):
        measure_outcomes(model.policy, recording, trained, target, evaluate, number)
    assert_untouched(before, state_of(model))
    assert model.policy.training
    assert modes == [False] * 4
    one, same, other, again = numbers
    assert one == same
    assert other == again
    assert not set(one) & set(other)


def test_changes_are_the_outcomes_without_the_highest_and_the_lowest(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, recording = case
    scores, calls = np.random.default_rng(0).normal(size=64), []

    def spy(policy: Any, recording: Any, kept: Any, *, orders: Any) -> Any:
        calls.append((kept, retrain(policy, recording, kept, orders=orders)))
        return calls[-1][1]

    def evaluate(params: Any, repetition: int) -> float:
        return float(params["action_net.weight"].sum()) + repetition * float(params["action_net.bias"][0])

    monkeypatch.setattr("studies.faithfulness.retraining.retrain", spy)
    settings = {"target": Return(), "share": 0.11, "orders": 2, "evaluate": evaluate}
    table = leave_out(model.policy, recording, {"one": scores}, **settings)
    (kept, first), (again, second) = calls
    assert torch.equal(kept, again)
    assert not torch.equal(first["action_net.weight"][0], second["action_net.weight"][0])
    dropped = [{*(~mask).nonzero().flatten().tolist()} for mask in kept]
    ranked = np.argsort(scores).tolist()
    assert dropped[:3] == [set(), {*ranked[-7:]}, {*ranked[:7]}]
    assert {len(each) for each in dropped[3:]} == {7}
    assert len({frozenset(each) for each in dropped[3:]}) == DRAWS
    runs = [
        measure_outcomes(model.policy, recording, params, Return(), evaluate, number)
        for number, params in enumerate((first, second), start=1)
    ]
    places = {"top": slice(1, 2), "bottom": slice(2, 3), "random": slice(3, None)}
    assert table.height == 3 * len(places)
    for row in table.to_dicts():
        changes = [run[row["outcome"]][places[row["side"]]] - run[row["outcome"]][0] for run in runs]
        assert row["change"] == pytest.approx(np.mean(changes))


def test_the_lowest_left_out_raise_the_target_and_the_highest_lower_it() -> None:
    # Small steps of SGD are nearly linear in the weights, so the exact derivative knows which records help.
    model = model_of("SGD", n_envs=4, batch_size=32, learning_rate=0.01)
    recording = recorded(model)
    scores = attribute_round(model.policy, recording, target=Return(), method="unrolled").scores.double().numpy()
    for share in (0.05, 0.2):
        table = leave_out(model.policy, recording, {"unrolled": scores}, target=Return(), share=share, orders=4)
        rows = {row["side"]: row["change"] for row in table.filter(outcome="target").to_dicts()}
        assert rows["top"] < min(0, rows["random"])
        assert rows["bottom"] > max(0, rows["random"])
