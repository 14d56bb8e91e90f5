"""How well any scores could predict: linear predictors fitted to many trainings (datamodels), and their ceiling."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from whence.counterfactual.lds import compute_lds
from whence.intervals import interval_from_error

Vector = NDArray[np.float64]

BLOCKS = 20
"""The number of blocks of trainings, one of which is left out at a time to estimate an interval."""

_PENALTIES = np.logspace(-4, 7, 45)


@dataclass(frozen=True, eq=False)
class Datamodel:
    """A linear predictor of the outcome of training on a subset.

    Attributes:
        scores: (n,) one for each record; their sum over a subset predicts its outcome, up to a constant.
        lds: the LDS of predictions for trainings that were held out of the fit.
        low: the lower end of the 95% interval of `lds`.
        high: the upper end.
        penalty: the penalty of the ridge regression on all trainings; infinite if the prior alone predicts best.
    """

    scores: Vector
    lds: float | None
    low: float | None
    high: float | None
    penalty: float


def fit_datamodel(kept: Tensor, outcomes: Vector, *, prior: Vector | None = None, folds: int = 5) -> Datamodel:
    """Fit a linear predictor to trainings on subsets, by ridge regression, cross-validated.

    Without a prior this estimates the best additive score from these trainings alone. With fewer trainings than
    records, a prior (scores from gradients) helps: its best-fitting multiple is subtracted first, and the ridge is
    fitted to the residual. The penalty has the least leave-one-out error, chosen in each fold by itself.

    Args:
        kept: (m, n) which records each training kept.
        outcomes: (m,) the outcome of each training.
        prior: (n,) scores to begin with.
        folds: the number of folds of the cross-validation that measures the fit.
    """
    x, y = kept.double().numpy(), np.asarray(outcomes, dtype=np.float64)
    fold = np.arange(len(x)) % folds
    predictions = np.empty_like(y)
    for number in range(folds):
        held_out = fold == number
        scores, _ = _fit_ridge(x[~held_out], y[~held_out], prior)
        # Without the others' mean outcome, which is low if the held-out outcomes are high.
        predictions[held_out] = (x[held_out] - x[~held_out].mean(axis=0)) @ scores
    scores, penalty = _fit_ridge(x, y, prior)
    measured = compute_lds(predictions, y)
    return Datamodel(scores, measured["lds"], measured["low"], measured["high"], penalty)


def _fit_ridge(x: Vector, y: Vector, prior: Vector | None) -> tuple[Vector, float]:
    """Return the scores and the penalty of least leave-one-out error; infinite if the prior alone predicts best."""
    centred_x, centred_y = x - x.mean(axis=0), y - y.mean()
    base = np.zeros(x.shape[1]) if prior is None else prior * _best_multiple(centred_x @ prior, centred_y)
    residual = centred_y - centred_x @ base
    values, vectors = np.linalg.eigh(centred_x @ centred_x.T)
    values = np.clip(values, 0.0, None)
    rotated = vectors.T @ residual
    # The error of a constant alone: the mean is that of the others, without the outcome that is left out.
    count = len(residual)
    best, weights = (residual @ residual * count / (count - 1) ** 2, np.inf), np.zeros_like(residual)
    for penalty in _PENALTIES:
        shrunk = 1.0 / (values + penalty)
        # With a = (K + penalty)^-1 y, the leave-one-out error of ridge regression is a_i / ((K + penalty)^-1)_ii. The
        # constant's part is subtracted from the diagonal: with it, the others' means would reveal the outcome that is
        # left out, the more so the smaller the penalty.
        dual = vectors @ (shrunk * rotated)
        diagonal = (vectors**2) @ shrunk - 1.0 / (count * penalty)
        error = float(np.mean((dual / diagonal) ** 2))
        if error < best[0]:
            best, weights = (error, float(penalty)), dual
    return base + centred_x.T @ weights, best[1]


def _best_multiple(predicted: Vector, outcomes: Vector) -> float:
    """Return the multiple of the predictions that fits the outcomes best, by least squares."""
    square = float(predicted @ predicted)
    return float(predicted @ outcomes) / square if square > 0 else 0.0


def additive_ceiling(kept: Bool[Tensor, "m n"], outcomes: Float[np.ndarray, " m"]) -> Mapping[str, float]:
    """Return the LDS that the best sum of scores would have, without fitting that sum.

    Over random subsets of one size, records are in or out almost independently of each other, so the share of the
    outcomes' variance that a sum can explain is a sum over records of squared covariances. The products of pairs of
    different trainings estimate these without bias, even with fewer trainings than records; a predictor fitted to the
    same trainings falls short of the ceiling. Outcomes count by rank, as normal scores.

    Args:
        kept: (m, n) which records each training kept, the same number in each; records that none kept do not count.
        outcomes: (m,) the outcome of each training.

    Returns:
        "lds", and "low" and "high" of its 95% interval, by a jackknife over blocks of trainings, which is rather wide.
    """
    x, m = kept.double().numpy(), len(outcomes)
    x = x[:, x.any(axis=0)]
    n, share = x.shape[1], float(x[0].mean())
    x = (x - share) / np.sqrt(share * (1 - share))
    y = stats.norm.ppf((stats.rankdata(outcomes) - 0.5) / m)
    y /= y.std()
    block = np.arange(m) % BLOCKS
    products = np.stack([y[block == number] @ x[block == number] for number in range(BLOCKS)])
    squares = n * np.array([(y[block == number] ** 2).sum() for number in range(BLOCKS)])  # of a training with itself
    sizes = np.bincount(block)

    def explain(products: Vector, squares: float, count: int) -> float:
        # Records of subsets of one size are correlated by -1 / (n - 1).
        return float((products @ products - squares) / (count * (count - 1)) * (n - 1) / n)

    total, total_squares = products.sum(axis=0), squares.sum()
    whole = explain(total, total_squares, m)
    without = [explain(total - products[b], total_squares - squares[b], m - sizes[b]) for b in range(BLOCKS)]
    error = float(np.sqrt((BLOCKS - 1) * np.var(without)))
    interval = interval_from_error(whole, error, BLOCKS - 1)
    explained = np.clip([interval["mean"], interval["low"], interval["high"]], 0.0, 1.0)
    # Spearman's correlation of two normal variables whose Pearson's is the root of the share.
    correlations = 6 / np.pi * np.arcsin(np.sqrt(explained) / 2)
    return dict(zip(("lds", "low", "high"), correlations.tolist(), strict=True))
