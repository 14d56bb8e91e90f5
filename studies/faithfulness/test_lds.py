"""Scores held against trainings under both truths, and how far repeated outcomes agree."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from test_rounds import assert_untouched, model_of, recorded, state_of

from studies.faithfulness.lds import measure_agreement, study
from studies.faithfulness.outcomes import measure_outcomes, read_batch_size
from whence import IIF, RandomDrop, Return, WhenceError
from whence.lab.rounds import open_round, retrain

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")


@pytest.fixture(scope="module", params=["SGD", "Adam"])
def case(request):
    model = model_of(request.param)
    return model, recorded(model)


def test_minibatches_are_as_large_as_configured_even_if_a_rule_kept_less():
    model = model_of("SGD", batch_size=48)
    recording = recorded(model, RandomDrop(1.0, seed=0))
    assert max(map(len, recording.minibatches)) < 48
    assert read_batch_size(recording) == 48
    assert read_batch_size(replace(recording, update=replace(recording.update, batch_size=None))) == 64
    with pytest.raises(WhenceError, match="Round 2 was not trained on"):
        study(model.policy, replace(recording, minibatches=[], epochs=[]), target=Return())


class TestAgreement:
    def test_it_is_what_the_true_means_reach(self):
        # Signal and noise of one variance: two repetitions correlate by 1/2, and their mean with the signal by the
        # root of 2/3.
        rng = np.random.default_rng(0)
        signal = rng.normal(size=20_000)
        values = signal + rng.normal(size=(2, 20_000))
        reached = np.corrcoef(signal, values.mean(axis=0))[0, 1]
        assert reached == pytest.approx(np.sqrt(2 / 3), abs=0.01)
        assert measure_agreement(values) == pytest.approx(reached, abs=0.02)  # of ranks, which correlate a little less


class TestStudy:
    def test_scores_are_held_against_both_truths(self, case):
        model, recording = case
        before = state_of(model)
        repetitions, stages = [], []

        def evaluate(params, repetition):
            repetitions.append(repetition)
            return float(params["action_net.weight"].sum())

        result = study(
            model.policy,
            recording,
            target=Return(),
            count=6,
            orders=2,
            methods=["trajectory", "unrolled"],
            evaluate=evaluate,
            on_stage=stages.append,
        )
        assert_untouched(before, state_of(model))
        methods = ["snapshot", "crossfit", "trajectory", "unrolled", "advantage", "td-error", "random"]
        assert list(result.scores) == methods
        assert result.table.height == 7 * 2 * 3
        assert repetitions == [0] * 6 + [1] * 6 + [2] * 6
        assert "training 6 times, reshuffled, order 2 of 2" in stages
        for row in result.table.to_dicts():
            values = result.outcomes[row["truth"]][row["outcome"]]
            assert values.shape == ({"recorded": 1, "reshuffled": 2}[row["truth"]], 6)
            sums = result.kept.double().numpy() @ result.scores[row["score"]]
            assert row["lds"] == pytest.approx(stats.spearmanr(sums, values.mean(axis=0)).statistic)
            certain = row["truth"] == "recorded" and row["outcome"] != "evaluated"
            assert (row["ceiling"] == 1) == certain
        params = retrain(model.policy, recording, result.kept)
        round = open_round(model.policy, recording)
        fourth = {name: tensor[3] for name, tensor in params.items()}
        with torch.no_grad():
            assert result.outcomes["recorded"]["target"][0, 3] == pytest.approx(
                float(Return()(round.view, fourth, round.records)), rel=1e-5
            )
            outputs = round.view(fourth, round.inputs)
        ratio = (outputs.log_prob - round.records.log_probs).exp()
        surrogate = float((ratio * round.records.advantages).mean())
        assert result.outcomes["recorded"]["surrogate"][0, 3] == pytest.approx(surrogate, rel=1e-4)

    def test_subsets_are_of_what_the_round_trained_on(self):
        model = model_of()
        recording = recorded(model, IIF(drop=1.0))
        trained = set(recording.trained.tolist())
        assert 10 < len(trained) < 62
        result = study(model.policy, recording, target=Return(), count=4, orders=2, scores={"mine": np.arange(64)})
        assert result.kept.shape == (4, 64)
        assert result.kept.sum(dim=1).tolist() == [len(trained) // 2] * 4
        assert set(result.kept.any(dim=0).nonzero().flatten().tolist()) <= trained

    def test_policies_are_measured_in_eval_mode_and_repetitions_seed_generators(self):
        model = model_of("SGD")
        recording = recorded(model)
        trained = {name: torch.stack([p, p]) for name, p in recording.end.items()}
        modes, numbers = [], []

        def target(view, params, records):
            modes.append(view.module.training)
            return Return()(view, params, records)

        def evaluate(params, repetition):
            numbers.append((float(torch.rand(())), float(np.random.random()), random.random()))
            return 0.0

        model.policy.train()
        before = state_of(model)
        outcomes, _ = (
            measure_outcomes(model.policy, recording, trained, target, evaluate, number) for number in (1, 2)
        )
        assert_untouched(before, state_of(model))
        assert model.policy.training
        assert modes == [False] * 4
        one, same, other, again = numbers
        assert one == same
        assert other == again
        assert not set(one) & set(other)
        assert outcomes["target"][0] == outcomes["target"][1]
