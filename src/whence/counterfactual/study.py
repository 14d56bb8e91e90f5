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
from whence.counterfactual.retrain import reshuffled, retrain, subsets
from whence.errors import WhenceError
from whence.guards import kept_generators
from whence.policies import ModuleView, Params
from whence.records import RecordBatch
from whence.rounds import METHODS, RoundRecording, attribute_round
from whence.rounds.attribute import snapshot
from whence.rounds.replay import Round, opened
from whence.targets import Target, as_target

Evaluate = Callable[[Mapping[str, Tensor]], float]
"""Measures trained parameters, given by name: for instance their test return."""

Outcomes = Mapping[str, NDArray[np.float64]]
"""What each training came to, (m,), by name."""

SIMPLE = ("advantage", "td-error", "random")
"""Scores that need no gradient."""


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
        told: hears of each stage as it begins.

    Raises:
        WhenceError: fewer than two orders or three subsets; or see `retrain` and `attribute_round`.
    """
    if orders < 2 or count < 3:
        raise WhenceError(f"orders is {orders} and count {count}; at least 2 orders and 3 subsets are needed.")
    target = as_target(target)
    generator = torch.Generator().manual_seed(seed)
    kept = subsets(len(recording.records), share, count, generator)
    scores = {}
    for name, make in _scores(policy, recording, target, methods, seed).items():
        told(f"scores: {name}")
        scores[name] = make()
    size = max(len(minibatch) for minibatch in recording.minibatches)
    outcomes: dict[str, dict[str, NDArray[np.float64]]] = {}
    for truth, drawn in (("recorded", 1), ("reshuffled", orders)):
        runs = []
        for number in range(drawn):
            told(f"training {count} times, {truth}" + (f", order {number + 1} of {drawn}" if drawn > 1 else ""))
            own = None
            if truth == "reshuffled":
                own = reshuffled(kept, size, recording.update.n_epochs, generator)
            runs.append(_outcomes(policy, recording, retrain(policy, recording, kept, orders=own), target, evaluate))
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
    policy: object, recording: RoundRecording, target: Target, methods: Sequence[str], seed: int
) -> dict[str, Callable[[], NDArray[np.float64]]]:
    def of_round(method: str) -> Callable[[], NDArray[np.float64]]:
        def score() -> NDArray[np.float64]:
            found = attribute_round(policy, recording, target=target, method=method)
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


def _outcomes(
    policy: object,
    recording: RoundRecording,
    params: Mapping[str, Tensor],
    target: Target,
    evaluate: Evaluate | None,
) -> Outcomes:
    round = opened(policy, recording)
    found: dict[str, list[float]] = {"target": [], "surrogate": []}
    if evaluate is not None:
        found["evaluated"] = []
    count = len(next(iter(params.values())))
    with kept_generators(), torch.no_grad():
        for number in range(count):
            own = {name: tensor[number] for name, tensor in params.items()}
            found["target"].append(float(target(round.view, own, round.records)))
            found["surrogate"].append(_surrogate(round, own))
            if evaluate is not None:
                found["evaluated"].append(evaluate(own))
    return {name: np.array(values) for name, values in found.items()}


def _surrogate(round: Round, params: Params) -> float:
    view, records = round.view, round.records
    outputs = (
        view.only({"log_prob"}, params, round.inputs) if isinstance(view, ModuleView) else view(params, round.inputs)
    )
    return float(((outputs.log_prob - records.log_probs).exp() * records.advantages).mean())
