"""The scores of a round that are held against training it without records."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from whence.crossfitting import split_target
from whence.heuristics import compute_td_errors
from whence.influence import Influence
from whence.rounds import DRAWS, METHODS, SHARE, RoundRecording, attribute_round_by
from whence.rounds.replay import SteppedRound, check_target, open_round
from whence.rounds.schedule import snapshot
from whence.targets import BatchTarget, Target

Vector = NDArray[np.float64]

FOLDS = 2
"""Into which "crossfit" deals episodes."""

MOST = len(METHODS) + 6
"""Scores that `compute_scores` makes of a round, where all that it knows can be made."""


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
    """Score every record of a round in all ways that are to be compared; a positive score says that it helps.

    - "snapshot": `<grad f, grad l_i>` at the policy that collected the round, without the value term, by which `IIF`
      selects; "snapshot with values": with that term, where this makes a difference.
    - "crossfit": the snapshot, each record judged by the other half of the episodes; where the target is made of the
      scored records, and these have episode ids.
    - `methods` of `attribute_round`.
    - "advantage"; "td-error": the size of the TD error, by which `TDErrorPriority` trains on some more than on others;
      "random".

    Args:
        policy: the policy that was trained, or one built like it; it is left as it is.
        recording: of the round.
        target: what to raise.
        methods: see above.
        draws: see `attribute_round`.
        share: see there.
        seed: of the random scores, and of what `methods` draw.
        memory: bytes that `methods` may hold at a time; see `attribute_round`.
        on_stage: called with the name of each stage as it begins.

    Returns:
        (n,) of each score, in the order of the records.

    Raises:
        InvalidRecords: records without what TD errors are made of.
        WhenceError: a target that reads what the recording lacks; or see `attribute_round`.
    """
    records = recording.records
    simple = {
        "advantage": records.advantages.double().cpu().numpy(),
        "td-error": np.abs(compute_td_errors(records)),
        "random": np.random.default_rng(seed).normal(size=len(records)),
    }
    whole: dict[str, Vector] = {}
    if methods:  # first, since they may not fit into memory
        on_stage(f"scores: {', '.join(methods)}")
        asked: dict[str, Any] = {"draws": draws, "share": share, "seed": seed, "memory": memory}
        by_method = attribute_round_by(policy, recording, methods, target=target, **asked)
        # One influence each, since none is asked for by epoch.
        whole = {name: own.scores.double().numpy() for name, own in by_method.items() if isinstance(own, Influence)}
    with_values = open_round(policy, recording)
    without = open_round(policy, replace(recording, update=replace(recording.update, vf_coef=0.0)))
    target = check_target(target, without)
    on_stage("scores: snapshot")
    found = {"snapshot": _snapshot(without, target)}
    other = _snapshot(with_values, target)
    if not np.allclose(found["snapshot"], other, rtol=1e-4, atol=1e-6 * np.abs(other).max()):
        found["snapshot with values"] = other
    if isinstance(target, BatchTarget) and records.episode_ids is not None and len(records) >= FOLDS:
        on_stage("scores: crossfit")
        found["crossfit"] = _crossfit(without, target)
    return found | whole | simple


def _snapshot(round: SteppedRound, target: Target) -> Vector:
    found: Vector = snapshot(round, target).double().cpu().numpy()
    return found


def _crossfit(round: SteppedRound, target: Target) -> Vector:
    fold, judges = split_target(target, round.records, FOLDS)
    scores = torch.stack([snapshot(round, judge) for judge in judges])
    own: Vector = scores.gather(0, fold[None])[0].double().cpu().numpy()
    return own
