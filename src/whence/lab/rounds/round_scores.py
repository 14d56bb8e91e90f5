"""Scores of records by the whole round: all epochs, the real optimiser (LDA §3.1, and beyond it)."""

import math
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from whence.core import NonFinite, Target, WhenceError, eval_mode, preserve_rng_state, suggest, target_name
from whence.lab.rounds import optimizers
from whence.lab.rounds.replay import (
    Minibatch,
    Point,
    SteppedRound,
    check_target,
    clip_factor,
    iterate_points,
    minibatch_loss,
    objective_values,
    open_round,
    pull_back,
    raise_on_divergence,
    step,
    target_gradient,
)
from whence.rounds import RoundRecording
from whence.scores import Influence, Provenance

Vector = Float[Tensor, " p"]
"""One number for each parameter, flattened as in a `Point`."""

Scores = list[Float[Tensor, " b"]]
"""The scores of each step's minibatch."""

TRAJECTORY, OPTIMIZER, MOMENTUM, UNROLLED = "trajectory", "optimizer", "optimizer-momentum", "unrolled"

_PRODUCTS = (TRAJECTORY, OPTIMIZER, MOMENTUM)
"""Methods that multiply the target's gradient at every step with those of the records."""

METHODS = (*_PRODUCTS, UNROLLED)
"""Ways to attribute a round."""


