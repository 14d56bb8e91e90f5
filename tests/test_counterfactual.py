"""Many trainings of one round at once: each as if it were alone; and how predictions are held against them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from test_rounds import assert_untouched, model_of, recorded, state_of
from whence import Return, WhenceError, attribute_round
from whence.counterfactual import lds, predicted, reshuffled, retrain, subsets
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
