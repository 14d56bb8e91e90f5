"""What a record does to a round on average: over subsets and orders, and across the edge at which ratios are clipped.

The derivative of one training takes it as given which ratios are clipped at which step. But a record left out moves
others over the edge, where their gradients end; what that does, no derivative of a sharp edge says. Here the derivative
is taken as if the edge had a width, and averaged over trainings on random subsets in random orders: what a sum of
scores can say of a subset of that share. The subsets are of the records that the round trained on, each once an epoch;
all epochs that were asked for are trained, also where `target_kl` ended the round before.

Of a training that a record is in, the derivative says what leaving it out begins to do; of one that it is not in, what
putting it in begins to do. What a record does lies between the two, so both count. But the second may be wild:
advantages are normalised, and one far from the others', put in, moves mean and deviation steeply at first and then
ever less. So each side counts by the inverse of its standard error: between alike, which is best where the two differ
in what they say, and by the inverse of the variance, which is best where they differ in noise alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import softplus

from whence.engines.memory import measure_bytes
from whence.errors import WhenceError
from whence.objectives import Objective, PPOClip
from whence.policies import Outputs
from whence.records import RecordBatch
from whence.rounds.replay import MARGIN, Point, SteppedRound, step
from whence.rounds.schedule import Totals, target_gradient
from whence.targets import Target

SMOOTHED = "smoothed"

DRAWS = 16
"""Trainings that are averaged."""

SHARE = 0.5
"""Of the records, in each of them, where no other is asked for."""

WIDTH = 0.25
"""Of the edge, as a share of the clip range."""


@dataclass(frozen=True)
class SoftClip(PPOClip):
    """PPO's clipped objective with an edge of some width: past it a record's gradient fades and does not end.

    Where the sharp one multiplies the ratio's gradient by 1 inside and 0 outside, this one multiplies it by
    `sigmoid((1 + eps - rho) / width)` for positive advantages and `sigmoid((rho - 1 + eps) / width)` for negative ones.

    Attributes:
        width: of the edge, in units of the ratio.
    """

    width: float = 0.05

    def __call__(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return the objective of each record, (n,), up to a constant."""
        ratio = (outputs.log_prob - records.log_probs).exp()
        above = -self.width * softplus((1 + self.clip_range - ratio) / self.width)
        below = self.width * softplus((ratio - 1 + self.clip_range) / self.width)
        surrogate = records.advantages * torch.where(records.advantages > 0, above, below)
        return self._with_further_terms(surrogate, outputs, records)


def softened(objective: Objective, width: float = WIDTH) -> Objective:
    """Return PPO's objective with an edge of `width` times the clip range; of width 0, or another one, as it is."""
    if type(objective) is not PPOClip or width == 0:
        return objective
    return SoftClip(**vars(objective), width=width * objective.clip_range)


@dataclass(frozen=True, eq=False)
class Draws:
    """Trainings side by side: what each record weighs in each, (m, n), and the minibatches of each, (m, b) a step."""

    weights: Float[Tensor, "m n"]
    steps: Sequence[Int[Tensor, "m b"]]
    epochs: Sequence[int]


def drawn(round: SteppedRound, count: int, share: float, generator: torch.Generator) -> Draws:
    """Draw subsets, and orders in which minibatches hold as many of their records as the round's own did.

    A trailing minibatch of less than a quarter of that joins its predecessor.

    Args:
        round: from `opened`, of at least one step.
        count: trainings.
        share: of the records that the round trained on, in each.
        generator: of subsets and orders.
    """
    trained = round.recording.trained
    n, like, update = len(trained), round.records.log_probs, round.recording.update
    kept = min(n, max(2, int(share * n)))
    size = n if update.batch_size is None else update.batch_size * n // kept
    weights = torch.zeros(count, len(round.records), dtype=like.dtype)
    for row in weights:
        row[trained[torch.randperm(n, generator=generator)[:kept]]] = 1.0
    steps: list[Tensor] = []
    epochs: list[int] = []
    for epoch in range(update.n_epochs):
        orders = torch.empty(count, n, dtype=torch.int64)
        for row in orders:
            row[:] = trained[torch.randperm(n, generator=generator)]
        parts = list(orders.to(like.device).split(size, dim=1))
        # Of few positions just one may weigh something, and a step on one record goes by its raw advantage.
        if len(parts) > 1 and 4 * parts[-1].shape[1] < size:
            parts[-2:] = [torch.cat(parts[-2:], dim=1)]
        steps += parts
        epochs += [epoch] * len(parts)
    return Draws(weights.to(like), steps, epochs)


