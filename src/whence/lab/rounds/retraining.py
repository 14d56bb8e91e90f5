"""Many trainings of one recorded round, each without some of its records, and how well scores predict them."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TypeAlias

import numpy as np
import scipy
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from whence.core import WhenceError, eval_mode, preserve_rng_state
from whence.engines import measure_bytes
from whence.lab.rounds.replay import (
    MARGIN,
    Point,
    SteppedRound,
    check_finite,
    check_weights,
    open_round,
    raise_on_divergence,
    step,
)
from whence.rounds import RoundRecording

Orders: TypeAlias = Sequence[Int[Tensor, "m b"]]
"""For each step, the positions of each training's minibatch; shorter ones are padded with `NOBODY`."""

NOBODY = -1
"""The position that stands for no record, where a minibatch is padded."""


def draw_subsets(n: int, share: float, count: int, generator: torch.Generator) -> Bool[Tensor, "count n"]:
    """Draw subsets of exactly `floor(share * n)` records, as masks of the records that are kept.

    Args:
        n: the number of records.
        share: the share of the records to keep, above 0 and at most 1.
        count: the number of subsets.
        generator: draws the subsets.

    Raises:
        WhenceError: fewer than two records would be kept, or `count` is below 1.
    """
    size = int(share * n) if 0 < share <= 1 else 0
    if size < 2 or count < 1:
        raise WhenceError(
            f"count is {count} and share {share}, of {n} records; at least one subset of at least two records is "
            "needed, with a share above 0 and at most 1."
        )
    masks = torch.zeros(count, n, dtype=torch.bool)
    for mask in masks:
        mask[torch.randperm(n, generator=generator)[:size]] = True
    return masks


def reshuffle(kept: Bool[Tensor, "m n"], batch_size: int, n_epochs: int, generator: torch.Generator) -> Orders:
    """Draw each subset's minibatches as selection does: each epoch is a permutation of all records, filtered and cut.

    A trailing minibatch of one record joins its predecessor. Subsets may be of different sizes.

    Args:
        kept: (m, n) which records each subset keeps.
        batch_size: the number of records in a minibatch.
        n_epochs: the number of passes over the records.
        generator: draws the permutations; all subsets share them.

    Returns:
        For each step, the positions that each subset trains on, padded with `NOBODY`; a row of these alone is no step.
    """
    orders: list[Tensor] = []
    for _ in range(n_epochs):
        permutation = torch.randperm(kept.shape[1], generator=generator)
        epoch = [_cut_minibatches(permutation[mask[permutation]], batch_size) for mask in kept]
        steps = zip_longest(*epoch, fillvalue=permutation[:0])
        orders += [pad_sequence(list(rows), batch_first=True, padding_value=NOBODY) for rows in steps]
    return orders


