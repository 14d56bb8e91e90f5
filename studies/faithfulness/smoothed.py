"""Smoothed scores: the derivative averaged over subsets and orders, across the edge of the clip range.

The derivative of one training takes the set of clipped ratios at each step as fixed. But leaving a record out moves
others past the edge, where their gradients end, and no derivative of a sharp edge shows that effect. Here the
derivative is taken as if the edge had a width, and averaged over trainings on random subsets in random orders: this is
what a sum of scores can predict for a subset of that share. The subsets are of the records that the round trained on,
each once an epoch. All `n_epochs` are trained, even if `target_kl` ended the round early.

For trainings that contain the record, the derivative estimates the effect of removing it; for the others, of adding it.
The record's effect lies between the two, so both count. But the second can be large and noisy: advantages are
normalised, and an advantage far from the others moves mean and deviation steeply at first and then ever less. So each
side is weighed by the inverse of its standard error. That lies between equal weights, which are best if the two sides
differ in their means, and inverse variances, which are best if they differ only in their noise.

Under Adam derivatives have heavy tails, so that a few of them settle a plain mean. A side's average is the mean of its
middle half. How much a side weighs is still settled by the error of its plain mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import softplus

from whence.core import Objective, Outputs, PPOClip, RecordBatch, Target, eval_mode, preserve_rng_state
from whence.engines import measure_bytes
from whence.lab.rounds import MARGIN, Point, SteppedRound, check_target, open_round, raise_on_divergence, step
from whence.lab.rounds.replay import pull_back, target_gradient
from whence.rounds import RoundRecording

DRAWS = 64
"""The number of trainings that are averaged; results/faithfulness compares numbers, and means."""

SHARE = 0.5
"""The share of the records that each of them keeps."""

TRIM = 0.25
"""The share of the lowest and of the highest derivatives of a side that do not count."""

WIDTH = 0.25
"""The width of the edge, as a share of the clip range."""


@dataclass(frozen=True)
class SoftClip(PPOClip):
    """PPO's clipped objective with an edge of some width: past it a record's gradient fades instead of ending.

    Where the sharp objective multiplies the ratio's gradient by 1 inside and 0 outside, this one multiplies it by
    `sigmoid((1 + eps - rho) / width)` for positive advantages and `sigmoid((rho - 1 + eps) / width)` for negative ones.

    Attributes:
        width: the width of the edge, in units of the ratio.
    """

    width: float = 0.05

    def __call__(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return the objective of each record, (n,), up to a constant."""
        ratio = (outputs.log_prob - records.log_probs).exp()
        above = -self.width * softplus((1 + self.clip_range - ratio) / self.width)
        below = self.width * softplus((ratio - 1 + self.clip_range) / self.width)
        surrogate = records.advantages * torch.where(records.advantages > 0, above, below)
        return self._add_entropy_and_value(surrogate, outputs, records)


def soften(objective: Objective, width: float = WIDTH) -> Objective:
    """Return PPO's objective with an edge of `width` times the clip range; with width 0, or any other, as it is."""
    if type(objective) is not PPOClip or width * objective.clip_range == 0:
        return objective
    return SoftClip(**vars(objective), width=width * objective.clip_range)


class Draws(NamedTuple):
    """Random trainings, side by side.

    Attributes:
        weights: (m, n) the weight of each record in each training.
        steps: for each step, (m, b) positions of each training's minibatch.
        epochs: the epoch of each step, from 0.
    """

    weights: Float[Tensor, "m n"]
    steps: Sequence[Int[Tensor, "m b"]]
    epochs: Sequence[int]

    def take(self, chosen: slice) -> "Draws":
        """Return some of the trainings."""
        return Draws(self.weights[chosen], [positions[chosen] for positions in self.steps], self.epochs)


def draw_trainings(round: SteppedRound, count: int, share: float, seed: int) -> Draws:
    """Draw subsets and orders, in minibatches that hold as many of a subset's records as the round's own did.

    A trailing minibatch of less than a quarter of that joins its predecessor.
    """
    # Seeded apart: from the same seed, `whence.lab.rounds.draw_subsets` draws the subsets that test these scores.
    state = np.random.SeedSequence([seed, *b"smoothed"]).generate_state(1)
    generator = torch.Generator().manual_seed(int(state[0]))
    n, like, update = len(round.records), round.records.log_probs, round.recording.update
    subset_size = min(n, max(2, int(share * n)))
    size = n if update.batch_size is None else update.batch_size * n // subset_size
    weights = torch.zeros(count, n, dtype=like.dtype)
    for row in weights:
        row[torch.randperm(n, generator=generator)[:subset_size]] = 1.0
    steps: list[Tensor] = []
    epochs: list[int] = []
    for epoch in range(update.n_epochs):
        orders = torch.stack([torch.randperm(n, generator=generator) for _ in range(count)])
        parts = list(orders.to(like.device).split(size, dim=1))
        # Among few positions just one may have a weight, and a step on one record uses its raw advantage.
        if len(parts) > 1 and 4 * parts[-1].shape[1] < size:
            parts[-2:] = [torch.cat(parts[-2:], dim=1)]
        steps += parts
        epochs += [epoch] * len(parts)
    return Draws(weights.to(like), steps, epochs)


