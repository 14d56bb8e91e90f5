"""The scores of a round that are compared, by every method."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from studies.faithfulness.smoothed import soften
from whence.core import BatchTarget, RecordBatch, Target, label_units
from whence.lab.rounds import (
    METHODS,
    Point,
    SteppedRound,
    attribute_round,
    check_target,
    open_round,
    snapshot_scores,
    step,
)
from whence.lab.rounds.optimizers import preconditioner
from whence.lab.rounds.replay import clip_factor, minibatch_loss, pull_back, target_gradient
from whence.lab.rules import compute_td_errors
from whence.rounds import RoundRecording
from whence.scores.folds import PartialTarget, check_batch_target

FOLDS = 2
"""The number of parts into which "crossfit" splits episodes."""

FIRST_STEPS = 16
"""The number of the round's own steps after which "metric, first steps" takes Adam's metric."""

METRIC_ORDERS = 2
"""The number of orders whose minibatches make the metric of "metric, orders"."""


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


def list_cheap_scores(
    policy: object, recording: RoundRecording, *, target: Target, seed: int = 0, dtype: torch.dtype | None = None
) -> Mapping[str, Callable[[], Float[Tensor, " n"]]]:
    """Return functions that score the records of a round of Adam, at the cost of two snapshots at most.

    `(theta, v)` is the product of each record's gradient at the parameters theta with a vector, advantages normalised
    over the round and without the value term. "First" and "last" are the round's parameters, f' the target's gradient
    at them. Adam's metric is `1 / (sqrt(v_hat) + eps)`, of its state before the round unless another is named.

    - "snapshot": `(first, f' first)`. "last": `(last, f' last)`. "two ends": the mean of both.
    - "metric": f' times the metric. "last metric": of the state after the round. "first steps": of the state after
      `FIRST_STEPS` steps of it. "orders": of the mean square of the clipped gradients of all minibatches of
      `METRIC_ORDERS` orders, at the first parameters.
    - "target's end": the mean of `(first, f' last)` and `(last, f' last)`: the target moves from its last value.
    - "soft edge": at the last parameters the edge of the clip range has the width of `smoothed`.
    - "one step": the derivative of a step of Adam on all records at once, times f', by each record's weight. It has
      what normalisation of advantages, clipping and the value term make of a weight.

    The round is replayed once to know its end. A function's time is that of its score.
    """
    full = open_round(policy, recording, dtype=dtype)
    round = open_round(policy, replace(recording, update=replace(recording.update, vf_coef=0.0)), dtype=dtype)
    soft, first = replace(round, objective=soften(round.objective)), round.start
    target = check_target(target, round)
    last = _walk(full, len(full))

    def gradient(point: Point) -> Tensor:
        return target_gradient(round, point.params, target)

    def product(point: Point, vector: Tensor, round: SteppedRound = round) -> Tensor:
        at = replace(round, start=round.start._replace(params=point.params))
        return snapshot_scores(at, lambda view, params, records: round.flatten(params) @ vector)

    def metric(point: Point) -> Tensor:
        return preconditioner(recording.optimizer, point.state)

    def two_ends(scale: Tensor | float = 1.0, late: SteppedRound = round) -> Tensor:
        return (product(first, scale * gradient(first)) + product(last, scale * gradient(last), late)) / 2

    def to_the_end(scale: Tensor | float = 1.0, late: SteppedRound = round) -> Tensor:
        ascent = scale * gradient(last)
        return (product(first, ascent) + product(last, ascent, late)) / 2

    return {
        "snapshot": lambda: product(first, gradient(first)),
        "metric": lambda: product(first, metric(first) * gradient(first)),
        "metric, first steps": lambda: product(first, metric(_walk(full, FIRST_STEPS)) * gradient(first)),
        "metric, orders": lambda: product(first, _metric_of_orders(full, seed) * gradient(first)),
        "one step": lambda: _differentiate_one_step(full, gradient(first)),
        "last": lambda: product(last, gradient(last)),
        "last, soft edge": lambda: product(last, gradient(last), soft),
        "last, last metric": lambda: product(last, metric(last) * gradient(last)),
        "last, last metric, soft edge": lambda: product(last, metric(last) * gradient(last), soft),
        "two ends": two_ends,
        "two ends, metric": lambda: two_ends(metric(first)),
        "two ends, last metric": lambda: two_ends(metric(last)),
        "two ends, soft edge": lambda: two_ends(late=soft),
        "two ends, last metric, soft edge": lambda: two_ends(metric(last), soft),
        "target's end": to_the_end,
        "target's end, last metric, soft edge": lambda: to_the_end(metric(last), soft),
    }


def _walk(round: SteppedRound, count: int) -> Point:
    """Return the point after the first steps of a round, or after all, if they are fewer."""
    point = round.start
    for number in range(min(count, len(round))):
        minibatch = round.minibatch(number)
        point = step(round, point, minibatch, torch.ones_like(minibatch.records.log_probs)).map(Tensor.detach)
    return point


def _metric_of_orders(round: SteppedRound, seed: int) -> Float[Tensor, " p"]:
    # Seeded apart from the subsets and orders that test the score.
    state = np.random.SeedSequence([seed, *b"metric"]).generate_state(1)
    n, update, generator = len(round.records), round.recording.update, torch.Generator().manual_seed(int(state[0]))
    squares = []
    for _ in range(METRIC_ORDERS):
        for positions in torch.randperm(n, generator=generator).split(update.batch_size or n):
            minibatch = round.minibatch_at(positions.to(round.records.log_probs.device))
            ones = torch.ones_like(minibatch.records.log_probs)
            gradient = torch.func.grad(lambda p, *rest: minibatch_loss(round, round.unflatten(p), *rest))(
                round.start.params, minibatch, ones
            )
            squares.append((gradient * clip_factor(gradient, update.max_grad_norm)) ** 2)
    eps: float = round.recording.optimizer.settings["eps"]
    return (torch.stack(squares).mean(dim=0).sqrt() + eps).reciprocal()


def _differentiate_one_step(round: SteppedRound, ascent: Float[Tensor, " p"]) -> Float[Tensor, " n"]:
    everyone = round.minibatch_at(torch.arange(len(round.records), device=ascent.device))
    adjoint = round.start.map(torch.zeros_like)._replace(params=ascent)
    return pull_back(round, round.start, everyone, torch.ones_like(everyone.records.log_probs), adjoint)[1].detach()
