"""Scores of a round held against many trainings without some of its records (LDS), with the ceiling of any score."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import scipy
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from studies.faithfulness.outcomes import check_scores, compute_scores, measure_outcomes, read_batch_size
from whence.core import Target, WhenceError
from whence.lab.rounds import METHODS, check_target, compute_lds, draw_subsets, open_round, reshuffle, retrain
from whence.rounds import RoundRecording
from whence.stored.agents import Evaluate

_NUMBERS = dict.fromkeys(("lds", "low", "high", "ceiling"), pl.Float64)


def measure_agreement(values: Float[np.ndarray, "orders m"]) -> float | None:
    """Return the highest rank correlation that a predictor could reach, given how well repeated outcomes agree.

    The mean of k repetitions whose mean rank correlation is r has the reliability `k r / (1 + (k - 1) r)`
    (Spearman-Brown); a predictor of the shared part correlates with it by at most the root.

    Args:
        values: (orders, m) the outcomes of m subsets in at least two repetitions.

    Returns:
        The ceiling, 0 if repetitions do not agree at all; None if all outcomes of a repetition are equal.
    """
    k = len(values)
    if (np.ptp(values, axis=1) == 0).any():
        return None
    ranks = scipy.stats.rankdata(values, axis=1)
    correlations = np.corrcoef(ranks)[np.triu_indices(k, 1)]
    r = max(0.0, float(correlations.mean()))
    return float(np.sqrt(k * r / (1 + (k - 1) * r)))


@dataclass(frozen=True, eq=False)
class Study:
    """One round's scores and how well they predict.

    Attributes:
        table: a row for each score, truth and outcome: `score`, `truth`, `outcome`, `lds`, `low`, `high`, `ceiling`.
        scores: (n,) float64 scores, by name.
        kept: (m, n) which records each training kept.
        outcomes: for each truth, (orders, m) outcomes, by name.
    """

    table: pl.DataFrame
    scores: Mapping[str, NDArray[np.float64]]
    kept: Bool[Tensor, "m n"]
    outcomes: Mapping[str, Mapping[str, NDArray[np.float64]]]


def study(
    policy: object,
    recording: RoundRecording,
    *,
    target: Target,
    share: float = 0.5,
    count: int = 100,
    orders: int = 4,
    scores: Mapping[str, NDArray[np.floating]] | None = None,
    methods: Sequence[str] = tuple(METHODS),
    evaluate: Evaluate | None = None,
    seed: int = 0,
    memory: int = 2**31,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Study:
    """Compare the scores of a round with training it without some of its records.

    There are two truths. "recorded" leaves records out of the recorded minibatches: all else is equal, and nothing is
    random. "reshuffled" shuffles the kept records into full minibatches, as selection does, in several orders. The
    outcomes are the target and the surrogate `mean(rho A)` on the round's own records, and the number that `evaluate`
    returns. A truth's ceiling is what the best predictor could reach, given how well its orders agree: the root of the
    reliability of their mean; 1 if nothing is random. Under "recorded" there is one order, so "evaluated", which may be
    random, has no ceiling there.

    Both truths train on records that the round trained on. If `target_kl` ended the round early, "recorded" ends at the
    same step; "reshuffled" trains all `n_epochs`, since it is unknown where it would have ended.

    Args:
        policy: the policy that was trained, or one built like it; it is left as it is.
        recording: the recorded round.
        target: the target that the scores are for, and that is measured besides the surrogate.
        share: the share of the trained records, below 1, that each training keeps.
        count: the number of subsets.
        orders: the number of orders of each subset under "reshuffled", at least 2.
        scores: (n,) scores by name, in the order of the records; None: those of `compute_scores`.
        methods: methods of `attribute_round`, for `compute_scores`.
        evaluate: measures trained parameters; None: "evaluated" is left out. The recorded truth is its repetition 0,
            the orders are the repetitions from 1, so that orders do not agree because of random numbers they share.
        seed: the seed of subsets, orders and random scores.
        memory: bytes that scoring and training may hold at a time; see `attribute_round` and `retrain`.
        on_stage: called with the name of each stage as it begins.

    Raises:
        NonFinite: a training diverged, or an outcome is not finite.
        WhenceError: `orders` is below 2, `count` below 3 or `share` not below 1, scores have another shape or are not
            finite, or the round was not trained on; or see `retrain` and `compute_scores`.
    """
    if orders < 2 or count < 3 or not share < 1:
        raise WhenceError(
            f"orders is {orders}, count {count} and share {share}; at least 2 orders and 3 subsets are needed, and a "
            "share below 1, since equal subsets cannot be ranked."
        )
    n, size = len(recording.records), read_batch_size(recording)
    target = check_target(target, open_round(policy, recording))
    generator = torch.Generator().manual_seed(seed)
    kept = torch.zeros(count, n, dtype=torch.bool)
    kept[:, recording.trained] = draw_subsets(len(recording.trained), share, count, generator)
    if scores is None:
        scores = compute_scores(
            policy,
            recording,
            target=target,
            methods=methods,
            seed=seed,
            memory=memory,
            on_stage=on_stage,
        )
    checked = {name: check_scores(name, values, n) for name, values in scores.items()}
    outcomes: dict[str, dict[str, NDArray[np.float64]]] = {}
    for truth, repetitions in (("recorded", [0]), ("reshuffled", range(1, orders + 1))):
        runs = []
        for repetition in repetitions:
            on_stage(f"training {count} times, {truth}" + (f", order {repetition} of {orders}" if repetition else ""))
            minibatches = reshuffle(kept, size, recording.update.n_epochs, generator) if repetition else None
            trained = retrain(policy, recording, kept, orders=minibatches, memory=memory)
            runs.append(measure_outcomes(policy, recording, trained, target, evaluate, repetition))
        outcomes[truth] = {name: np.stack([run[name] for run in runs]) for name in runs[0]}
    masks, rows = kept.double().numpy(), []
    for truth, by_outcome in outcomes.items():
        for outcome, values in by_outcome.items():
            # A single order says nothing of chance, which only "evaluated" may depend on.
            ceiling_of_one = None if outcome == "evaluated" else 1.0
            ceiling = measure_agreement(values) if len(values) > 1 else ceiling_of_one
            for name, score in checked.items():
                lds = compute_lds(masks @ score, values.mean(axis=0))
                rows.append({"score": name, "truth": truth, "outcome": outcome, **lds, "ceiling": ceiling})
    return Study(pl.DataFrame(rows, schema_overrides=_NUMBERS), checked, kept, outcomes)
