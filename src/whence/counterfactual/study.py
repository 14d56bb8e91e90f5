"""How far the scores of one round can be trusted: predictions held against many trainings without records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor

from whence.counterfactual.measures import check_scores, compute_lds, measure_agreement
from whence.counterfactual.outcomes import Evaluate, measure_outcomes
from whence.counterfactual.retrain import check_memory, draw_subsets_of, read_batch_size, reshuffle, retrain
from whence.counterfactual.scores import compute_scores
from whence.errors import WhenceError
from whence.rounds import DRAWS, METHODS, RoundRecording
from whence.rounds.replay import check_target, open_round
from whence.targets import Target

SCHEMA = {
    "score": pl.String,
    "truth": pl.String,
    "outcome": pl.String,
    "lds": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "ceiling": pl.Float64,
}


@dataclass(frozen=True, eq=False)
class Study:
    """One round's scores and what they are worth.

    Attributes:
        table: a row for each score, truth and outcome: `score`, `truth`, `outcome`, `lds`, `low`, `high`, `ceiling`.
        scores: (n,) float64 of each score.
        kept: (m, n) which records each training kept.
        outcomes: of each truth, (orders, m) by the outcome's name.
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
    draws: int = DRAWS,
    evaluate: Evaluate | None = None,
    seed: int = 0,
    memory: int = 2**31,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Study:
    """Hold scores of a round against training it without records.

    Two truths: "recorded" leaves records out of the recorded minibatches (all else equal, nothing random); "reshuffled"
    shuffles what is kept into full minibatches, as selection does, in several orders. Outcomes: the target and the
    surrogate `mean(rho A)` on the round's own records, and what `evaluate` measures. A truth's ceiling is what the best
    predictor could reach given how well orders agree with each other: the root of the reliability of their mean; 1
    where nothing is random. What `evaluate` measures with chance of its own has no ceiling under "recorded".

    Both truths are of the records that the round trained on. Where `target_kl` ended it, "recorded" ends there too, and
    "reshuffled", of which nobody knows where it would have, trains all epochs.

    Args:
        policy: the policy that was trained, or one built like it; it is left as it is.
        recording: of the round.
        target: what the scores are of.
        share: of the records that the round trained on, below 1, that each training keeps, and those that "smoothed"
            averages.
        count: subsets.
        orders: of each subset under "reshuffled", at least 2.
        scores: (n,) by name, in the order of the records; None: those of `compute_scores`.
        methods: of `attribute_round`, for `compute_scores`.
        draws: see `attribute_round`, for `compute_scores`.
        evaluate: measures trained parameters; None: nothing is. The recorded truth is its repetition 0, the orders are
            the repetitions from 1, so that orders do not agree by the chance of a test that they share.
        seed: of subsets, orders and random scores.
        memory: bytes that scoring and training may hold at a time; see `attribute_round` and `retrain`. That training
            fits is seen to before anything is scored.
        on_stage: called with the name of each stage as it begins.

    Raises:
        NonFinite: a training diverged, or an outcome is no number.
        WhenceError: fewer than two orders or three subsets, all records to be kept, scores of another shape or not
            finite, a round that was not trained on, or a target that reads what the recording lacks; or see `retrain`
            and `compute_scores`.
    """
    if orders < 2 or count < 3 or not share < 1:
        raise WhenceError(
            f"orders is {orders}, count {count} and share {share}; at least 2 orders and 3 subsets are needed, and a "
            "share below 1, since subsets that are all the same are in no order."
        )
    n, size = len(recording.records), read_batch_size(recording)
    target = check_target(target, open_round(policy, recording))
    generator = torch.Generator().manual_seed(seed)
    kept = draw_subsets_of(recording, share, count, generator)
    check_memory(policy, recording, kept, memory)
    if scores is None:
        asked: dict[str, Any] = {"methods": methods, "draws": draws, "share": share, "seed": seed}
        scores = compute_scores(policy, recording, target=target, **asked, memory=memory, on_stage=on_stage)
    checked = {name: check_scores(name, own, n) for name, own in scores.items()}
    outcomes: dict[str, dict[str, NDArray[np.float64]]] = {}
    for truth, repetitions in (("recorded", [0]), ("reshuffled", range(1, orders + 1))):
        runs = []
        for repetition in repetitions:
            on_stage(f"training {count} times, {truth}" + (f", order {repetition} of {orders}" if repetition else ""))
            own = reshuffle(kept, size, recording.update.n_epochs, generator) if repetition else None
            trained = retrain(policy, recording, kept, orders=own, memory=memory)
            runs.append(measure_outcomes(policy, recording, trained, target, evaluate, repetition))
        outcomes[truth] = {name: np.stack([run[name] for run in runs]) for name in runs[0]}
    rows = [
        {"score": name, "truth": truth, "outcome": outcome, **_row(score, kept, values, chance=outcome == "evaluated")}
        for truth, found in outcomes.items()
        for outcome, values in found.items()
        for name, score in checked.items()
    ]
    return Study(pl.DataFrame(rows, schema=SCHEMA), checked, kept, outcomes)


def _row(
    score: NDArray[np.float64], kept: Tensor, values: NDArray[np.float64], *, chance: bool
) -> dict[str, float | None]:
    found = compute_lds(kept.double().numpy() @ score, values.mean(axis=0))
    alone = None if chance else 1.0
    return {**found, "ceiling": measure_agreement(values) if len(values) > 1 else alone}
