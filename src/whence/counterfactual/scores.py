"""The scores of a round that studies compare with training it without records."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from whence.folds import split_target
from whence.heuristics import compute_td_errors
from whence.influence import Influence
from whence.rounds import DRAWS, METHODS, SHARE, RoundRecording, attribute_round_by
from whence.rounds.replay import check_target, open_round
from whence.rounds.schedule import snapshot_scores
from whence.targets import BatchTarget, Target

Vector = NDArray[np.float64]

FOLDS = 2
"""The number of parts into which "crossfit" splits episodes."""

MOST = len(METHODS) + 6
"""The largest number of scores that `compute_scores` returns."""


def compute_scores(
    policy: object,
    recording: RoundRecording,
    *,
    target: Target,
    methods: Sequence[str] = tuple(METHODS),
    draws: int = DRAWS,
    share: float = SHARE,
    seed: int = 0,
    memory: int = 2**31,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> dict[str, Vector]:
    """Score every record of a round by all methods that are compared; a positive score says that the record helps.

    - "snapshot": `<grad f, grad l_i>` at the policy that collected the round, without the value term, as `IIF` uses it;
      "snapshot with values": with that term, if it makes a difference.
    - "crossfit": the snapshot, each record scored by the other half of the episodes; only if the target is made of the
      scored records, and these have episode ids.
    - The `methods` of `attribute_round`.
    - "advantage"; "td-error": the size of the TD error, by which `TDErrorPriority` weighs records; "random".

    Args:
        policy: see `attribute_round`, as for `draws`, `share` and `memory`.
        recording: the recorded round.
        target: what to raise.
        methods: methods of `attribute_round`.
        draws: of "smoothed".
        share: of "smoothed".
        seed: the seed of the random scores and of `methods`.
        memory: bytes that `methods` may hold at a time.
        on_stage: called with the name of each stage as it begins.

    Returns:
        (n,) scores by name, in the order of the records.

    Raises:
        InvalidRecords: the records lack a column that TD errors need.
        WhenceError: the target reads a column that the recording lacks; or see `attribute_round`.
    """
    records = recording.records
    baselines = {
        "advantage": records.advantages.double().cpu().numpy(),
        "td-error": np.abs(compute_td_errors(records)),
        "random": np.random.default_rng(seed).normal(size=len(records)),
    }
    by_method: dict[str, Vector] = {}
    if methods:  # first, since they may not fit into memory
        on_stage(f"scores: {', '.join(methods)}")
        influences = attribute_round_by(
            policy, recording, methods, target=target, draws=draws, share=share, seed=seed, memory=memory
        )
        # One influence each, not one for each epoch.
        by_method = {
            name: influence.scores.double().numpy()
            for name, influence in influences.items()
            if isinstance(influence, Influence)
        }
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
        scores["crossfit"] = by_target.gather(0, fold[None])[0].double().cpu().numpy()
    return scores | by_method | baselines
