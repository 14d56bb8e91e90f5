"""Predictions of what an environment does: ridge regression on random features, robust and out of fold."""

import numpy as np
from jaxtyping import Float, Int

_RIDGE = 1e-3
_FOLDS = 3
_PASSES = 2
_FITTED = 12_000
"""Records that a model is fitted on at most."""

_OUTLYING = 6.0
"""Median misses from which on a record is left out of the next fit: four standard deviations of a normal law."""

Matrix = Float[np.ndarray, "n d"]


def expand(inputs: Matrix, width: int) -> Matrix:
    """Return a constant, standardised inputs, and random rectified features of them, in which much is linear."""
    rng = np.random.default_rng(0)
    scaled = (inputs - inputs.mean(axis=0)) / np.maximum(inputs.std(axis=0), 1e-9)
    weights = rng.standard_normal((scaled.shape[1], width)) / np.sqrt(max(scaled.shape[1], 1))
    hidden = np.maximum(scaled @ weights + rng.uniform(-1.5, 1.5, width), 0)
    return np.hstack([np.ones((len(inputs), 1)), scaled, hidden])


def predict_each(basis: Matrix, targets: Matrix, groups: Int[np.ndarray, " n"]) -> Matrix:
    """Return the prediction of each record's targets by a model that was fitted without its group.

    Records that a fit misses by far are left out of the next one, so that a minority that behaves otherwise does not
    bend it. The model is linear in `basis`, and groups are episodes.
    """
    fold, basis = groups % _FOLDS, basis.astype(np.float32)  # half the time, and ridge keeps it well conditioned
    predicted = np.zeros_like(targets)
    for number in range(_FOLDS):
        train = np.flatnonzero(fold != number)
        train = train[:: max(1, -(-len(train) // _FITTED))]
        rows, coefficients = np.ones(len(train), dtype=bool), np.zeros((basis.shape[1], targets.shape[1]))
        for _ in range(_PASSES if len(train) else 0):
            chosen = basis[train[rows]]
            gram = (chosen.T @ chosen).astype(np.float64)
            gram[np.diag_indices_from(gram)] += _RIDGE * len(chosen)
            coefficients = np.linalg.solve(gram, chosen.T @ targets[train[rows]])
            misses = np.abs(basis[train] @ coefficients - targets[train])
            rows = (misses <= _OUTLYING * np.maximum(np.median(misses, axis=0), 1e-6)).all(axis=1)
            if rows.mean() < 0.5:
                break
        # Where a model is asked beyond what it has seen, it says no more than that.
        low, high = (bound(targets[train[rows]], axis=0, initial=0.0) for bound in (np.min, np.max))
        predicted[fold == number] = np.clip(basis[fold == number] @ coefficients, low, high)
    return predicted
