"""Scores along the minibatches and steps that a round took: trajectory, optimiser-aware, unrolled."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from whence.engines.forward import along_direction
from whence.engines.memory import measure_bytes
from whence.errors import WhenceError
from whence.guards import eval_mode, preserve_rng_state
from whence.rounds import optimizers
from whence.rounds.replay import MARGIN, Minibatch, Point, SteppedRound, clip_factor, loss, points, step, values
from whence.targets import Target, target_name

Vector = Float[Tensor, " p"]
"""Something of all parameters, as a `Point` has them."""

Scores = list[Float[Tensor, " b"]]
"""The scores of each step's minibatch."""


Totals = Callable[[], Mapping[str, Float[Tensor, "epochs n"]]]
"""Returns the scores of each record in each epoch, on the CPU, by method."""

TRAJECTORY, OPTIMIZER, MOMENTUM, UNROLLED = "trajectory", "optimizer", "optimizer-momentum", "unrolled"

_WALKED = (TRAJECTORY, OPTIMIZER, MOMENTUM)

SCHEDULED = (*_WALKED, UNROLLED)
"""Ways to attribute a round along its own schedule."""


def snapshot(round: SteppedRound, target: Target) -> Float[Tensor, " n"]:
    """Return `<grad f, grad l_i>` at the policy that collected the round, advantages normalised over all of it."""
    everything = Minibatch(torch.arange(len(round.records)), round.records, round.inputs)
    with preserve_rng_state(), eval_mode(list(round.view.module.modules())), torch.enable_grad():
        return _along(round, round.start, everything, target_gradient(round, round.start.params, target))


class Pass(NamedTuple):
    """Methods that one way along a round's steps serves.

    Attributes:
        methods: by name.
        scores: `scores(round, target, every)`, of each method; of the points, at least each `every`-th is kept where
            that is needed.
        backwards: whether it goes through the steps from the last to the first, and so needs points kept.
    """

    methods: tuple[str, ...]
    scores: Callable[[SteppedRound, Target, int], Mapping[str, Scores]]
    backwards: bool

    def points_held(self, count: int, every: int) -> int:
        """Return the most points that it holds at a time, of a round of `count` steps."""
        # Those kept, a segment, the one after it and the derivative; or the start, before, after and the one to come.
        return math.ceil(count / every) + every + 2 if self.backwards else 4


def passes(methods: Collection[str]) -> list[Pass]:
    """Return what goes along the steps for some of `SCHEDULED`, as seldom as can be."""
    found = []
    if walked := tuple(name for name in _WALKED if name in methods):
        found.append(Pass(walked, partial(_walked, walked), backwards=MOMENTUM in walked))
    if UNROLLED in methods:
        found.append(Pass((UNROLLED,), _unrolled, backwards=True))
    return found


def planned(round: SteppedRound, target: Target, methods: Collection[str], memory: int) -> list[Totals]:
    """Return functions that score a round by some of `SCHEDULED`; before they are called a step is all that is done.

    Raises:
        WhenceError: a method does not fit into `memory` bytes.
    """
    return [partial(_totals, round, target, one, _kept_every(round, target, one, memory)) for one in passes(methods)]


def _totals(round: SteppedRound, target: Target, one: Pass, every: int) -> dict[str, Float[Tensor, "epochs n"]]:
    """Return the scores of each record in each epoch, on the CPU, by method."""
    recording, like = round.recording, round.records.log_probs
    totals = {}
    for method, by_step in one.scores(round, target, every).items():
        own = torch.zeros(max(recording.epochs, default=0) + 1, len(like), dtype=like.dtype)
        for number, scores in enumerate(by_step):
            own[recording.epochs[number]].index_add_(0, recording.steps[number].cpu(), scores.detach().cpu())
        totals[method] = own
    return totals


def _kept_every(round: SteppedRound, target: Target, one: Pass, memory: int) -> int:
    """Return at which steps points are kept, so that as few as possible have to be made again.

    Raises:
        WhenceError: the pass does not fit into `memory` bytes.
    """
    count = len(round)
    if count == 0:
        return 1
    alone = round.of_one_step()
    measured = max(measure_bytes(lambda: one.scores(alone, target, 1)))
    like = round.records.log_probs
    scores = like.itemsize * (sum(map(len, round.recording.steps)) + (max(round.recording.epochs) + 2) * len(like))
    fixed, point = MARGIN * measured + scores * len(one.methods), round.start.nbytes
    # From the root of the steps on, a longer segment takes more than it saves.
    choices = range(1, math.isqrt(count) + 2) if one.backwards else [1]
    for every in choices:
        if fixed + point * one.points_held(count, every) <= memory:
            return every
    held = min(one.points_held(count, every) for every in choices)
    forwards = " or ".join(f"method={name!r}" for name in SCHEDULED if not passes([name])[0].backwards)
    raise WhenceError(
        f"memory is {memory:,} bytes, but scoring round {round.recording.number} by {', '.join(one.methods)} takes "
        f"about {fixed + point * held:,} bytes: {fixed:,} for one step and the scores, {point * held:,} for {held} "
        f"points of parameters and optimiser state, {count} steps in all. Allow more"
        + (f", or use {forwards}, which keeps no points." if one.backwards else ".")
    )


