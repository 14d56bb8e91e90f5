"""What a record did to the whole round: all epochs, the real optimiser (LDA §3.1, and beyond it)."""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from whence.engines.forward import along_direction
from whence.errors import NonFinite, WhenceError, nearest
from whence.guards import eval_mode, kept_generators
from whence.influence import Influence, Provenance
from whence.rounds import optimizers
from whence.rounds.recording import RoundRecording
from whence.rounds.replay import Minibatch, Point, Round, clip_factor, loss, opened, points, step, values
from whence.targets import Target, as_target, name_of

Tensors = dict[str, Tensor]


def attribute_round(
    policy: object,
    recording: RoundRecording,
    *,
    target: Target,
    method: str = "optimizer",
    per_epoch: bool = False,
    dtype: torch.dtype | None = None,
) -> Influence | list[Influence]:
    """Score every record by what training on it in a recorded round did to a target at the round's end.

    A positive score says that the record raised the target. Methods, in the order of their cost:

    - "trajectory": `sum_j <grad f(theta_j), grad l_i(theta_j)>` over the steps j that trained on the record (LDA §3.1).
    - "optimizer": the same with what the optimiser made of each gradient: learning rate, minibatch, clipping, and
      Adam's or RMSprop's scale as it stood. To first order, what the record's own gradient added to the target.
    - "optimizer-momentum": with the share of each gradient that momentum carries into the steps after.
    - "unrolled": the exact derivative of the target at the round's end by the record's weight, through every step,
      normalisation and clipping; see `whence.rounds.replay` for what a weight is.

    The policy and every random generator are left as they are.

    Args:
        policy: the policy that was trained, or one built like it; its parameters are not read.
        recording: of the round.
        target: what to raise; see `attribute`. It reads the recorded rollout, with raw advantages.
        method: see above.
        per_epoch: return one influence for each epoch; they add up to the whole.
        dtype: to compute in; None: the recorded one.

    Returns:
        The `Influence`, or a list of them; a record that the round did not train on scores 0.

    Raises:
        Unsupported: see `whence.rounds.replay`.
        NonFinite: a score is not finite.
        WhenceError: a method that is not known, a target that depends on no parameter, or a recording of another
            policy.
    """
    if method not in METHODS:
        raise WhenceError(f"method is {method!r}.{nearest(method, METHODS)}")
    target = as_target(target)
    round = opened(policy, recording, dtype=dtype)
    with (
        kept_generators(),
        eval_mode(list(round.view.module.modules())),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        by_step = METHODS[method](round, target)
    epochs = max(recording.epochs, default=-1) + 1
    totals = torch.zeros(max(epochs, 1), len(round.records), dtype=round.records.log_probs.dtype)
    for number, scores in enumerate(by_step):
        totals[recording.epochs[number]].index_add_(0, recording.steps[number].cpu(), scores.detach().cpu())
    if not torch.isfinite(totals).all():
        raise NonFinite(
            f"Scores of round {recording.number} by {method} are not finite: the round's optimisation diverged, or the "
            "target has no derivative there. Look at the learning rate, and try method='trajectory' or dtype=float64."
        )
    made = [_influence(one, round, target, method) for one in (totals if per_epoch else [totals.sum(dim=0)])]
    return made if per_epoch else made[0]


def _influence(scores: Float[Tensor, " n"], round: Round, target: Target, method: str) -> Influence:
    recording = round.recording
    return Influence(
        scores=scores,
        record_ids=recording.records.ids.clone(),
        provenance=Provenance(
            target=name_of(target),
            objective=f"round {recording.number}: {recording.update}, {recording.optimizer.name}",
            engine=method,
            engine_reason="asked for",
            parameters=tuple(round.start.params),
            records=recording.records.fingerprint,
            versions=dict(recording.versions),
        ),
    )


Scores = list[Float[Tensor, " b"]]
"""The scores of each step's minibatch."""


def snapshot(round: Round, target: Target) -> Float[Tensor, " n"]:
    """Return `<grad f, grad l_i>` at the policy that collected the round, advantages normalised over all of it."""
    everything = Minibatch(torch.arange(len(round.records)), round.records, round.inputs)
    with kept_generators(), eval_mode(list(round.view.module.modules())), torch.enable_grad():
        return _along(round, round.start, everything, _target_gradient(round, round.start.params, target))


def _trajectory(round: Round, target: Target) -> Scores:
    found = []
    for number, point in enumerate(points(round)):
        if number < len(round):
            found.append(_along(round, point, round.minibatch(number), _target_gradient(round, point.params, target)))
    return found


class _Applied(NamedTuple):
    """What the optimiser did at a step: the factor of a gradient, and the target's gradient scaled as it scales."""

    factor: Tensor
    scaled: Tensors


def _applied(round: Round, before: Point, after: Point, minibatch: Minibatch, target: Target) -> _Applied:
    optimizer, ones = round.recording.optimizer, torch.ones_like(minibatch.records.log_probs)
    gradients = torch.func.grad(lambda free: loss(round, free, minibatch, ones))(before.params)
    factor = optimizer.settings["lr"] * clip_factor(gradients, round.recording.update.max_grad_norm) / len(ones)
    raised = _target_gradient(round, before.params, target)
    return _Applied(
        factor.detach(),
        {name: g * optimizers.preconditioner(optimizer, after.state[name]) for name, g in raised.items()},
    )


def _optimizer(round: Round, target: Target) -> Scores:
    found, path = [], list(_pairs(round))
    for number, (before, after) in enumerate(path):
        minibatch = round.minibatch(number)
        applied = _applied(round, before, after, minibatch, target)
        found.append(applied.factor * _along(round, before, minibatch, applied.scaled))
    return found


def _optimizer_momentum(round: Round, target: Target) -> Scores:
    optimizer = round.recording.optimizer
    now, first, decay = optimizers.momentum(optimizer)
    path = list(_pairs(round))
    found: Scores = [torch.empty(0)] * len(path)
    carried = {name: torch.zeros_like(p) for name, p in round.start.params.items()}
    for number in reversed(range(len(path))):
        before, after = path[number]
        minibatch = round.minibatch(number)
        applied = _applied(round, before, after, minibatch, target)
        for name, scaled in applied.scaled.items():
            corrected = 1 - decay ** after.state[name]["step"] if optimizer.name.startswith("Adam") else 1.0
            carried[name] = first * scaled / corrected + decay * carried[name]
        direction = {name: carried[name] + now * scaled for name, scaled in applied.scaled.items()}
        found[number] = applied.factor * _along(round, before, minibatch, direction)
    return found


def _pairs(round: Round) -> list[tuple[Point, Point]]:
    return list(pairwise(_detached(point) for point in points(round)))


def _unrolled(round: Round, target: Target) -> Scores:
    # Points are kept at every k-th step and made again in between, so that memory grows with the root of the steps.
    count = len(round)
    every = max(1, math.isqrt(count))
    kept: dict[int, Point] = {}
    for number, point in enumerate(points(round)):
        if number % every == 0:
            kept[number] = _detached(point)
        last = point
    adjoint = _zeros_like(last)
    for name, gradient in _target_gradient(round, last.params, target).items():
        adjoint.params[name].copy_(gradient)
    found: Scores = [torch.empty(0)] * count
    for begin in sorted((number for number in kept if number < count), reverse=True):
        segment = [kept[begin]]
        for number in range(begin, min(begin + every, count) - 1):
            minibatch = round.minibatch(number)
            segment.append(_detached(step(round, segment[-1], minibatch, torch.ones_like(minibatch.records.log_probs))))
        for number in reversed(range(begin, begin + len(segment))):
            found[number], adjoint = _back(round, segment[number - begin], round.minibatch(number), adjoint)
    return found


def _back(round: Round, point: Point, minibatch: Minibatch, adjoint: Point) -> tuple[Float[Tensor, " b"], Point]:
    """Take the derivative by what a step leads to back to its weights and to where it began."""
    weights = torch.ones_like(minibatch.records.log_probs)
    pull = torch.func.vjp(lambda p, w: step(round, p, minibatch, w), point, weights)[1]
    before, scores = pull(adjoint)
    return scores.detach(), _detached(before)


def _along(round: Round, point: Point, minibatch: Minibatch, direction: Mapping[str, Tensor]) -> Float[Tensor, " b"]:
    """Return each record's derivative of what the round raises along a direction."""
    ones = torch.ones_like(minibatch.records.log_probs)
    free = {name: g.detach() for name, g in direction.items()}
    return along_direction(lambda params: values(round, params, minibatch, ones), point.params, free)


def _target_gradient(round: Round, params: Mapping[str, Tensor], target: Target) -> Tensors:
    free = {name: p.detach().requires_grad_() for name, p in params.items()}
    value = target(round.view, free, round.records)
    found = torch.autograd.grad(value, list(free.values()), allow_unused=True) if value.requires_grad else [None]
    if all(gradient is None for gradient in found):
        raise WhenceError(f"The target {name_of(target)} depends on no parameter, so no record can move it.")
    return {
        name: torch.zeros_like(p) if gradient is None else gradient
        for (name, p), gradient in zip(free.items(), found, strict=True)
    }


def _detached(point: Point) -> Point:
    return Point(
        {name: p.detach() for name, p in point.params.items()},
        {name: {key: t.detach() for key, t in own.items()} for name, own in point.state.items()},
    )


def _zeros_like(point: Point) -> Point:
    return Point(
        {name: torch.zeros_like(p) for name, p in point.params.items()},
        {name: {key: torch.zeros_like(t) for key, t in own.items()} for name, own in point.state.items()},
    )


METHODS: Mapping[str, Callable[[Round, Target], Scores]] = MappingProxyType(
    {
        "trajectory": _trajectory,
        "optimizer": _optimizer,
        "optimizer-momentum": _optimizer_momentum,
        "unrolled": _unrolled,
    }
)
"""Ways to attribute a round."""
