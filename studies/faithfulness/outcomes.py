"""The outcomes of trainings of a round, and the scores that are to predict them."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from whence.core import (
    BatchTarget,
    NonFinite,
    RecordBatch,
    Target,
    WhenceError,
    eval_mode,
    label_units,
    preserve_rng_state,
)
from whence.lab.rounds import METHODS, attribute_round, check_target, open_round, snapshot_scores
from whence.lab.visits import compute_td_errors
from whence.rounds import RoundRecording
from whence.scores.folds import PartialTarget, check_batch_target
from whence.stored.agents import Evaluate

Outcomes = Mapping[str, NDArray[np.float64]]
"""The outcomes of m trainings, (m,), by the outcome's name."""


def read_batch_size(recording: RoundRecording) -> int:
    """Return the number of records in a full minibatch of a round.

    Raises:
        WhenceError: the round was not trained on.
    """
    if len(recording.minibatches) == 0:
        raise WhenceError(
            f"Round {recording.number} was not trained on, so there is nothing to train again: its selection kept "
            "fewer than two records. Take another round."
        )
    return len(recording.records) if recording.update.batch_size is None else recording.update.batch_size


def measure_outcomes(
    policy: object,
    recording: RoundRecording,
    trained: Mapping[str, Tensor],
    target: Target,
    evaluate: Evaluate | None,
    repetition: int = 0,
) -> Outcomes:
    """Return the outcomes of trainings: "target" and "surrogate" on the round's own records, and "evaluated".

    The surrogate is `mean(rho A)`, with raw advantages. The policy and every random generator are left as they are.
    The arguments are those of `study`; `trained` is what `retrain` returns, and `repetition` seeds the generators.

    Raises:
        NonFinite: names the outcome and the training.
    """
    round = open_round(policy, recording)
    modules = list(round.view.module.modules())
    outcomes: dict[str, list[float]] = {"target": [], "surrogate": []}
    if evaluate is not None:
        outcomes["evaluated"] = []
    for number in range(len(next(iter(trained.values())))):
        params = {name: tensor[number] for name, tensor in trained.items()}
        with seed_outcomes(repetition), torch.no_grad():
            with eval_mode(modules):
                outcomes["target"].append(float(target(round.view, params, round.records)))
                log_probs = round.view.only({"log_prob"}, params, round.inputs).log_prob
            ratios = (log_probs - round.records.log_probs).exp()
            outcomes["surrogate"].append(float((ratios * round.records.advantages).mean()))
            if evaluate is not None:
                outcomes["evaluated"].append(evaluate(params, repetition))
    for name, values in outcomes.items():
        if lost := [number for number, value in enumerate(values) if not math.isfinite(value)]:
            raise NonFinite(
                f"The outcome {name!r} of training {lost[0]}, repetition {repetition}, is {values[lost[0]]}, which has "
                "no rank among the others: check the function that measures it, and whether the round diverges."
            )
    return {name: np.array(values) for name, values in outcomes.items()}


@contextmanager
def seed_outcomes(repetition: int) -> Iterator[None]:
    """Seed global generators by the repetition; on exit they are as before."""
    with preserve_rng_state():
        random.seed(repetition)
        np.random.seed(repetition)
        torch.manual_seed(repetition)
        yield


def check_scores(name: str, scores: NDArray[np.floating], n: int) -> NDArray[np.float64]:
    """Return scores by which n records can be ranked, (n,) float64; refuse others, by their name."""
    checked = np.asarray(scores, dtype=np.float64)
    if checked.shape != (n,) or not np.isfinite(checked).all():
        raise WhenceError(
            f"The scores {name!r} have shape {checked.shape}, {np.isfinite(checked).sum()} of them finite; a finite "
            f"one for each of the {n} records is needed. Leave these scores out, or find where they come from."
        )
    return checked


FOLDS = 2
"""The number of parts into which "crossfit" splits episodes."""


