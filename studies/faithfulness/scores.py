"""The scores of a round that are compared, by every method."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from whence.core import BatchTarget, RecordBatch, Target, label_units
from whence.lab.rounds import METHODS, attribute_round, check_target, open_round, snapshot_scores
from whence.lab.rules import compute_td_errors
from whence.rounds import RoundRecording
from whence.scores.folds import PartialTarget, check_batch_target

FOLDS = 2
"""The number of parts into which "crossfit" splits episodes."""


def split_target(target: Target, records: RecordBatch) -> tuple[Int[Tensor, " n"], Sequence[Target]]:
    """Return the fold of each record, from 0, and for each fold the target on the other folds' records.

    Episodes are assigned to folds in turn and stay whole, since their records share returns.
    """
    part, fold = check_batch_target(target), label_units(records, "episode") % FOLDS
    return fold, [PartialTarget(part, (fold != number).nonzero().flatten()) for number in range(FOLDS)]


def compute_scores(
    policy: object,
    recording: RoundRecording,
    *,
    target: Target,
    methods: Sequence[str] = tuple(METHODS),
    seed: int = 0,
) -> dict[str, NDArray[np.float64]]:
    """Score every record of a round by all methods that are compared; a positive score says that the record helps.

    - "snapshot": `<grad f, grad l_i>` at the policy that collected the round, without the value term, as `IIF` uses it;
      "snapshot with values": with that term, if it makes a difference.
    - "crossfit": the snapshot, each record scored by the other half of the episodes; only if the target is made of the
      scored records, and these have episode ids.
    - The `methods` of `attribute_round`.
    - "advantage"; "td-error": the size of the TD error, by which `TDErrorPriority` weighs records; "random", of `seed`.

    Returns:
        (n,) scores by name, in the order of the records.
    """
    records = recording.records
    with_values = open_round(policy, recording)
    without = open_round(policy, replace(recording, update=replace(recording.update, vf_coef=0.0)))
    target = check_target(target, without)
    scores = {"snapshot": snapshot_scores(without, target).double().cpu().numpy()}
    other = snapshot_scores(with_values, target).double().cpu().numpy()
    if not np.allclose(scores["snapshot"], other, rtol=1e-4, atol=1e-6 * np.abs(other).max()):
        scores["snapshot with values"] = other
    if isinstance(target, BatchTarget) and records.episode_ids is not None:
        fold, targets = split_target(target, without.records)
        by_target = torch.stack([snapshot_scores(without, part) for part in targets])
        scores["crossfit"] = by_target.cpu().gather(0, fold[None])[0].double().numpy()
    if methods:
        influences = attribute_round(policy, recording, method=methods, target=target)
        scores |= {name: influence.scores.double().numpy() for name, influence in influences.items()}
    return scores | {
        "advantage": records.advantages.double().cpu().numpy(),
        "td-error": np.abs(compute_td_errors(records)),
        "random": np.random.default_rng(seed).normal(size=len(records)),
    }
