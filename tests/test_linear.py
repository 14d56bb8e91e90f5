"""Linear predictors fitted to many trainings."""

import numpy as np
import pytest
import torch

from whence import WhenceError
from whence.counterfactual import additive_ceiling, compute_lds, draw_subsets, fit_datamodel
from whence.counterfactual.linear import _PENALTIES, _fit_ridge


def draw_halves(count, n=40, seed=0):
    return draw_subsets(n, 0.5, count, torch.Generator().manual_seed(seed))


@pytest.fixture
def truth():
    return np.random.default_rng(1).normal(size=40)


def test_what_is_linear_is_found(truth):
    kept = draw_halves(200)
    datamodel = fit_datamodel(kept, kept.double().numpy() @ truth)
    assert datamodel.lds > 0.99
    # All subsets are of one size, so that a constant added to every score changes nothing.
    assert np.allclose(datamodel.scores - datamodel.scores.mean(), truth - truth.mean(), atol=1e-3)


def test_a_prior_says_where_to_look(truth):
    kept, prior = draw_halves(25), 3 * truth + 0.1 * np.random.default_rng(2).normal(size=40)
    outcomes = kept.double().numpy() @ truth
    alone, helped = fit_datamodel(kept, outcomes), fit_datamodel(kept, outcomes, prior=prior)
    fresh = draw_halves(500, seed=9).double().numpy()
    held_out = [compute_lds(fresh @ fit.scores, fresh @ truth)["lds"] for fit in (alone, helped)]
    assert held_out[0] < 0.9 < 0.99 < held_out[1]
    assert helped.lds > 0.98
    wrong = fit_datamodel(draw_halves(200), draw_halves(200).double().numpy() @ truth, prior=-prior)
    assert wrong.lds > 0.99  # its multiple may be negative


def test_nothing_is_found_in_noise():
    kept = draw_halves(300)
    noise = np.random.default_rng(3).normal(size=300)
    datamodel = fit_datamodel(kept, noise)
    assert datamodel.lds is None or abs(datamodel.lds) < 0.12
    assert np.abs(datamodel.scores).max() < 0.1


@pytest.mark.parametrize(
    ("count", "noise"), [(30, 1.0), (60, 1.0), (30, 1e3)], ids=["fewer than records", "more", "nothing but noise"]
)
def test_the_penalty_leaves_one_out(truth, count, noise):
    x = draw_halves(count).double().numpy()
    y = x @ truth + noise * np.random.default_rng(4).normal(size=count)
    scores, penalty = _fit_ridge(x, y, None)

    def error(one):
        left_out = []
        for row in range(count):
            rest = np.arange(count) != row
            # Nothing of the row: not in the means either.
            others, residual = x[rest] - x[rest].mean(0), y[rest] - y[rest].mean()
            dual = (
                np.linalg.solve(others @ others.T + one * np.eye(count - 1), residual)
                if np.isfinite(one)
                else 0 * residual
            )
            left_out.append(y[row] - y[rest].mean() - (x[row] - x[rest].mean(0)) @ others.T @ dual)
        return np.mean(np.square(left_out))

    assert penalty == min([*_PENALTIES, np.inf], key=error)
    assert np.isfinite(penalty) == (noise == 1.0)
    if np.isfinite(penalty):
        centred, residual = x - x.mean(0), y - y.mean()
        direct = centred.T @ np.linalg.solve(centred @ centred.T + penalty * np.eye(count), residual)
        assert np.allclose(scores, direct)


def test_little_is_taken_from_few_trainings(truth):
    # With as many trainings as records, an exact fit predicts nothing; nor does it if the prior explains everything.
    kept, prior = draw_halves(40), truth
    y = kept.double().numpy() @ truth + 10 * np.random.default_rng(5).normal(size=40)
    assert _fit_ridge(kept.double().numpy(), y, prior)[1] >= 1e3
    scores = fit_datamodel(draw_halves(40), y, prior=prior).scores
    assert np.corrcoef(scores, truth)[0, 1] > 0.99


def test_the_ceiling_of_sums_alone_is_whole(truth):
    kept = draw_halves(4000)
    ceiling = additive_ceiling(kept, kept.double().numpy() @ truth)
    assert ceiling["lds"] > 0.97
    assert ceiling["low"] < ceiling["lds"] <= ceiling["high"] == 1.0


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_ceiling_is_what_the_true_sum_reaches(truth, share):
    # Half of the outcome is noise, or squares of sums, which no sum predicts for halves.
    rng, ceilings, reached, covered = np.random.default_rng(6), [], [], []
    for seed in range(30):
        kept = draw_subsets(40, share, 200, torch.Generator().manual_seed(seed)).double()
        sums = kept.numpy() @ np.column_stack([truth, rng.normal(size=(40, 12))])
        best, *others = ((sums - sums.mean(axis=0)) / sums.std(axis=0)).T
        rest = sum(np.square(others) * rng.choice([-1, 1], size=(12, 1))) if share == 0.5 else rng.normal(size=200)
        outcomes = best + rest / rest.std()
        ceiling = additive_ceiling(kept, outcomes)
        ceilings.append(ceiling["lds"])
        reached.append(compute_lds(best, outcomes)["lds"])
        covered.append(ceiling["low"] <= reached[-1] <= ceiling["high"])
    assert np.mean(ceilings) == pytest.approx(np.mean(reached), abs=0.03)
    assert sum(covered) >= 27


def test_nothing_is_no_ceiling():
    ceiling = additive_ceiling(draw_halves(4000), np.random.default_rng(3).normal(size=4000))
    assert ceiling["low"] == 0.0
    assert ceiling["lds"] < 0.15


def test_what_has_no_ceiling(truth):
    kept = draw_halves(40)
    with pytest.raises(WhenceError, match=r"\(39,\) are needed, of at least 40 trainings"):
        additive_ceiling(kept, np.arange(39.0))
    with pytest.raises(WhenceError, match="at least 40 trainings"):
        additive_ceiling(kept[1:], np.arange(39.0))
    uneven = kept.clone()
    uneven[0] = True
    for bad in (uneven, torch.ones_like(kept)):
        with pytest.raises(WhenceError, match="one size, with at least one record and not all of them"):
            additive_ceiling(bad, np.arange(40.0))
    for outcomes in (np.ones(40), np.where(np.arange(40) == 3, np.nan, np.arange(40.0))):
        with pytest.raises(WhenceError, match="finite, and not all the same"):
            additive_ceiling(kept, outcomes)


@pytest.mark.parametrize(
    ("outcomes", "prior", "folds"), [(9, None, 5), (10, 39, 5), (10, None, 1), (10, None, 6)], ids=str
)
def test_what_does_not_fit(outcomes, prior, folds):
    with pytest.raises(WhenceError, match=r"are needed"):
        fit_datamodel(draw_halves(10), np.arange(outcomes, dtype=float), prior=prior and np.ones(prior), folds=folds)


def test_records_that_no_training_kept_do_not_count(truth):
    kept = draw_halves(200)
    outcomes = kept.double().numpy() @ truth
    wider = torch.cat([kept, torch.zeros(200, 25, dtype=torch.bool)], dim=1)
    assert additive_ceiling(wider, outcomes) == additive_ceiling(kept, outcomes)


def test_outcomes_that_are_no_numbers(truth):
    kept = draw_halves(200)
    outcomes = kept.double().numpy() @ truth
    outcomes[3] = np.nan
    with pytest.raises(WhenceError, match="Outcomes have to be finite"):
        fit_datamodel(kept, outcomes)
