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
    """Return the sum of the scores of what each subset keeps, (m,): what a linear model makes of it.

    Args:
        influence: scores of the round, in the order of its records.
        kept: (m, n) which records each subset keeps.

    Raises:
        WhenceError: the scores are of another number of records.
    """
    if kept.shape[-1] != len(influence):
        raise WhenceError(f"The subsets are of {kept.shape[-1]} records, the scores of {len(influence)}.")
    found: NDArray[np.float64] = (kept.double() @ influence.scores.double()).numpy()
    return found


def compute_lds(
    predictions: Float[NDArray[np.float64], " m"],
    outcomes: Float[NDArray[np.float64], " m"],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Mapping[str, float | None]:
    """Return the linear datamodelling score: Spearman's correlation of prediction and outcome over subsets.

    Args:
        predictions: of each subset; see `predicted`.
        outcomes: what training on each subset came to.
        resamples: of the percentile bootstrap over subsets.
        seed: of the bootstrap.

    Returns:
        "lds", and "low" and "high" of its 95% interval; all None where all predictions or all outcomes are equal.

    Raises:
        WhenceError: fewer than three subsets, as many predictions as outcomes are not there, or one is not finite.
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
    drawn = generator.integers(len(outcomes), size=(resamples, len(outcomes)))
    # Ranks anew in every resample, ties shared: Pearson's correlation of these is Spearman's.
    ranks = stats.rankdata(predictions[drawn], axis=1), stats.rankdata(outcomes[drawn], axis=1)
    centred = [one - one.mean(axis=1, keepdims=True) for one in ranks]
    with np.errstate(invalid="ignore"):
        found = (centred[0] * centred[1]).sum(1) / np.sqrt((centred[0] ** 2).sum(1) * (centred[1] ** 2).sum(1))
    low, high = np.nanquantile(found, [0.025, 0.975])
    return {"lds": float(stats.spearmanr(predictions, outcomes).statistic), "low": float(low), "high": float(high)}


def measure_agreement(values: Float[NDArray[np.float64], "orders m"]) -> float | None:
    """Return what the best predictor of outcomes could reach, given how well repeated outcomes agree.

    The mean of k repetitions whose mean rank correlation is r has the reliability `k r / (1 + (k - 1) r)`
    (Spearman-Brown); a predictor of what they share correlates with it by at most the root.

    Args:
        values: of at least two repetitions, each of m subsets.

    Returns:
        The ceiling, 0 where repetitions do not agree at all; None where a repetition has the same outcome everywhere.

    Raises:
        WhenceError: fewer than two repetitions, or a value that is not finite.
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
            "leave that subset out, or find where the value arises."
        )


def check_scores(name: str, scores: NDArray[np.floating], n: int) -> NDArray[np.float64]:
    """Return scores of n records by which they can be ranked.

    Args:
        name: of the scores.
        scores: (n,) in the order of the records.
        n: records.

    Raises:
        WhenceError: scores of another shape, or not finite.
    """
    found = np.asarray(scores, dtype=np.float64)
    if found.shape != (n,):
        raise WhenceError(f"The scores {name!r} have shape {found.shape}; one for each of the {n} records is needed.")
    if not np.isfinite(found).all():
        first = int(np.flatnonzero(~np.isfinite(found))[0])
        raise WhenceError(
            f"The scores {name!r} hold {found[first]} for the record at position {first}, which has no rank: leave "
            "these scores out, or find where the value arises."
        )
    return found