def attribute_round(
    policy: object,
    recording: RoundRecording,
    *,
    target: Target,
    method: str | Collection[str] = "optimizer",
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
      normalisation and clipping; see `whence.lab.rounds.replay` for what a weight is. It cannot see that a record may
      move the ratios of others past the edge of the clip range.

    The policy and every random generator are left as they are.

    Args:
        policy: the policy that was trained, or one built like it; its parameters are not read.
        recording: the recorded round.
        target: what to raise; see `attribute`. It reads the recorded rollout, with raw advantages.
        method: one of `METHODS`; or several, of which "trajectory", "optimizer" and "optimizer-momentum" share the
            target's gradient at every step, which is most of their cost.
        memory: bytes that points along the steps may take. Methods that go back through the steps keep as many points
            as fit and compute the others again. Scores do not depend on it.
        dtype: the dtype to compute in; None: the recorded one.

    Returns:
        The `Influence`; a record that the round did not train on scores 0. For several methods, a dict of these in the
        methods' order.

    Raises:
        Unsupported: see `whence.lab.rounds.replay`.
        NonFinite: a score is not finite.
        WhenceError: the method is unknown, the target depends on no parameter, or the recording is of another policy.
    """
    methods = [method] if isinstance(method, str) else list(method)
    for each in methods:
        if each not in METHODS:
            raise WhenceError(f"method is {each!r}.{suggest(each, METHODS)}")
    round = open_round(policy, recording, dtype=dtype)
    with (
        preserve_rng_state(),
        eval_mode(list(round.view.module.modules())),
        torch.inference_mode(False),
        torch.enable_grad(),
        raise_on_divergence(round),
    ):
        target = check_target(target, round)
        totals = sum_steps(round, target, methods, memory)
    by_method = {each: _make_influence(totals[each], round, target, each) for each in methods}
    return by_method[method] if isinstance(method, str) else by_method


def _make_influence(scores: Float[Tensor, " n"], round: SteppedRound, target: Target, method: str) -> Influence:
    recording = round.recording
    if not torch.isfinite(scores).all():
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
    return Influence(scores, recording.records.ids.clone(), provenance)


def snapshot_scores(round: SteppedRound, target: Target) -> Float[Tensor, " n"]:
    """Return `<grad f, grad l_i>` at the policy that collected the round, advantages normalised over all of it."""
    whole = Minibatch(torch.arange(len(round.records)), round.records, round.inputs)
    with preserve_rng_state(), eval_mode(list(round.view.module.modules())), torch.enable_grad():
        return _directional_derivatives(round, round.start, whole, target_gradient(round, round.start.params, target))


def sum_steps(
    round: SteppedRound, target: Target, methods: Collection[str], memory: int
) -> dict[str, Float[Tensor, " n"]]:
    """Return the scores of each record, summed over the steps, on the CPU; points may take `memory` bytes."""
    like, totals = round.records.log_probs, {}
    for method, by_step in score_steps(round, target, methods, _choose_interval(round, memory)).items():
        totals[method] = torch.zeros(len(like), dtype=like.dtype)
        for places, scores in zip(round.recording.steps, by_step, strict=True):
            totals[method].index_add_(0, places.cpu(), scores.detach().cpu())
    return totals


def _choose_interval(round: SteppedRound, memory: int) -> int:
    """Return the smallest interval between stored points that fits, so that the fewest have to be computed again."""
    count = len(round)
    # Above the root of the number of steps, a longer segment takes more than it saves.
    longest = math.isqrt(count) + 1
    for interval in range(1, longest):
        # The stored points, a segment, the point after it and the derivative.
        if (math.ceil(count / interval) + interval + 2) * round.start.nbytes <= memory:
            return interval
    return longest


def score_steps(round: SteppedRound, target: Target, methods: Collection[str], interval: int) -> dict[str, Scores]:
    """Return the scores of each step's minibatch by those methods that go along the round's own schedule.

    A pass from the last step to the first stores the point before every `interval`-th step.
    """
    products = [name for name in _PRODUCTS if name in methods]
    scores = _score_by_products(products, round, target, interval) if products else {}
    return scores | ({UNROLLED: _score_by_unrolling(round, target, interval)} if UNROLLED in methods else {})


def _score_by_products(
    methods: Collection[str], round: SteppedRound, target: Target, interval: int
) -> dict[str, Scores]:
    """Return the scores of methods that need the target's gradient at every step, which is most of their cost."""
    optimizer = round.recording.optimizer
    carried = torch.zeros_like(round.start.params)
    scores = {method: [torch.empty(0)] * len(round) for method in methods}
    points = (point.map(Tensor.detach) for point in iterate_points(round))
    forwards = ((number, *pair) for number, pair in enumerate(pairwise(points)))
    for number, before, after in _iterate_backwards(round, interval) if MOMENTUM in methods else forwards:
        minibatch = round.minibatch(number)
        ascent = target_gradient(round, before.params, target)
        if TRAJECTORY in methods:
            scores[TRAJECTORY][number] = _directional_derivatives(round, before, minibatch, ascent)
        if OPTIMIZER not in methods and MOMENTUM not in methods:
            continue
        factor, scale = _gradient_factor(round, before, minibatch), optimizers.preconditioner(optimizer, after.state)
        if OPTIMIZER in methods:
            scores[OPTIMIZER][number] = factor * _directional_derivatives(round, before, minibatch, scale * ascent)
        if MOMENTUM in methods:
            now, first, decay = optimizers.momentum_weights(optimizer, before.state)
            # RMSprop's momentum accumulates gradients that are scaled; Adam scales its momentum at each update.
            gradient_scale, update_scale = (scale, 1.0) if optimizer.name == "RMSprop" else (1.0, scale)
            ascent = update_scale * ascent
            carried = ascent / optimizers.bias_correction(optimizer, after.state) + decay * carried
            direction = gradient_scale * (first * carried + now * ascent)
            scores[MOMENTUM][number] = factor * _directional_derivatives(round, before, minibatch, direction)
    return scores


def _gradient_factor(round: SteppedRound, before: Point, minibatch: Minibatch) -> Tensor:
    """Return what a step multiplies each record's gradient by, before the optimiser scales it."""
    ones, recording = torch.ones_like(minibatch.records.log_probs), round.recording
    gradient = torch.func.grad(lambda p: minibatch_loss(round, round.unflatten(p), minibatch, ones))(before.params)
    clipped = clip_factor(gradient, recording.update.max_grad_norm)
    factor: Tensor = recording.optimizer.settings["lr"] * clipped / len(ones)
    return factor.detach()


def _iterate_backwards(round: SteppedRound, interval: int) -> Iterator[tuple[int, Point, Point]]:
    """Yield each step with the points before and after it, the last step first.

    The point before every `interval`-th step is stored; those in between are computed again.
    """
    stored: list[Point] = []
    for number, point in enumerate(iterate_points(round)):
        if number % interval == 0 and number < len(round):
            stored.append(point.map(Tensor.detach))
        after = point.map(Tensor.detach)
    while stored:
        begin = (len(stored) - 1) * interval
        segment = [stored.pop()]
        for number in range(begin, min(begin + interval, len(round)) - 1):
            minibatch = round.minibatch(number)
            segment.append(
                step(round, segment[-1], minibatch, torch.ones_like(minibatch.records.log_probs)).map(Tensor.detach)
            )
        while segment:
            before = segment.pop()
            yield begin + len(segment), before, after
            after = before


def _score_by_unrolling(round: SteppedRound, target: Target, interval: int) -> Scores:
    scores: Scores = [torch.empty(0)] * len(round)
    adjoint = None
    for number, before, after in _iterate_backwards(round, interval):
        if adjoint is None:
            adjoint = after.map(torch.zeros_like)._replace(params=target_gradient(round, after.params, target))
        minibatch = round.minibatch(number)
        pulled, by_weight = pull_back(round, before, minibatch, torch.ones_like(minibatch.records.log_probs), adjoint)
        scores[number], adjoint = by_weight.detach(), pulled.map(Tensor.detach)
    return scores


def _directional_derivatives(
    round: SteppedRound, point: Point, minibatch: Minibatch, direction: Vector
) -> Float[Tensor, " b"]:
    """Return the product of each record's gradient with a direction.

    It is the derivative, by the record's weight, of the product of the weighted gradient. So the gradients are those
    that `step` takes, where forward mode would not run hooks that change them.
    """
    ones = torch.ones_like(minibatch.records.log_probs)

    def multiply(weights: Tensor) -> Tensor:
        def value(params: Vector) -> Tensor:
            return (weights * objective_values(round, round.unflatten(params), minibatch, ones)).sum()

        product: Tensor = torch.func.grad(value)(point.params) @ direction.detach()
        return product

    products: Tensor = torch.func.grad(multiply)(ones)
    return products
