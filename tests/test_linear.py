"""Linear predictors fitted to many trainings."""

import numpy as np
import pytest
import torch

from whence import WhenceError
from whence.counterfactual import datamodel, lds, subsets
from whence.counterfactual.linear import _PENALTIES, _fit


def drawn(count, n=40, seed=0):
    return subsets(n, 0.5, count, torch.Generator().manual_seed(seed))


@pytest.fixture
def truth():
    return np.random.default_rng(1).normal(size=40)


def test_what_is_linear_is_found(truth):
    kept = drawn(200)
    found = datamodel(kept, kept.double().numpy() @ truth)
    assert found.lds > 0.99
    # All subsets are of one size, so that a constant added to every score changes nothing.
    assert np.allclose(found.scores - found.scores.mean(), truth - truth.mean(), atol=1e-3)


def test_a_prior_says_where_to_look(truth):
    kept, prior = drawn(25), 3 * truth + 0.1 * np.random.default_rng(2).normal(size=40)
    outcomes = kept.double().numpy() @ truth
    alone, helped = datamodel(kept, outcomes), datamodel(kept, outcomes, prior=prior)
    fresh = drawn(500, seed=9).double().numpy()
    held_out = [lds(fresh @ found.scores, fresh @ truth)["lds"] for found in (alone, helped)]
    assert held_out[0] < 0.9 < 0.99 < held_out[1]
    assert helped.lds > 0.98
    wrong = datamodel(drawn(200), drawn(200).double().numpy() @ truth, prior=-prior)
    assert wrong.lds > 0.99  # its multiple may be negative


def test_nothing_is_found_in_noise():
    kept = drawn(300)
    noise = np.random.default_rng(3).normal(size=300)
    found = datamodel(kept, noise)
    assert found.lds is None or abs(found.lds) < 0.12
    assert np.abs(found.scores).max() < 0.1


def test_the_penalty_leaves_one_out(truth):
    x = drawn(30).double().numpy()
    y = x @ truth + np.random.default_rng(4).normal(size=30)
    scores, penalty = _fit(x, y, None)
    centred, wanted = x - x.mean(0), y - y.mean()

    def error(one):
        left_out = []
        for row in range(30):
            rest = np.arange(30) != row
            kernel = centred[rest] @ centred[rest].T + one * np.eye(29)
            left_out.append(wanted[row] - centred[row] @ centred[rest].T @ np.linalg.solve(kernel, wanted[rest]))
        return np.mean(np.square(left_out))

    assert penalty == min(_PENALTIES, key=error)
    direct = centred.T @ np.linalg.solve(centred @ centred.T + penalty * np.eye(30), wanted)
    assert np.allclose(scores, direct)


@pytest.mark.parametrize(
    ("outcomes", "prior", "folds"), [(9, None, 5), (10, 39, 5), (10, None, 1), (10, None, 6)], ids=str
)
def test_what_does_not_fit(outcomes, prior, folds):
    with pytest.raises(WhenceError, match=r"are needed"):
        datamodel(drawn(10), np.arange(outcomes, dtype=float), prior=prior and np.ones(prior), folds=folds)
