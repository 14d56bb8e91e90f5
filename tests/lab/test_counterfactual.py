"""Many trainings of one round side by side, each as if it were alone; and how predictions compare with them."""

import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from helpers.recorded_rounds import assert_untouched, model_of, recorded, replay, state_of
from helpers.toys import assert_close
from whence import WhenceError
from whence.engines.memory import measure_bytes
from whence.lab.rounds import NOBODY, compute_lds, draw_subsets, reshuffle, retrain
from whence.sb3 import replay_round as replay_sb3
from whence.sb3.rounds.sampling import cut_minibatches

pytestmark = pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")

retrain_module = sys.modules["whence.lab.rounds.retraining"]  # the package's name for it is the function


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module", params=[pytest.param("SGD", marks=pytest.mark.long), "Adam", "RMSprop centred"])
def case(request):
    model = model_of(request.param)
    return model, recorded(model)


class TestRetrain:
    def test_each_training_is_as_if_alone(self, case):
        model, recording = case
        kept = torch.cat([draw_subsets(64, 0.5, 5, seeded()), torch.ones(1, 64, dtype=torch.bool)])
        before = state_of(model)
        together = retrain(model.policy, recording, kept)
        assert_untouched(before, state_of(model))
        for number, mask in enumerate(kept):
            alone = replay(model.policy, recording, weights=mask.float())
            assert_close(alone, {name: of_all[number] for name, of_all in together.items()}, 1e-6)
        assert not torch.allclose(together["action_net.weight"][0], together["action_net.weight"][1], atol=1e-6)

    def test_reshuffled_trainings_are_sb3s(self, case):
        model, recording = case
        kept = draw_subsets(64, 0.6, 3, seeded())
        orders = reshuffle(kept, 16, 3, seeded(1))
        together = retrain(model.policy, recording, kept, orders=orders)
        for number in range(len(kept)):
            minibatches = [order[number] for order in orders]
            assert sorted(torch.cat(minibatches).tolist()) == sorted(kept[number].nonzero().flatten().tolist() * 3)
            epochs = [epoch for epoch in range(3) for _ in range(len(minibatches) // 3)]
            as_sb3 = replay_sb3(model, replace(recording, minibatches=minibatches, epochs=epochs))
            assert_close({name: of_all[number] for name, of_all in together.items()}, as_sb3, 1e-6)

    @pytest.mark.parametrize(
        ("kept", "message"),
        [
            (torch.ones(64), r"kept has shape \(64,\)"),
            (torch.ones(2, 63), r"kept has shape \(2, 63\)"),
            (torch.ones(0, 64), r"kept has shape \(0, 64\)"),
            (torch.cat([torch.ones(1, 64), torch.eye(64)[:1]]), "keeps 1 of 64 records .*fewer than two"),
            (-torch.ones(1, 64), "weight is negative"),
        ],
    )
    def test_subsets_that_cannot_be_trained_on(self, case, kept, message):
        model, recording = case
        with pytest.raises(WhenceError, match=message):
            retrain(model.policy, recording, kept)


@pytest.fixture(scope="module")
def wide():
    """A round whose trainings take more memory than their results, and the policy."""
    model = model_of("Adam", n_envs=4, batch_size=64, learning_rate=1e-3, policy_kwargs={"net_arch": [64, 64]})
    return model, recorded(model)


@pytest.mark.parametrize("truth", [pytest.param("recorded", marks=pytest.mark.long), "reshuffled"])
def test_small_budgets_give_the_same_parameters(wide, truth, monkeypatch):
    model, recording = wide
    kept = draw_subsets(128, 0.5, 5, seeded())
    orders = None if truth == "recorded" else reshuffle(kept, 64, 3, seeded(1))
    whole = retrain(model.policy, recording, kept, orders=orders)
    counts, train = [], retrain_module._train_side_by_side
    monkeypatch.setattr(
        retrain_module, "_train_side_by_side", lambda round, w, o: counts.append(len(w)) or train(round, w, o)
    )
    sizes, trained = set(), []
    for memory in (1, 4 * 10**6, 10**8):
        counts.clear()
        run = partial(retrain, model.policy, recording, kept, orders=orders, memory=memory)
        peak = max(measure_bytes(lambda run=run: trained.append(run())))
        assert counts[:2] == [1, 2]  # measured
        sizes.add(counts[2])
        assert counts[2] == 1 or peak < memory
        assert_close(whole, trained[-1], 1e-6)
    assert sizes >= {1, 5}
    assert len(sizes) == 3


@given(st.integers(2, 60), st.floats(0.1, 1.0), st.integers(0, 5), st.sampled_from([4, 7, 16]))
@settings(max_examples=40, deadline=None)
def test_minibatches_are_cut_as_selection_cuts_them(n, share, seed, batch_size):
    if int(share * n) < 2:
        with pytest.raises(WhenceError, match="at least two records"):
            draw_subsets(n, share, 1, seeded())
        return
    kept = draw_subsets(n, share, 2, seeded(seed))
    assert kept.sum(dim=1).tolist() == [int(share * n)] * 2
    kept = torch.cat([kept, torch.ones(1, n, dtype=torch.bool)])
    orders = reshuffle(kept, batch_size, 1, seeded(seed))
    permutation = torch.randperm(n, generator=seeded(seed)).numpy()
    for number, mask in enumerate(kept.numpy()):
        expected = cut_minibatches(permutation[mask[permutation]], batch_size, join=True)
        minibatches = [order[number][order[number] != NOBODY].tolist() for order in orders]
        assert [minibatch for minibatch in minibatches if minibatch] == [minibatch.tolist() for minibatch in expected]


@pytest.mark.parametrize("optimizer", [pytest.param("SGD", marks=pytest.mark.long), "Adam"])
def test_subsets_of_different_sizes_are_trained_as_if_alone(optimizer):
    model = model_of(optimizer)
    recording = recorded(model)
    # Four full minibatches; three of which the last has one more; one; and one of three records.
    kept = torch.arange(64) < torch.tensor([64, 49, 16, 3])[:, None]
    together = retrain(model.policy, recording, kept, orders=reshuffle(kept, 16, 3, seeded(1)))
    for number, mask in enumerate(kept):
        alone = retrain(model.policy, recording, mask[None], orders=reshuffle(mask[None], 16, 3, seeded(1)))
        assert_close({name: of_all[number, None] for name, of_all in together.items()}, alone, 1e-6)


def test_lds_is_spearmans_correlation():
    rng = np.random.default_rng(0)
    predictions = rng.normal(size=50)
    outcomes = predictions + rng.normal(size=50)
    measured = compute_lds(predictions, outcomes)
    assert measured["lds"] == pytest.approx(stats.spearmanr(predictions, outcomes).statistic)
    assert measured["low"] < measured["lds"] < measured["high"]
    assert compute_lds(predictions, -predictions)["lds"] == pytest.approx(-1)
    assert compute_lds(np.ones(50), outcomes) == {"lds": None, "low": None, "high": None}