def score_smoothed(
    policy: object,
    recording: RoundRecording,
    *,
    target: Target,
    draws: int = DRAWS,
    seed: int = 0,
    memory: int = 2**31,
) -> Float[Tensor, " n"]:
    """Return the scores of the records of a round of plain PPO, (n,), on the CPU.

    The scores average the derivative of the target by each record's weight: the mean over the trainings that contain
    the record, and the mean over the others, each weighed by the inverse of its standard error.
    """
    round = open_round(policy, recording)
    with preserve_rng_state(), eval_mode(list(round.view.module.modules())), raise_on_divergence(round):
        return average_sides(*draw_derivatives(round, check_target(target, round), draws, seed, memory), TRIM)


def draw_derivatives(
    round: SteppedRound, target: Target, count: int, seed: int, memory: int = 2**31
) -> tuple[Float[Tensor, "m n"], Bool[Tensor, "2 m n"]]:
    """Return the target's derivative by each record's weight in random trainings, and which have it, and which lack it.

    As many trainings as fit into `memory` bytes run side by side, at least one.
    """
    draws = draw_trainings(round, count, SHARE, seed)
    steps = len(draws.steps)
    interval = max(1, math.isqrt(steps))
    points = math.ceil(steps / interval) + interval + 2
    one_step = Draws(draws.weights[:1], [draws.steps[0][:1]], [0])
    step_bytes = MARGIN * max(measure_bytes(lambda: derivatives(round, one_step, target, 1)))
    # A training has a point and a step in memory, and twice its scores: the weights along the steps are as many.
    scores = draws.weights[0].nbytes * round.recording.update.n_epochs
    at_once = max(1, memory // (step_bytes + points * round.start.nbytes + 2 * scores))
    parts = [
        derivatives(round, draws.take(slice(first, first + at_once)), target, interval).sum(dim=0).cpu()
        for first in range(0, count, at_once)
    ]
    inside = draws.weights.cpu() > 0
    return torch.cat(parts), torch.stack((inside, ~inside))


def average_sides(values: Float[Tensor, "m n"], sides: Bool[Tensor, "2 m n"], trim: float) -> Float[Tensor, " n"]:
    """Return the mean over both sides, the trainings with a record and those without, by their inverse errors.

    Args:
        values: the record's derivatives.
        sides: which trainings are on which side.
        trim: the share of a side's values, the lowest and the highest, that do not count; 0: the mean, 0.5: the median.
    """
    means, errors = zip(*(average_trimmed(values, side, trim) for side in sides), strict=True)
    counts = sides.sum(dim=1)
    noise = torch.stack([error[count > 1].mean() for error, count in zip(errors, counts, strict=True)])
    measurable = bool((noise > 0).all())  # not of NaN, the mean of nothing
    weights = (noise.rsqrt() if measurable else torch.ones_like(noise))[:, None] * (counts > 0)
    share = weights / weights.sum(dim=0).clamp(min=torch.finfo(weights.dtype).tiny)
    return (share * torch.stack(means)).sum(dim=0)


def average_trimmed(
    values: Float[Tensor, "m n"], side: Bool[Tensor, "m n"], trim: float
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return the trimmed mean of each column's chosen values, and the squared standard error of their plain mean."""
    counts = side.sum(dim=0)
    ordered = torch.where(side, values, torch.inf).sort(dim=0).values
    cut = torch.minimum((trim * counts).long(), (counts - 1).clamp(min=0) // 2)
    place = torch.arange(len(values))[:, None]
    within = (place >= cut) & (place < counts - cut)
    means = ordered.where(within, 0).sum(dim=0) / within.sum(dim=0).clamp(min=1)
    plain = values.where(side, 0).sum(dim=0) / counts.clamp(min=1)
    squares = ((values - plain) ** 2).where(side, 0).sum(dim=0)
    return means, squares / (counts * (counts - 1)).clamp(min=1)


def derivatives(
    round: SteppedRound, draws: Draws, target: Target, interval: int, width: float = WIDTH
) -> Float[Tensor, "epochs m n"]:
    """Return the derivative of the target at the end by each record's weight, by epoch and draw.

    The point before every `interval`-th step is stored; those in between are computed again.
    """
    soft = replace(round, objective=soften(round.objective, width))
    count = len(draws.weights)
    forward = torch.vmap(lambda point, at, weights: step(round, point, round.minibatch_at(at), weights))
    backward = torch.vmap(lambda point, at, *rest: pull_back(soft, point, soft.minibatch_at(at), *rest))
    step_weights = [draws.weights.gather(1, positions) for positions in draws.steps]
    stored: dict[int, Point] = {}
    with torch.no_grad():
        point = round.start.expand(count)
        for number, positions in enumerate(draws.steps):
            if number % interval == 0:
                stored[number] = point
            point = forward(point, positions, step_weights[number])
    # One by one, since a user's target may do what cannot be batched.
    gradients = torch.stack([target_gradient(round, params, target) for params in point.params])
    adjoint = point.map(torch.zeros_like)._replace(params=gradients)
    by_epoch = torch.zeros(max(draws.epochs) + 1, *draws.weights.shape).to(draws.weights)
    for begin in sorted(stored, reverse=True):
        segment = [stored.pop(begin)]
        with torch.no_grad():
            for number in range(begin, min(begin + interval, len(draws.steps)) - 1):
                segment.append(forward(segment[-1], draws.steps[number], step_weights[number]))
        while segment:
            number = begin + len(segment) - 1
            adjoint, scores = backward(segment.pop(), draws.steps[number], step_weights[number], adjoint)
            by_epoch[draws.epochs[number]].scatter_add_(1, draws.steps[number], scores.detach())
            adjoint = adjoint.map(torch.Tensor.detach)
    return by_epoch
