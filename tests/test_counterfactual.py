"""Many trainings of one round at once: each as if it were alone; and how predictions are held against them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from test_rounds import assert_untouched, model_of, recorded, state_of
from whence import PPOClip, Return, WhenceError, attribute, attribute_round
from whence.counterfactual import agreement, lds, predicted, reshuffled, retrain, study, subsets
from whence.rounds import replay
from whence.rounds.replay import opened
from whence.sb3 import replay as replay_sb3
from whence.sb3.buffer import minibatches

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")


def drawn(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module", params=["SGD", "Adam", "RMSprop centred"])
def case(request):
    model = model_of(request.param)
    return model, recorded(model)


class TestRetrain:
    def test_each_training_is_as_if_alone(self, case):
        model, recording = case
        kept = subsets(64, 0.5, 5, drawn())
        before = state_of(model)
        together = retrain(model.policy, recording, kept, at_once=2)
        assert_untouched(before, state_of(model))
        for number, mask in enumerate(kept):
            alone = replay(model.policy, recording, weights=mask.float())
            for name, tensor in alone.items():
                assert torch.allclose(together[name][number], tensor, rtol=0, atol=1e-6), name
        assert not torch.allclose(together["action_net.weight"][0], together["action_net.weight"][1], atol=1e-6)

    def test_reshuffled_trainings_are_sb3s(self, case):
        model, recording = case
        kept = subsets(64, 0.6, 3, drawn())
        orders = reshuffled(kept, 16, 3, drawn(1))
        together = retrain(model.policy, recording, kept, orders=orders)
        for number in range(len(kept)):
            own = [order[number] for order in orders]
            assert sorted(torch.cat(own).tolist()) == sorted(kept[number].nonzero().flatten().tolist() * 3)
            epochs = [epoch for epoch in range(3) for _ in range(len(own) // 3)]
            as_sb3 = replay_sb3(model, replace(recording, minibatches=own, epochs=epochs))
            for name, tensor in together.items():
                assert torch.allclose(tensor[number], as_sb3[name], rtol=0, atol=1e-6), name

    def test_all_kept_is_the_round_that_was(self, case):
        model, recording = case
        whole = retrain(model.policy, recording, torch.ones(1, 64))
        for name, tensor in whole.items():
            assert torch.allclose(tensor[0], recording.end[name], rtol=0, atol=1e-6), name

    @pytest.mark.parametrize("kept", [torch.ones(64), torch.ones(2, 63), torch.zeros(1, 64), torch.ones(0, 64)])
    def test_subsets_that_cannot_be_trained_on(self, case, kept):
        model, recording = case
        with pytest.raises(WhenceError, match=r"kept has shape|fewer than two"):
            retrain(model.policy, recording, kept)


@given(st.integers(2, 60), st.floats(0.1, 1.0), st.integers(0, 5), st.sampled_from([4, 7, 16]))
@settings(max_examples=40, deadline=None)
def test_minibatches_are_cut_as_selection_cuts_them(n, share, seed, batch_size):
    if int(share * n) < 2:
        with pytest.raises(WhenceError, match="at least two records"):
            subsets(n, share, 1, drawn())
        return
    kept = subsets(n, share, 2, drawn(seed))
    assert kept.sum(dim=1).tolist() == [int(share * n)] * 2
    orders = reshuffled(kept, batch_size, 1, drawn(seed))
    permutation = torch.randperm(n, generator=drawn(seed)).numpy()
    for number, mask in enumerate(kept.numpy()):
        expected = minibatches(permutation[mask[permutation]], batch_size, last="keep", join=True)
        assert [order[number].tolist() for order in orders] == [minibatch.tolist() for minibatch in expected]


def test_subsets_of_different_sizes_are_not_trained_side_by_side():
    kept = torch.tensor([[True, True, False], [True, True, True]])
    with pytest.raises(WhenceError, match="keep 2 to 3 records"):
        reshuffled(kept, 2, 1, drawn())


class TestMeasures:
    def test_lds_is_spearmans_correlation(self):
        rng = np.random.default_rng(0)
        predictions = rng.normal(size=50)
        outcomes = predictions + rng.normal(size=50)
        found = lds(predictions, outcomes)
        assert found["lds"] == pytest.approx(stats.spearmanr(predictions, outcomes).statistic)
        assert found["low"] < found["lds"] < found["high"]
        assert lds(predictions, -predictions)["lds"] == pytest.approx(-1)
        assert lds(np.ones(50), outcomes) == {"lds": None, "low": None, "high": None}

    @pytest.mark.parametrize("shapes", [((2,), (2,)), ((5,), (4,)), ((3, 1), (3, 1))])
    def test_shapes_that_do_not_fit(self, shapes):
        with pytest.raises(WhenceError, match="both need"):
            lds(*(np.zeros(shape) for shape in shapes))

    def test_the_prediction_is_the_sum_over_what_is_kept(self, case):
        model, recording = case
        influence = attribute_round(model.policy, recording, target=Return())
        kept = subsets(64, 0.5, 3, drawn())
        for mask, value in zip(kept, predicted(influence, kept), strict=True):
            assert value == pytest.approx(float(influence.scores[mask].double().sum()))
        with pytest.raises(WhenceError, match="of 63 records, the scores of 64"):
            predicted(influence, kept[:, :63])

    def test_the_derivative_predicts_what_leaving_out_does(self):
        # Small steps of SGD are nearly linear in the weights: the exact derivative must rank subsets almost rightly.
        model = model_of("SGD", n_envs=4, batch_size=64, learning_rate=1e-3)
        recording = recorded(model)
        kept = subsets(128, 0.9, 60, drawn())
        params = retrain(model.policy, recording, kept, dtype=torch.float64)
        round = opened(model.policy, recording, dtype=torch.float64)
        target = Return()
        outcomes = np.array(
            [float(target(round.view, {k: v[i] for k, v in params.items()}, round.records).detach()) for i in range(60)]
        )
        scores = attribute_round(model.policy, recording, target=target, method="unrolled", dtype=torch.float64)
        assert lds(predicted(scores, kept), outcomes)["lds"] > 0.95


class TestAgreement:
    def test_repetitions_that_agree_leave_nothing_to_chance(self):
        values = np.arange(20.0)
        assert agreement(np.stack([values, values, 2 * values])) == pytest.approx(1)

    def test_it_is_what_the_true_means_reach(self):
        # Signal and noise of one variance: two repetitions correlate by 1/2, and their mean with the signal by the
        # root of 2/3.
        rng = np.random.default_rng(0)
        signal = rng.normal(size=20_000)
        values = signal + rng.normal(size=(2, 20_000))
        reached = np.corrcoef(signal, values.mean(axis=0))[0, 1]
        assert reached == pytest.approx(np.sqrt(2 / 3), abs=0.01)
        assert agreement(values) == pytest.approx(reached, abs=0.02)  # of ranks, which correlate a little less

    def test_pure_chance_and_constants(self):
        rng = np.random.default_rng(0)
        assert agreement(rng.normal(size=(2, 5000))) < 0.3
        assert agreement(np.stack([np.arange(5.0), np.ones(5)])) is None
        with pytest.raises(WhenceError, match="at least 2"):
            agreement(np.ones((1, 5)))


class TestStudy:
    def test_scores_are_held_against_both_truths(self, case):
        model, recording = case
        before = state_of(model)
        measured, told = [], []

        def evaluate(params):
            measured.append(params)
            return float(params["action_net.weight"].sum())

        made = study(
            model.policy,
            recording,
            target=Return(),
            count=6,
            orders=2,
            methods=["trajectory", "unrolled"],
            evaluate=evaluate,
            told=told.append,
        )
        assert_untouched(before, state_of(model))
        assert set(made.scores) == {"snapshot", "trajectory", "unrolled", "advantage", "td-error", "random"}
        assert made.table.height == 6 * 2 * 3
        assert len(measured) == 6 * 3
        assert "training 6 times, reshuffled, order 2 of 2" in told
        for row in made.table.to_dicts():
            values = made.outcomes[row["truth"]][row["outcome"]]
            assert values.shape == ({"recorded": 1, "reshuffled": 2}[row["truth"]], 6)
            sums = made.kept.double().numpy() @ made.scores[row["score"]]
            assert row["lds"] == pytest.approx(stats.spearmanr(sums, values.mean(axis=0)).statistic)
            certain = row["truth"] == "recorded" and row["outcome"] != "evaluated"
            assert (row["ceiling"] == 1) == certain
        params = retrain(model.policy, recording, made.kept)
        round = opened(model.policy, recording)
        own = {name: tensor[3] for name, tensor in params.items()}
        with torch.no_grad():
            assert made.outcomes["recorded"]["target"][0, 3] == pytest.approx(
                float(Return()(round.view, own, round.records)), rel=1e-5
            )
            outputs = round.view(own, round.inputs)
        ratio = (outputs.log_prob - round.records.log_probs).exp()
        surrogate = float((ratio * round.records.advantages).mean())
        assert made.outcomes["recorded"]["surrogate"][0, 3] == pytest.approx(surrogate, rel=1e-4)

    def test_the_snapshot_is_attributes_at_the_policy_that_collected(self):
        model = model_of("SGD")
        recording = recorded(model)
        made = study(model.policy, recording, target=Return(), count=3, orders=2, methods=[])
        with torch.no_grad():
            for name, parameter in model.policy.named_parameters():
                parameter.copy_(recording.start[name])
        objective = PPOClip(vf_coef=0.5)
        expected = attribute(model.policy, recording.records, target=Return(), objective=objective).scores
        assert np.allclose(made.scores["snapshot"], expected.numpy(), atol=1e-5 * float(expected.abs().max()))

    def test_too_few(self, case):
        model, recording = case
        with pytest.raises(WhenceError, match="at least 2 orders and 3 subsets"):
            study(model.policy, recording, target=Return(), orders=1)
