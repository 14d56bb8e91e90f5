"""How well scores predict what leaving records out does."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from whence.errors import WhenceError
from whence.influence import Influence


def predict_outcomes(influence: Influence, kept: Tensor) -> NDArray[np.float64]:
    """Return the sum of the scores of each subset's records, (m,): a linear model's prediction of its outcome.

    Args:
        influence: the scores of the round, in the order of its records.
        kept: (m, n) which records each subset keeps.

    Raises:
        WhenceError: the number of scores differs from the number of records.
    """
    if kept.shape[-1] != len(influence):
        raise WhenceError(f"The subsets are of {kept.shape[-1]} records, the scores of {len(influence)}.")
    predictions: NDArray[np.float64] = (kept.double() @ influence.scores.double()).numpy()
    return predictions


def compute_lds(
    predictions: Float[np.ndarray, " m"],
    outcomes: Float[np.ndarray, " m"],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Mapping[str, float | None]:
    """Return the linear datamodelling score: Spearman's correlation of prediction and outcome over subsets.

    Args:
        predictions: (m,) the prediction for each subset; see `predict_outcomes`.
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
    _check_finite("predictions", predictions)
    _check_finite("outcomes", outcomes)
    if np.ptp(predictions) == 0 or np.ptp(outcomes) == 0:
        return {"lds": None, "low": None, "high": None}
    generator = np.random.default_rng(seed)
    resampled = generator.integers(len(outcomes), size=(resamples, len(outcomes)))
    # Every resample is ranked by itself, with ties shared: Pearson's correlation of these ranks is Spearman's.
    ranks = stats.rankdata(predictions[resampled], axis=1), stats.rankdata(outcomes[resampled], axis=1)
    centred = [one - one.mean(axis=1, keepdims=True) for one in ranks]
    with np.errstate(invalid="ignore"):
        correlations = (centred[0] * centred[1]).sum(1) / np.sqrt((centred[0] ** 2).sum(1) * (centred[1] ** 2).sum(1))
    low, high = np.nanquantile(correlations, [0.025, 0.975])
    return {"lds": float(stats.spearmanr(predictions, outcomes).statistic), "low": float(low), "high": float(high)}


def measure_agreement(values: Float[np.ndarray, "orders m"]) -> float | None:
    """Return the highest rank correlation that a predictor could reach, given how well repeated outcomes agree.

    The mean of k repetitions whose mean rank correlation is r has the reliability `k r / (1 + (k - 1) r)`
    (Spearman-Brown); a predictor of the shared part correlates with it by at most the root.

    Args:
        values: (orders, m) the outcomes of m subsets in at least two repetitions.

    Returns:
        The ceiling, 0 if repetitions do not agree at all; None if all outcomes of a repetition are equal.

    Raises:
        WhenceError: there are fewer than two repetitions, or a value is not finite.
    """
    k = len(values)
    if k < 2:
        raise WhenceError(f"values holds {k} repetition; at least 2 are needed to agree.")
    _check_finite("values", values)
    if (np.ptp(values, axis=1) == 0).any():
        return None
    ranks = stats.rankdata(values, axis=1)
    correlations = np.corrcoef(ranks)[np.triu_indices(k, 1)]
    r = max(0.0, float(correlations.mean()))
    return float(np.sqrt(k * r / (1 + (k - 1) * r)))


def _check_finite(name: str, values: NDArray[np.float64]) -> None:
    if not np.isfinite(values).all():
        first = tuple(np.argwhere(~np.isfinite(values))[0].tolist())
        raise WhenceError(
            f"{name} hold {values[first]} at position {first[0] if len(first) == 1 else first}, which has no rank: "
            "leave that subset out, or find where the value comes from."
        )


def check_scores(name: str, scores: NDArray[np.floating], n: int) -> NDArray[np.float64]:
    """Return scores by which n records can be ranked, as float64.

    Args:
        name: the name of the scores, for messages.
        scores: (n,) the scores, in the order of the records.
        n: the number of records.

    Raises:
        WhenceError: the scores have another shape, or one is not finite.
    """
    checked = np.asarray(scores, dtype=np.float64)
    if checked.shape != (n,):
        raise WhenceError(f"The scores {name!r} have shape {checked.shape}; one for each of the {n} records is needed.")
    if not np.isfinite(checked).all():
        first = int(np.flatnonzero(~np.isfinite(checked))[0])
        raise WhenceError(
            f"The scores {name!r} hold {checked[first]} for the record at position {first}, which has no rank: leave "
            "these scores out, or find where the value comes from."
        )
    return checked