def split_target(target: Target, records: RecordBatch, folds: int) -> tuple[Int[Tensor, " n"], Sequence[Target]]:
    """Return the fold of each record, from 0, and for each fold the target on the other folds' records.

    Episodes are assigned to folds in turn and stay whole, since their records share returns. If there are fewer
    episodes than folds, every environment's records are cut into `folds` stretches instead.

    Raises:
        WhenceError: the target reads no records; there are fewer than two folds, or fewer records than folds; or it is
            not known where episodes begin.
    """
    part = check_batch_target(target)
    if folds < 2 or folds > len(records):
        raise WhenceError(f"folds is {folds}; from 2 to the number of records, {len(records)}, are needed.")
    fold = label_units(records, "episode")
    if int(fold.max()) + 1 >= folds:
        fold = fold % folds
    else:
        environments = torch.zeros(len(records)) if records.env_index is None else records.env_index.cpu()
        _, environment, counts = environments.unique(return_inverse=True, return_counts=True)
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])
        place = torch.empty_like(environment)
        place[environment.argsort(stable=True)] = torch.arange(len(records))
        fold = (place - first[environment]) * folds // counts[environment]
    return fold, [PartialTarget(part, (fold != number).nonzero().flatten()) for number in range(folds)]


def compute_scores(
    policy: object,
    recording: RoundRecording,
    *,
    target: Target,
    methods: Sequence[str] = tuple(METHODS),
    seed: int = 0,
    memory: int = 2**31,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> dict[str, NDArray[np.float64]]:
    """Score every record of a round by all methods that are compared; a positive score says that the record helps.

    - "snapshot": `<grad f, grad l_i>` at the policy that collected the round, without the value term, as `IIF` uses it;
      "snapshot with values": with that term, if it makes a difference.
    - "crossfit": the snapshot, each record scored by the other half of the episodes; only if the target is made of the
      scored records, and these have episode ids.
    - The `methods` of `attribute_round`.
    - "advantage"; "td-error": the size of the TD error, by which `TDErrorPriority` weighs records; "random".

    The arguments are those of `attribute_round`. `seed` is that of the random scores, and `on_stage` is called with
    the name of each stage as it begins.

    Returns:
        (n,) scores by name, in the order of the records.

    Raises:
        InvalidRecords: the records lack a column that TD errors need.
        WhenceError: see `attribute_round`.
    """
    records = recording.records
    baselines = {
        "advantage": records.advantages.double().cpu().numpy(),
        "td-error": np.abs(compute_td_errors(records)),
        "random": np.random.default_rng(seed).normal(size=len(records)),
    }
    by_method: dict[str, NDArray[np.float64]] = {}
    if methods:  # first, since they may not fit into memory
        on_stage(f"scores: {', '.join(methods)}")
        influences = attribute_round(
            policy,
            recording,
            method=methods,
            target=target,
            memory=memory,
        )
        by_method = {name: influence.scores.double().numpy() for name, influence in influences.items()}
    with_values = open_round(policy, recording)
    without = open_round(policy, replace(recording, update=replace(recording.update, vf_coef=0.0)))
    target = check_target(target, without)
    on_stage("scores: snapshot")
    scores = {"snapshot": snapshot_scores(without, target).double().cpu().numpy()}
    other = snapshot_scores(with_values, target).double().cpu().numpy()
    if not np.allclose(scores["snapshot"], other, rtol=1e-4, atol=1e-6 * np.abs(other).max()):
        scores["snapshot with values"] = other
    if isinstance(target, BatchTarget) and records.episode_ids is not None and len(records) >= FOLDS:
        on_stage("scores: crossfit")
        fold, targets = split_target(target, without.records, FOLDS)
        by_target = torch.stack([snapshot_scores(without, part) for part in targets])
        scores["crossfit"] = by_target.cpu().gather(0, fold[None])[0].double().numpy()
    return scores | by_method | baselines
