"""Scores along the minibatches and steps that a round took: trajectory, optimiser-aware, unrolled."""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from whence.engines.forward import along_direction
from whence.engines.memory import bytes_held
from whence.errors import WhenceError
from whence.guards import eval_mode, kept_generators
from whence.rounds import optimizers
from whence.rounds.replay import MARGIN, Minibatch, Point, Round, clip_factor, loss, points, step, values
from whence.targets import Target, name_of

Vector = Float[Tensor, " p"]
"""Something of all parameters, as a `Point` has them."""

Scores = list[Float[Tensor, " b"]]
"""The scores of each step's minibatch."""


def snapshot(round: Round, target: Target) -> Float[Tensor, " n"]:
    """Return `<grad f, grad l_i>` at the policy that collected the round, advantages normalised over all of it."""
    everything = Minibatch(torch.arange(len(round.records)), round.records, round.inputs)
    with kept_generators(), eval_mode(list(round.view.module.modules())), torch.enable_grad():
        return _along(round, round.start, everything, target_gradient(round, round.start.params, target))


class Method(NamedTuple):
    """A way to attribute a round.

    Attributes:
        scores: `scores(round, target, every)`; of the points, at least each `every`-th is kept where that is needed.
        backwards: whether it goes through the steps from the last to the first, and so needs points kept.
    """

    scores: Callable[[Round, Target, int], Scores]
    backwards: bool

    def points_held(self, count: int, every: int) -> int:
        """Return the most points that it holds at a time, of a round of `count` steps."""
        # Those kept, a segment, the one after it and the derivative; or the start, before, after and the one to come.
        return math.ceil(count / every) + every + 2 if self.backwards else 4


def along_schedule(round: Round, target: Target, method: str, memory: int) -> Float[Tensor, "epochs n"]:
    """Return the scores of each record in each epoch, on the CPU.

    Raises:
        WhenceError: the method does not fit into `memory` bytes.
    """
    recording = round.recording
    by_step = SCHEDULED[method].scores(round, target, _kept_every(round, target, method, memory))
    totals = torch.zeros(max(recording.epochs, default=0) + 1, len(round.records), dtype=round.records.log_probs.dtype)
    for number, scores in enumerate(by_step):
        totals[recording.epochs[number]].index_add_(0, recording.steps[number].cpu(), scores.detach().cpu())
    return totals


def _kept_every(round: Round, target: Target, method: str, memory: int) -> int:
    """Return at which steps points are kept, so that as few as possible have to be made again.

    Raises:
        WhenceError: the method does not fit into `memory` bytes.
    """
    count, own = len(round), SCHEDULED[method]
    if count == 0:
        return 1
    alone = round.of_one_step()
    measured = max(bytes_held(lambda: own.scores(alone, target, 1)))
    like = round.records.log_probs
    scores = like.itemsize * (sum(map(len, round.recording.steps)) + (max(round.recording.epochs) + 2) * len(like))
    fixed, point = MARGIN * measured + scores, round.start.nbytes
    # From the root of the steps on, a longer segment takes more than it saves.
    choices = range(1, math.isqrt(count) + 2) if own.backwards else [1]
    for every in choices:
        if fixed + point * own.points_held(count, every) <= memory:
            return every
    held = min(own.points_held(count, every) for every in choices)
    forwards = " or ".join(f"method={name!r}" for name, other in SCHEDULED.items() if not other.backwards)
    raise WhenceError(
        f"memory is {memory:,} bytes, but scoring round {round.recording.number} by {method} takes about "
        f"{fixed + point * held:,} bytes: {fixed:,} for one step and the scores, {point * held:,} for {held} points of "
        f"parameters and optimiser state, {count} steps in all. Allow more"
        + (f", or use {forwards}, which keeps no points." if own.backwards else ".")
    )


def _trajectory(round: Round, target: Target, every: int) -> Scores:
    found = []
    for number, point in enumerate(points(round)):
        if number < len(round):
            found.append(_along(round, point, round.minibatch(number), target_gradient(round, point.params, target)))
    return found


class _Applied(NamedTuple):
    """What the optimiser did at a step: a gradient's factor and scale; and the target's gradient, not scaled."""

    factor: Tensor
    scale: Tensor
    raised: Vector


def _applied(round: Round, before: Point, after: Point, minibatch: Minibatch, target: Target) -> _Applied:
    optimizer, ones = round.recording.optimizer, torch.ones_like(minibatch.records.log_probs)
    gradient = torch.func.grad(lambda free: loss(round, round.named(free), minibatch, ones))(before.params)
    factor = optimizer.settings["lr"] * clip_factor(gradient, round.recording.update.max_grad_norm) / len(ones)
    scale = optimizers.preconditioner(optimizer, after.state)
    return _Applied(factor.detach(), scale, target_gradient(round, before.params, target))


