"""Scores of records by the whole round: all epochs, the real optimiser (LDA §3.1, and beyond it)."""

from collections.abc import Collection
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from whence.errors import NonFinite, WhenceError, suggest
from whence.guards import eval_mode, preserve_rng_state
from whence.influence import Influence, Provenance
from whence.rounds.recording import RoundRecording
from whence.rounds.replay import SteppedRound, check_target, open_round, raise_on_divergence
from whence.rounds.schedule import SCHEDULED, plan_passes, sum_by_epoch
from whence.rounds.smoothed import DRAWS, SHARE, SMOOTHED, smoothed_scores
from whence.targets import Target, target_name

METHODS = (*SCHEDULED, SMOOTHED)
"""Ways to attribute a round."""


def attribute_round(
    policy: object,
    recording: RoundRecording,
    *,
    target: Target,
    method: str | Collection[str] = "optimizer",
    per_epoch: bool = False,
    draws: int = DRAWS,
    share: float = SHARE,
    seed: int = 0,
    memory: int = 2**31,
    dtype: torch.dtype | None = None,
) -> Any:
    """Score every record by what training on it in a recorded round did to a target at the round's end.

    A positive score says that the record raised the target. Methods, in the order of their cost:

    - "trajectory": `sum_j <grad f(theta_j), grad l_i(theta_j)>` over the steps j that trained on the record (LDA §3.1).
    - "optimizer": the same products, scaled as the optimiser scaled each gradient: by learning rate, minibatch,
      clipping, and Adam's or RMSprop's scale at that step. To first order, this is what the record's own gradient added
      to the target.
    - "optimizer-momentum": the same, with the share of each gradient that momentum carries into later steps.
    - "unrolled": the exact derivative of the target at the round's end by the record's weight, through every step,
      normalisation and clipping; see `whence.rounds.replay` for what a weight is. It cannot see that a record may move
      the ratios of others past the edge of the clip range.
    - "smoothed": that derivative across an edge of some width, averaged over trainings on random subsets of the records
      in random orders. It is meant for rounds in which many ratios are clipped. It trains all `n_epochs`, even if
      `target_kl` ended the round early.

    The policy and every random generator are left as they are.

    Args:
        policy: the policy that was trained, or one built like it; its parameters are not read.
        recording: the recorded round.
        target: what to raise; see `attribute`. It reads the recorded rollout, with raw advantages.
        method: one of `METHODS`; or several, of which "trajectory", "optimizer" and "optimizer-momentum" share the
            target's gradient at every step, which is most of their cost.
        per_epoch: whether to return one influence for each epoch; they add up to the whole.
        draws: the number of trainings that "smoothed" averages; the other methods draw nothing.
        share: the share of the trained records that each of these trainings keeps, above 0 and at most 1. The scores
            predict best what keeping about that share does.
        seed: the seed of these trainings, at least 0.
        memory: bytes that points along the steps, or trainings side by side, may take. Methods that go back through the
            steps keep as many points as fit and compute the others again. Scores do not depend on it.
        dtype: the dtype to compute in; None: the recorded one.

    Returns:
        The `Influence`, or a list of them by epoch; a record that the round did not train on scores 0. For several
        methods, a dict of these in the methods' order.

    Raises:
        Unsupported: see `whence.rounds.replay`.
        NonFinite: a score is not finite.
        WhenceError: the method is unknown, `draws`, `share` or `seed` is out of range, the target depends on no
            parameter, or the recording is of another policy.
    """
    methods = [method] if isinstance(method, str) else list(method)
    for each in methods:
        if each not in METHODS:
            raise WhenceError(f"method is {each!r}.{suggest(each, METHODS)}")
    round = open_round(policy, recording, dtype=dtype)
    totals: dict[str, Float[Tensor, "epochs n"]] = {}
    with (
        preserve_rng_state(),
        eval_mode(list(round.view.module.modules())),
        torch.inference_mode(False),
        torch.enable_grad(),
        raise_on_divergence(round),
    ):
        target = check_target(target, round)
        for one in plan_passes(methods):
            totals |= sum_by_epoch(round, target, one, memory)
        if SMOOTHED in methods:
            totals[SMOOTHED] = smoothed_scores(round, target, memory, draws=draws, share=share, seed=seed)
    influences = {each: _make_influences(totals[each], round, target, each, per_epoch=per_epoch) for each in methods}
    by_method = {each: parts if per_epoch else parts[0] for each, parts in influences.items()}
    return by_method[method] if isinstance(method, str) else by_method


def _make_influences(
    totals: Float[Tensor, "epochs n"], round: SteppedRound, target: Target, method: str, *, per_epoch: bool
) -> list[Influence]:
    recording = round.recording
    if not torch.isfinite(totals).all():
        raise NonFinite(
            f"Scores of round {recording.number} by {method} are not finite: the round's optimisation diverged, "
            "or the target has no derivative there. Look at the learning rate, and try method='trajectory' or "
            "dtype=float64."
        )
    provenance = Provenance(
        target=target_name(target),
        objective=f"round {recording.number}: {recording.update}, {recording.optimizer.name}",
        engine=method,
        engine_reason="asked for",
        parameters=tuple(round.shapes),
        records=recording.records.fingerprint,
        versions=dict(recording.versions),
    )
    parts = totals if per_epoch else [totals.sum(dim=0)]
    return [Influence(scores, recording.records.ids.clone(), provenance) for scores in parts]
