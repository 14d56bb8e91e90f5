"""LDS: how well scores predict many trainings without some of the records."""

from collections.abc import Mapping

import numpy as np
import scipy
from jaxtyping import Float

from whence.core import WhenceError


def compute_lds(
    predictions: Float[np.ndarray, " m"],
    outcomes: Float[np.ndarray, " m"],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Mapping[str, float | None]:
    """Return the linear datamodelling score: Spearman's correlation of prediction and outcome over subsets.

    Args:
        predictions: (m,) the prediction for each subset: the sum of its records' scores.
        outcomes: (m,) the outcome of training on each subset.
        resamples: the number of resamples of the percentile bootstrap over subsets.
        seed: the seed of the bootstrap.

    Returns:
        "lds", and "low" and "high" of its 95% interval; all None if all predictions or all outcomes are equal.

    Raises:
        WhenceError: there are fewer than three subsets, shapes differ, or a number is not finite.
    """
    if predictions.shape != outcomes.shape or predictions.ndim != 1 or len(outcomes) < 3:
        raise WhenceError(
            f"predictions have shape {predictions.shape} and outcomes {outcomes.shape}; both need (m,), m at least 3."
        )
    if not (np.isfinite(predictions).all() and np.isfinite(outcomes).all()):
        raise WhenceError("A prediction or an outcome is not finite, and has no rank: leave that subset out.")
    if np.ptp(predictions) == 0 or np.ptp(outcomes) == 0:
        return {"lds": None, "low": None, "high": None}
    generator = np.random.default_rng(seed)
    resampled = generator.integers(len(outcomes), size=(resamples, len(outcomes)))
    # Every resample is ranked by itself, with ties shared: Pearson's correlation of these ranks is Spearman's.
    ranks = scipy.stats.rankdata(predictions[resampled], axis=1), scipy.stats.rankdata(outcomes[resampled], axis=1)
    centred = [one - one.mean(axis=1, keepdims=True) for one in ranks]
    with np.errstate(invalid="ignore"):
        correlations = (centred[0] * centred[1]).sum(1) / np.sqrt((centred[0] ** 2).sum(1) * (centred[1] ** 2).sum(1))
    low, high = np.nanquantile(correlations, [0.025, 0.975]).tolist()
    return {"lds": float(scipy.stats.spearmanr(predictions, outcomes).statistic), "low": low, "high": high}