def _seeded(seed: int) -> torch.Generator:
    # By a name of its own: of a seed alone, `whence.counterfactual.subsets` draws the very halves that are to test it.
    drawn = np.random.SeedSequence([seed, *b"smoothed"]).generate_state(1)
    return torch.Generator().manual_seed(int(drawn[0]))


def planned(
    round: SteppedRound, target: Target, memory: int, *, draws: int = DRAWS, share: float = SHARE, seed: int = 0
) -> Totals:
    """Return a function that scores a round by "smoothed"; before it is called a step is all that is done.

    Its scores are means over trainings of the derivative of the target by each record's weight: the mean over those
    that the record is in, and over those that it is not in, each weighed by the inverse of its standard error.

    Args:
        round: from `opened`.
        target: what is raised.
        memory: bytes that may be held at a time; the trainings go side by side as far as it allows.
        draws: trainings.
        share: of the records, in each.
        seed: of subsets and orders, at least 0.

    Raises:
        WhenceError: no draw, a share of nothing, a negative seed, or one training alone does not fit into `memory`.
    """
    if draws < 1 or seed < 0 or not 0 < share <= 1:
        raise WhenceError(
            f"draws is {draws}, share {share} and seed {seed}; at least 1 training, a share above 0 and at most 1, and "
            "a seed from 0 on are needed."
        )
    if len(round) == 0:  # a round that was not trained on
        return lambda: {SMOOTHED: torch.zeros(1, len(round.records), dtype=round.records.log_probs.dtype)}
    single = drawn(round, 1, share, _seeded(seed))  # what all are like, before any more is made
    count, of_epochs = len(single.steps), single.weights.nbytes * round.recording.update.n_epochs
    every = max(1, math.isqrt(count))
    held = math.ceil(count / every) + every + 2
    one_step = replace(single, steps=single.steps[:1], epochs=[0])
    step = MARGIN * max(measure_bytes(lambda: derivatives(round, one_step, target, 1)))
    alone = step + held * round.start.nbytes + 2 * of_epochs  # scores, and the weights along the steps
    everything = draws * (single.weights.nbytes + sum(part.nbytes for part in single.steps)) + 3 * of_epochs
    if (needed := everything + alone) > memory:
        raise WhenceError(
            f"memory is {memory:,} bytes, but scoring round {round.recording.number} by smoothed takes about "
            f"{needed:,} bytes: {step:,} for a step of one training, {everything:,} for subsets and orders of {draws} "
            f"and for the scores, the rest for {held} points of parameters and optimiser state. Allow more, take fewer "
            "draws, or use method='optimizer', which keeps no points."
        )
    at_once = (memory - everything) // alone
    return lambda: {SMOOTHED: averaged(round, target, drawn(round, draws, share, _seeded(seed)), every, at_once)}


def averaged(
    round: SteppedRound, target: Target, made: Draws, every: int, at_once: int, width: float = WIDTH
) -> Float[Tensor, "epochs n"]:
    """Return the mean of what `derivatives` makes of the draws, `at_once` at a time, on the CPU; see `planned`."""
    like, epochs = made.weights, made.epochs[-1] + 1
    trained = torch.zeros_like(like[0], dtype=torch.bool)
    trained[round.recording.trained.to(like.device)] = True
    counts, squares = like.new_zeros(2, like.shape[1]), like.new_zeros(2, like.shape[1])
    totals = like.new_zeros(2, epochs, like.shape[1])
    for first in range(0, len(like), at_once):
        own = slice(first, first + at_once)
        part = Draws(like[own], [positions[own] for positions in made.steps], made.epochs)
        found, inside = derivatives(round, part, target, every, width), part.weights > 0
        for side, those in enumerate((inside, trained & ~inside)):
            counts[side] += those.sum(dim=0)
            totals[side] += torch.einsum("emn,mn->en", found, those.to(found))
            squares[side] += ((found.sum(dim=0) * those) ** 2).sum(dim=0)
    return _weighed(counts, totals, squares).cpu()


