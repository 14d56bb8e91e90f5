"""How far the scores of one round can be trusted: predictions held against many trainings without records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor

from whence.advantages import td_errors
from whence.counterfactual.measures import agreement, lds
from whence.counterfactual.outcomes import Evaluate as Evaluate
from whence.counterfactual.outcomes import outcomes_of
from whence.counterfactual.retrain import batch_size_of, reshuffled, retrain, subsets
from whence.errors import WhenceError
from whence.records import RecordBatch
from whence.rounds import METHODS, RoundRecording, attribute_round
from whence.rounds.replay import check_target, opened
from whence.rounds.schedule import snapshot
from whence.targets import Target


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
    methods: Sequence[str] = tuple(METHODS),
    evaluate: Evaluate | None = None,
    seed: int = 0,
    memory: int = 2**31,
    told: Callable[[str], None] = lambda stage: None,
) -> Study:
    """Hold every score of a round against training it without records.

    Two truths: "recorded" leaves records out of the recorded minibatches (all else equal, nothing random);
    "reshuffled" shuffles what is kept into full minibatches, as selection does, in several orders. Outcomes: the target
    and the surrogate `mean(rho A)` on the round's own records, and what `evaluate` measures. A truth's ceiling is what
    the best predictor could reach given how well orders agree with each other: the root of the reliability of their
    mean; 1 where nothing is random. What `evaluate` measures with chance of its own has no ceiling under "recorded".

    Args:
        policy: the policy that was trained, or one built like it; it is left as it is.
        recording: of the round.
        target: what the scores are of.
        share: of the records that each training keeps.
        count: subsets.
        orders: of each subset under "reshuffled", at least 2.
        methods: of `attribute_round`; the snapshot score and the simple ones are always there.
        evaluate: measures trained parameters; None: nothing is.
        seed: of subsets and orders.
        memory: bytes that scoring and training may hold at a time; see `attribute_round` and `retrain`.
        told: hears of each stage as it begins.

    Raises:
        WhenceError: fewer than two orders or three subsets, a round that was not trained on, or a target that reads
            what the recording lacks; or see `retrain` and `attribute_round`.
    """
    if orders < 2 or count < 3:
        raise WhenceError(f"orders is {orders} and count {count}; at least 2 orders and 3 subsets are needed.")
    size = batch_size_of(recording)
    target = check_target(target, opened(policy, recording))
    generator = torch.Generator().manual_seed(seed)
    kept = subsets(len(recording.records), share, count, generator)
    scores = {}
    for name, make in _scores(policy, recording, target, methods, seed, memory).items():
        told(f"scores: {name}")
        scores[name] = make()
    outcomes: dict[str, dict[str, NDArray[np.float64]]] = {}
    for truth, drawn in (("recorded", 1), ("reshuffled", orders)):
        runs = []
        for number in range(drawn):
            told(f"training {count} times, {truth}" + (f", order {number + 1} of {drawn}" if drawn > 1 else ""))
            own = None
            if truth == "reshuffled":
                own = reshuffled(kept, size, recording.update.n_epochs, generator)
            trained = retrain(policy, recording, kept, orders=own, memory=memory)
            runs.append(outcomes_of(policy, recording, trained, target, evaluate))
        outcomes[truth] = {name: np.stack([run[name] for run in runs]) for name in runs[0]}
    rows = [
        {"score": name, "truth": truth, "outcome": outcome, **_row(score, kept, values, chance=outcome == "evaluated")}
        for truth, found in outcomes.items()
        for outcome, values in found.items()
        for name, score in scores.items()
    ]
    return Study(pl.DataFrame(rows, infer_schema_length=None), scores, kept, outcomes)


def _row(
    score: NDArray[np.float64], kept: Tensor, values: NDArray[np.float64], *, chance: bool
) -> dict[str, float | None]:
    found = lds(kept.double().numpy() @ score, values.mean(axis=0))
    alone = None if chance else 1.0
    return {**found, "ceiling": agreement(values) if len(values) > 1 else alone}


def _scores(
    policy: object, recording: RoundRecording, target: Target, methods: Sequence[str], seed: int, memory: int
) -> dict[str, Callable[[], NDArray[np.float64]]]:
    def of_round(method: str) -> Callable[[], NDArray[np.float64]]:
        def score() -> NDArray[np.float64]:
            found = attribute_round(policy, recording, target=target, method=method, memory=memory)
            assert not isinstance(found, list)
            return found.scores.double().numpy()

        return score

    records = recording.records
    return {
        "snapshot": lambda: snapshot(opened(policy, recording), target).double().cpu().numpy(),
        **{method: of_round(method) for method in methods},
        "advantage": lambda: records.advantages.double().cpu().numpy(),
        "td-error": lambda: -np.abs(_td_errors(records)),
        "random": lambda: np.random.default_rng(seed).normal(size=len(records)),
    }


def _td_errors(records: RecordBatch) -> NDArray[np.float64]:
    if records.episode_starts is None or records.env_index is None or records.gamma is None:
        raise WhenceError("TD errors need episode_starts, env_index and gamma, which these records lack.")
    assert records.gae_lambda is not None
    return td_errors(
        records.advantages.double().cpu().numpy(),
        records.episode_starts.cpu().numpy(),
        records.env_index.cpu().numpy(),
        records.gamma,
        records.gae_lambda,
    )