def _cut_minibatches(positions: Int[Tensor, " k"], batch_size: int) -> list[Int[Tensor, " b"]]:
    parts = list(positions.split(batch_size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def retrain(
    policy: object,
    recording: RoundRecording,
    kept: Tensor,
    *,
    orders: Orders | None = None,
    memory: int = 2**31,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Train a recorded round once for each subset of its records, side by side, and return the parameters.

    Without `orders`, every training follows the recorded minibatches and leaves the dropped records out of them, with
    all else equal; a minibatch whose records are all dropped is no step. With `orders` of `reshuffle`, the kept records
    are shuffled into full minibatches again, as a selection rule does. A round that `target_kl` ended early ends at the
    same step without `orders`; with them, all their steps are trained.

    Args:
        policy: the policy that was trained, or one built like it; it is left as it is.
        recording: the recorded round.
        kept: (m, n) which records each training keeps, or how often; see `whence.rounds.check_weights`.
        orders: the minibatches of each training; None: the recorded ones.
        memory: bytes that training may hold at a time, besides the policy, the records and the results. As many
            trainings as fit run side by side, and at least one.
        dtype: the dtype to compute in; None: the recorded one.

    Returns:
        The trained parameters by name, each (m, ...), on the policy's device.

    Raises:
        NonFinite: a training diverged.
        WhenceError: a subset keeps fewer than two records (without `orders`, of those that the round trained on) or is
            of another round; or see `whence.rounds.check_weights`.
    """
    round = open_round(policy, recording, dtype=dtype)
    n = len(round.records)
    if kept.ndim != 2 or kept.shape[1] != n or len(kept) == 0:
        raise WhenceError(f"kept has shape {tuple(kept.shape)}; (m, {n}) is needed, a row for each training.")
    weights = check_weights(kept, round, reshuffled=orders is not None)
    trained = round.start.params.new_empty(len(weights), len(round.start.params))
    with preserve_rng_state(), eval_mode(list(round.view.module.modules())), torch.no_grad():
        at_once = _count_side_by_side(round, weights, orders, memory)
        for first in range(0, len(weights), at_once):
            chosen = slice(first, first + at_once)
            part = None if orders is None else [positions[chosen] for positions in orders]
            with raise_on_divergence(round):
                trained[chosen] = _train_side_by_side(round, weights[chosen], part)
    check_finite(trained, round)
    return {name: tensor.contiguous() for name, tensor in round.unflatten(trained).items()}


def _count_side_by_side(round: SteppedRound, weights: Float[Tensor, "m n"], orders: Orders | None, memory: int) -> int:
    """Return how many trainings fit into `memory` bytes side by side, by a step of one and of two; at least 1."""
    if len(round if orders is None else orders) == 0:
        return len(weights)
    measured = round.reduce_to_largest_step() if orders is None else round
    largest = None if orders is None else max(orders, key=lambda positions: positions.shape[1])

    def measure(trainings: int) -> int:
        step_orders = None if largest is None else [largest[:1].expand(trainings, -1)]
        peaks = measure_bytes(lambda: _train_side_by_side(measured, weights[:1].expand(trainings, -1), step_orders))
        return MARGIN * (max(peaks) + trainings * round.start.nbytes)  # the points before the step are there as well

    one = measure(1)
    another = max(1, measure(2) - one)
    return min(len(weights), max(1, 1 + (memory - one) // another))


def _train_side_by_side(
    round: SteppedRound, weights: Float[Tensor, "m n"], orders: Orders | None
) -> Float[Tensor, "m p"]:
    point = round.start.expand(len(weights))

    if orders is not None:  # the last column is the weight of `NOBODY`
        weights = torch.cat([weights, weights.new_zeros(len(weights), 1)], dim=1)

    def step_one(point: Point, positions: Int[Tensor, " b"], weights: Float[Tensor, " weighed"]) -> Point:
        return step(round, point, round.minibatch_at(positions), weights[positions])

    step_all = torch.vmap(step_one, in_dims=(0, None if orders is None else 0, 0))
    for positions in round.recording.steps if orders is None else orders:
        point = step_all(point, positions.to(weights.device), weights)
    return point.params


def compute_lds(predictions: Float[np.ndarray, " m"], outcomes: Float[np.ndarray, " m"]) -> Mapping[str, float | None]:
    """Return the linear datamodelling score: Spearman's correlation of prediction and outcome over subsets.

    Args:
        predictions: (m,) the prediction for each subset: the sum of its records' scores.
        outcomes: (m,) the outcome of training on each subset.

    Returns:
        "lds", and "low" and "high" of its 95% interval by the percentile bootstrap over subsets, 1,000 resamples that
        are always the same; all None if all predictions or all outcomes are equal.

    Raises:
        WhenceError: there are fewer than three subsets, shapes differ, or a number is not finite.
    """
    if predictions.shape != outcomes.shape or predictions.ndim != 1 or len(outcomes) < 3:
        raise WhenceError(
            f"predictions have shape {predictions.shape} and outcomes {outcomes.shape}; both need (m,), m at least 3."
        )
    if not (np.isfinite(predictions).all() and np.isfinite(outcomes).all()):
        raise WhenceError("A prediction or an outcome is not finite, and has no rank: leave that subset out.")
    if np.ptp(predictions) == 0 or np.ptp(outcomes) == 0:
        return {"lds": None, "low": None, "high": None}
    resampled = np.random.default_rng(0).integers(len(outcomes), size=(1000, len(outcomes)))
    # Every resample is ranked by itself, with ties shared: Pearson's correlation of these ranks is Spearman's.
    ranks = scipy.stats.rankdata(predictions[resampled], axis=1), scipy.stats.rankdata(outcomes[resampled], axis=1)
    centred = [one - one.mean(axis=1, keepdims=True) for one in ranks]
    with np.errstate(invalid="ignore"):
        correlations = (centred[0] * centred[1]).sum(1) / np.sqrt((centred[0] ** 2).sum(1) * (centred[1] ** 2).sum(1))
    low, high = np.nanquantile(correlations, [0.025, 0.975]).tolist()
    return {"lds": float(scipy.stats.spearmanr(predictions, outcomes).statistic), "low": low, "high": high}