def _weighed(
    counts: Float[Tensor, "2 n"], totals: Float[Tensor, "2 epochs n"], squares: Float[Tensor, "2 n"]
) -> Float[Tensor, "epochs n"]:
    """Return the mean over both sides, each weighed by the inverse of its standard error.

    Args:
        counts: trainings that a record was in, and that it was not in.
        totals: of its derivatives there, by epoch.
        squares: of its derivatives there, all epochs together, summed.
    """
    means = totals / counts.clamp(min=1)[:, None]
    several = counts > 1
    error = (squares - counts * means.sum(dim=1) ** 2) / (counts * (counts - 1)).clamp(min=1)
    noise = (error * several).sum(dim=1) / several.sum(dim=1)
    told = bool((several.any(dim=1) & (noise > 0)).all())
    weights = (noise.rsqrt() if told else torch.ones_like(noise))[:, None] * (counts > 0)
    share = weights / weights.sum(dim=0).clamp(min=torch.finfo(weights.dtype).tiny)
    return (share[:, None] * means).sum(dim=0)


def derivatives(
    round: SteppedRound, draws: Draws, target: Target, every: int, width: float = WIDTH
) -> Float[Tensor, "epochs m n"]:
    """Return the derivative of the target at the end by each record's weight, by epoch and draw.

    Args:
        round: from `opened`.
        draws: from `drawn`.
        target: what is raised.
        every: points are kept at each such step, and made again between.
        width: of the edge, as a share of the clip range.
    """
    soft = replace(round, objective=softened(round.objective, width))
    count = len(draws.weights)

    def one(through: SteppedRound, point: Point, positions: Int[Tensor, " b"], weights: Float[Tensor, " b"]) -> Point:
        return step(through, point, through.at(positions), weights)

    def back(
        point: Point, positions: Int[Tensor, " b"], weights: Float[Tensor, " b"], adjoint: Point
    ) -> tuple[Point, Tensor]:
        pull = torch.func.vjp(lambda p, w: one(soft, p, positions, w), point, weights)[1]
        found: tuple[Point, Tensor] = pull(adjoint)
        return found

    forward = torch.vmap(lambda point, positions, weights: one(round, point, positions, weights))
    backward = torch.vmap(back)
    own = [draws.weights.gather(1, positions) for positions in draws.steps]
    kept: dict[int, Point] = {}
    with torch.no_grad():
        point = round.start.spread(count)
        for number, positions in enumerate(draws.steps):
            if number % every == 0:
                kept[number] = point
            point = forward(point, positions, own[number])
    # One by one, since a target of the user's may do what no batch of functions can.
    raised = torch.stack([target_gradient(round, params, target) for params in point.params])
    adjoint = point.map(torch.zeros_like)._replace(params=raised)
    found = torch.zeros(max(draws.epochs) + 1, *draws.weights.shape).to(draws.weights)
    for begin in sorted(kept, reverse=True):
        segment = [kept.pop(begin)]
        with torch.no_grad():
            for number in range(begin, min(begin + every, len(draws.steps)) - 1):
                segment.append(forward(segment[-1], draws.steps[number], own[number]))
        while segment:
            number = begin + len(segment) - 1
            adjoint, scores = backward(segment.pop(), draws.steps[number], own[number], adjoint)
            found[draws.epochs[number]].scatter_add_(1, draws.steps[number], scores.detach())
            adjoint = adjoint.map(torch.Tensor.detach)
    return found