def _walked(methods: Collection[str], round: SteppedRound, target: Target, every: int) -> Mapping[str, Scores]:
    """Return the scores of methods that ask for the target's gradient at every step, which is most of their cost."""
    optimizer = round.recording.optimizer
    carried = torch.zeros_like(round.start.params)
    found: Mapping[str, Scores] = {method: [torch.empty(0)] * len(round) for method in methods}
    for number, before, after in _backwards(round, every) if MOMENTUM in methods else _forwards(round):
        minibatch = round.minibatch(number)
        raised = target_gradient(round, before.params, target)
        if TRAJECTORY in methods:
            found[TRAJECTORY][number] = _along(round, before, minibatch, raised)
        if OPTIMIZER not in methods and MOMENTUM not in methods:
            continue
        factor, scale = _factor(round, before, minibatch), optimizers.preconditioner(optimizer, after.state)
        if OPTIMIZER in methods:
            found[OPTIMIZER][number] = factor * _along(round, before, minibatch, scale * raised)
        if MOMENTUM in methods:
            now, first, decay = optimizers.momentum(optimizer, before.state)
            own, later = (scale, 1.0) if optimizers.gathers_scaled(optimizer) else (1.0, scale)
            raised = later * raised
            carried = raised / optimizers.correction(optimizer, after.state) + decay * carried
            found[MOMENTUM][number] = factor * _along(round, before, minibatch, own * (first * carried + now * raised))
    return found


def _factor(round: SteppedRound, before: Point, minibatch: Minibatch) -> Tensor:
    """Return what a step multiplies each record's gradient by, before the optimiser scales it."""
    ones, recording = torch.ones_like(minibatch.records.log_probs), round.recording
    gradient = torch.func.grad(lambda free: loss(round, round.named(free), minibatch, ones))(before.params)
    clipped = clip_factor(gradient, recording.update.max_grad_norm)
    factor: Tensor = recording.optimizer.settings["lr"] * clipped / len(ones)
    return factor.detach()


def _forwards(round: SteppedRound) -> Iterator[tuple[int, Point, Point]]:
    """Yield each step with the points before and after it."""
    for number, (before, after) in enumerate(pairwise(point.map(Tensor.detach) for point in points(round))):
        yield number, before, after


def _backwards(round: SteppedRound, every: int) -> Iterator[tuple[int, Point, Point]]:
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


def _unrolled(round: SteppedRound, target: Target, every: int) -> Mapping[str, Scores]:
    found: Scores = [torch.empty(0)] * len(round)
    adjoint = None
    for number, before, after in _backwards(round, every):
        if adjoint is None:
            adjoint = after.map(torch.zeros_like)._replace(params=target_gradient(round, after.params, target))
        found[number], adjoint = _back(round, before, round.minibatch(number), adjoint)
    return {UNROLLED: found}


def _back(round: SteppedRound, point: Point, minibatch: Minibatch, adjoint: Point) -> tuple[Float[Tensor, " b"], Point]:
    """Take the derivative by what a step leads to back to its weights and to where it began."""
    weights = torch.ones_like(minibatch.records.log_probs)
    pull = torch.func.vjp(lambda p, w: step(round, p, minibatch, w), point, weights)[1]
    before, scores = pull(adjoint)
    return scores.detach(), before.map(Tensor.detach)


def _along(round: SteppedRound, point: Point, minibatch: Minibatch, direction: Vector) -> Float[Tensor, " b"]:
    """Return each record's derivative of what the round raises along a direction."""
    ones = torch.ones_like(minibatch.records.log_probs)
    along = round.named(direction.detach())
    return along_direction(lambda params: values(round, params, minibatch, ones), round.named(point.params), along)


def target_gradient(round: SteppedRound, params: Vector, target: Target) -> Vector:
    """Return the gradient of a target at some parameters; zeros where it depends on none of a tensor's.

    Raises:
        WhenceError: the target depends on no parameter.
    """
    free = {name: p.detach().requires_grad_() for name, p in round.named(params).items()}
    value = target(round.view, free, round.records)
    found = torch.autograd.grad(value, list(free.values()), allow_unused=True) if value.requires_grad else [None]
    if all(gradient is None for gradient in found):
        raise WhenceError(f"The target {target_name(target)} depends on no parameter, so no record can move it.")
    reached = zip(free.items(), found, strict=True)
    return round.laid_out({name: torch.zeros_like(p) if own is None else own for (name, p), own in reached})