def _optimizer(round: Round, target: Target, every: int) -> Scores:
    found = []
    for number, (before, after) in enumerate(pairwise(point.map(Tensor.detach) for point in points(round))):
        minibatch = round.minibatch(number)
        applied = _applied(round, before, after, minibatch, target)
        found.append(applied.factor * _along(round, before, minibatch, applied.scale * applied.raised))
    return found


def _optimizer_momentum(round: Round, target: Target, every: int) -> Scores:
    optimizer = round.recording.optimizer
    now, first, decay = optimizers.momentum(optimizer)
    found: Scores = [torch.empty(0)] * len(round)
    carried = torch.zeros_like(round.start.params)
    for number, before, after in _backwards(round, every):
        minibatch = round.minibatch(number)
        applied = _applied(round, before, after, minibatch, target)
        own, later = (applied.scale, 1.0) if optimizers.gathers_scaled(optimizer) else (1.0, applied.scale)
        raised = later * applied.raised
        carried = first * raised / optimizers.correction(optimizer, after.state) + decay * carried
        found[number] = applied.factor * _along(round, before, minibatch, own * (carried + now * raised))
    return found


def _backwards(round: Round, every: int) -> Iterator[tuple[int, Point, Point]]:
    """Yield each step with the points before and after it, the last first.

    Points are kept at each `every`-th step and made again in between.
    """
    kept: list[Point] = []
    for number, point in enumerate(points(round)):
        if number % every == 0 and number < len(round):
            kept.append(point.map(Tensor.detach))
        after = point.map(Tensor.detach)
    while kept:
        begin = (len(kept) - 1) * every
        segment = [kept.pop()]
        for number in range(begin, min(begin + every, len(round)) - 1):
            minibatch = round.minibatch(number)
            segment.append(
                step(round, segment[-1], minibatch, torch.ones_like(minibatch.records.log_probs)).map(Tensor.detach)
            )
        while segment:
            before = segment.pop()
            yield begin + len(segment), before, after
            after = before


def _unrolled(round: Round, target: Target, every: int) -> Scores:
    found: Scores = [torch.empty(0)] * len(round)
    adjoint = None
    for number, before, after in _backwards(round, every):
        if adjoint is None:
            adjoint = after.map(torch.zeros_like)._replace(params=target_gradient(round, after.params, target))
        found[number], adjoint = _back(round, before, round.minibatch(number), adjoint)
    return found


def _back(round: Round, point: Point, minibatch: Minibatch, adjoint: Point) -> tuple[Float[Tensor, " b"], Point]:
    """Take the derivative by what a step leads to back to its weights and to where it began."""
    weights = torch.ones_like(minibatch.records.log_probs)
    pull = torch.func.vjp(lambda p, w: step(round, p, minibatch, w), point, weights)[1]
    before, scores = pull(adjoint)
    return scores.detach(), before.map(Tensor.detach)


def _along(round: Round, point: Point, minibatch: Minibatch, direction: Vector) -> Float[Tensor, " b"]:
    """Return each record's derivative of what the round raises along a direction."""
    ones = torch.ones_like(minibatch.records.log_probs)
    along = round.named(direction.detach())
    return along_direction(lambda params: values(round, params, minibatch, ones), round.named(point.params), along)


def target_gradient(round: Round, params: Vector, target: Target) -> Vector:
    """Return the gradient of a target at some parameters; zeros where it depends on none of a tensor's.

    Raises:
        WhenceError: the target depends on no parameter.
    """
    free = {name: p.detach().requires_grad_() for name, p in round.named(params).items()}
    value = target(round.view, free, round.records)
    found = torch.autograd.grad(value, list(free.values()), allow_unused=True) if value.requires_grad else [None]
    if all(gradient is None for gradient in found):
        raise WhenceError(f"The target {name_of(target)} depends on no parameter, so no record can move it.")
    reached = zip(free.items(), found, strict=True)
    return round.laid_out({name: torch.zeros_like(p) if own is None else own for (name, p), own in reached})


SCHEDULED: Mapping[str, Method] = MappingProxyType(
    {
        "trajectory": Method(_trajectory, backwards=False),
        "optimizer": Method(_optimizer, backwards=False),
        "optimizer-momentum": Method(_optimizer_momentum, backwards=True),
        "unrolled": Method(_unrolled, backwards=True),
    }
)
"""Ways to attribute a round along its own schedule."""
