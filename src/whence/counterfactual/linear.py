"""The best that scores could do: linear predictors fitted to many trainings (datamodels), and what bounds them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from whence.counterfactual.measures import compute_lds
from whence.errors import WhenceError
from whence.intervals import interval_from_error

Vector = NDArray[np.float64]

BLOCKS = 20
"""Of trainings, one of which is left out at a time for an interval."""

_PENALTIES = np.logspace(-4, 7, 45)


@dataclass(frozen=True, eq=False)
class Datamodel:
    """A linear predictor of what training on a subset comes to.

    Attributes:
        scores: (n,) one for each record; their sum over a subset predicts its outcome, up to a constant.
        lds: of predictions for trainings that were held out of the fit.
        low: end of the 95% interval of `lds`.
        high: the other end.
        penalty: of the ridge, as fitted to all trainings; infinite where the prior alone predicts best.
    """

    scores: Vector
    compute_lds: float | None
    low: float | None
    high: float | None
    penalty: float


def fit_datamodel(kept: Tensor, outcomes: Vector, *, prior: Vector | None = None, folds: int = 5) -> Datamodel:
    """Fit a linear predictor to trainings on subsets, by ridge regression, cross-validated.

    Without a prior this is the best additive score that so many trainings can find; where there are fewer trainings
    than records, a prior (scores from gradients) says where to look: its multiple that fits best is taken, and the
    ridge is fitted to what is left. The penalty is the one of least leave-one-out error, found anew in each fold.

    Args:
        kept: (m, n) which records each training kept.
        outcomes: (m,) what it came to.
        prior: (n,) scores to begin with.
        folds: of the cross-validation that measures the fit.

    Raises:
        WhenceError: shapes that do not fit, outcomes that are not finite, or fewer than two trainings in a fold.
    """
    x, y = kept.double().numpy(), np.asarray(outcomes, dtype=np.float64)
    if y.shape != (len(x),) or (prior is not None and prior.shape != x.shape[1:]):
        raise WhenceError(
            f"kept is of {x.shape[0]} trainings and {x.shape[1]} records, outcomes have shape {y.shape} and the prior "
            f"{None if prior is None else prior.shape}; ({x.shape[0]},) and ({x.shape[1]},) are needed."
        )
    if not np.isfinite(y).all():
        raise WhenceError("Outcomes have to be finite: leave trainings of others out.")
    if folds < 2 or len(x) < 2 * folds:
        raise WhenceError(f"{len(x)} trainings in {folds} folds; at least 2 folds of at least 2 are needed.")
    fold = np.arange(len(x)) % folds
    predictions = np.empty_like(y)
    for number in range(folds):
        held = fold == number
        scores, _ = _fit(x[~held], y[~held], prior)
        # Without the others' mean outcome, which is low where the held-out ones are high.
        predictions[held] = (x[held] - x[~held].mean(axis=0)) @ scores
    scores, penalty = _fit(x, y, prior)
    found = compute_lds(predictions, y)
    return Datamodel(scores, found["lds"], found["low"], found["high"], penalty)


def _fit(x: Vector, y: Vector, prior: Vector | None) -> tuple[Vector, float]:
    centred, wanted = x - x.mean(axis=0), y - y.mean()
    base = np.zeros(x.shape[1]) if prior is None else prior * _multiple(centred @ prior, wanted)
    left = wanted - centred @ base
    values, vectors = np.linalg.eigh(centred @ centred.T)
    values = np.clip(values, 0.0, None)
    turned = vectors.T @ left
    # Of a constant alone: what is left out is no part of the mean that it is held against.
    best, weights = (left @ left * len(left) / (len(left) - 1) ** 2, np.inf), np.zeros_like(left)
    for penalty in _PENALTIES:
        shrunk = 1.0 / (values + penalty)
        # Of ridge regression, a = (K + penalty)^-1 y, the leave-one-out error is a_i / ((K + penalty)^-1)_ii, less what
        # the constant takes of that. Were it kept, the others' means would tell what was left out, the more surely
        # the smaller the penalty.
        dual = vectors @ (shrunk * turned)
        diagonal = (vectors**2) @ shrunk - 1.0 / (len(left) * penalty)
        error = float(np.mean((dual / diagonal) ** 2))
        if error < best[0]:
            best, weights = (error, float(penalty)), dual
    return base + centred.T @ weights, best[1]


def _multiple(predicted: Vector, wanted: Vector) -> float:
    square = float(predicted @ predicted)
    return float(predicted @ wanted) / square if square > 0 else 0.0


def additive_ceiling(kept: Bool[Tensor, "m n"], outcomes: Float[Vector, " m"]) -> Mapping[str, float]:
    """Return the LDS that the best sum of scores would have, without looking for that sum.

    Over random subsets of one size, records are in or out almost independently of each other, so the share of the
    outcomes' variance that a sum can explain is a sum over records of squared covariances. The products of pairs of
    different trainings estimate these without bias, also where there are fewer trainings than records; a predictor
    fitted to as many falls short of it. Outcomes count by rank, as normal scores.

    Args:
        kept: which records each training kept, as many in all; records that none kept do not count.
        outcomes: what it came to.

    Returns:
        "lds", and "low" and "high" of its 95% interval, which the jackknife over blocks of trainings makes rather wide.

    Raises:
        WhenceError: shapes that do not fit, fewer than 40 trainings, subsets of several sizes, or outcomes that are not
            finite or all the same.
    """
    x, m = kept.double().numpy(), len(outcomes)
    if outcomes.shape != x.shape[:1] or m < 2 * BLOCKS:
        raise WhenceError(
            f"kept has shape {x.shape} and outcomes {outcomes.shape}; ({m}, n) and ({m},) are needed, of at least "
            f"{2 * BLOCKS} trainings."
        )
    x = x[:, x.any(axis=0)]
    n, share = x.shape[1], float(x[0].mean())
    if np.ptp(x.sum(axis=1)) > 0 or not 0 < share < 1:
        raise WhenceError("All subsets have to be of one size, neither none of the records nor all.")
    if not np.isfinite(outcomes).all() or np.ptp(outcomes) == 0:
        raise WhenceError("Outcomes have to be finite, and not all the same.")
    x = (x - share) / np.sqrt(share * (1 - share))
    y = stats.norm.ppf((stats.rankdata(outcomes) - 0.5) / m)
    y /= y.std()
    block = np.arange(m) % BLOCKS
    products = np.stack([y[block == number] @ x[block == number] for number in range(BLOCKS)])
    own = n * np.array([(y[block == number] ** 2).sum() for number in range(BLOCKS)])  # a training's with itself
    sizes = np.bincount(block)

    def explained(products: Vector, own: float, count: int) -> float:
        # Records of subsets of one size are correlated by -1 / (n - 1).
        return float((products @ products - own) / (count * (count - 1)) * (n - 1) / n)

    whole = explained(products.sum(axis=0), own.sum(), m)
    without = [explained(products.sum(axis=0) - products[b], own.sum() - own[b], m - sizes[b]) for b in range(BLOCKS)]
    error = float(np.sqrt((BLOCKS - 1) * np.var(without)))
    found = interval_from_error(whole, error, BLOCKS - 1)
    ends = np.clip([found["mean"], found["low"], found["high"]], 0.0, 1.0)
    # Spearman's correlation of two normal variables whose Pearson's is the root of the share.
    reached = 6 / np.pi * np.arcsin(np.sqrt(ends) / 2)
    return dict(zip(("lds", "low", "high"), reached.tolist(), strict=True))
