"""Many trainings of one recorded round at once, each without some of its records."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from whence.engines.memory import measure_bytes
from whence.errors import WhenceError
from whence.guards import eval_mode, preserve_rng_state
from whence.rounds.recording import RoundRecording
from whence.rounds.replay import (
    MARGIN,
    Point,
    SteppedRound,
    check_finite,
    check_weights,
    open_round,
    raise_on_divergence,
    step,
)

Orders: TypeAlias = Sequence[Int[Tensor, "m b"]]
"""For each step, the positions of each training's minibatch; a shorter one is filled up with `NOBODY`."""

NOBODY = -1
"""A place in a minibatch that no record takes."""


def draw_subsets(n: int, share: float, count: int, generator: torch.Generator) -> Bool[Tensor, "count n"]:
    """Draw subsets of exactly `floor(share * n)` records, as masks of what is kept.

    Args:
        n: records.
        share: to keep, above 0 and at most 1.
        count: subsets.
        generator: of the draws.

    Raises:
        WhenceError: fewer than two records would be kept, or no subset is asked for.
    """
    size = int(share * n) if 0 < share <= 1 else 0
    if size < 2 or count < 1:
        raise WhenceError(
            f"{count} subsets of a share of {share} of {n} records were asked for; at least one subset of at least two "
            "records is needed, with a share above 0 and at most 1."
        )
    masks = torch.zeros(count, n, dtype=torch.bool)
    for mask in masks:
        mask[torch.randperm(n, generator=generator)[:size]] = True
    return masks


def draw_subsets_of(
    recording: RoundRecording, share: float, count: int, generator: torch.Generator
) -> Bool[Tensor, "count n"]:
    """Draw `subsets` of the records that a round trained on, as masks of all its records."""
    trained = recording.trained
    masks = torch.zeros(count, len(recording.records), dtype=torch.bool)
    masks[:, trained] = draw_subsets(len(trained), share, count, generator)
    return masks


def read_batch_size(recording: RoundRecording) -> int:
    """Return how many records a full minibatch of a round has.

    Raises:
        WhenceError: the round was not trained on.
    """
    if len(recording.minibatches) == 0:
        raise WhenceError(
            f"Round {recording.number} was not trained on, so there is nothing to train again: its selection kept "
            "fewer than two records. Take another round."
        )
    return len(recording.records) if recording.update.batch_size is None else recording.update.batch_size


def reshuffle(kept: Bool[Tensor, "m n"], batch_size: int, n_epochs: int, generator: torch.Generator) -> Orders:
    """Draw each subset's minibatches as selection does: every epoch a permutation of all records, filtered and cut.

    A trailing minibatch of one record joins its predecessor. Subsets may be of different sizes.

    Args:
        kept: which records each subset keeps.
        batch_size: records in a minibatch.
        n_epochs: passes over the records.
        generator: of the permutations; all subsets share them.

    Returns:
        For each step, what each subset trains on, `NOBODY` in places left over; in a row of them, nothing.
    """
    orders: list[Tensor] = []
    for _ in range(n_epochs):
        permutation = torch.randperm(kept.shape[1], generator=generator)
        epoch = [_cut(permutation[mask[permutation]], batch_size) for mask in kept]
        side_by_side = zip_longest(*epoch, fillvalue=permutation[:0])
        orders += [pad_sequence(list(own), batch_first=True, padding_value=NOBODY) for own in side_by_side]
    return orders


def _cut(positions: Int[Tensor, " k"], batch_size: int) -> list[Int[Tensor, " b"]]:
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

    Without `orders`, every training follows the recorded minibatches and leaves the others' records out of them: what
    a record did, all else equal (a minibatch of which nothing is kept is no step). With `orders` of `reshuffled`, kept
    records are shuffled into full minibatches anew, which is what a selection rule does. A round that `target_kl` ended
    ends where it did without `orders`; with them, all that are given are trained.

    Args:
        policy: the policy that was trained, or one built like it; it is left as it is.
        recording: of the round.
        kept: (m, n) which records each training keeps, or how often; see `whence.rounds.replay`.
        orders: minibatches of each training; None: the recorded ones.
        memory: bytes that training and the orders may hold at a time, beside the policy and the records; as many
            trainings go side by side as fit. What one takes is measured on a step before the start.
        dtype: to compute in; None: the recorded one.

    Returns:
        The trained parameters by name, each (m, ...), on the policy's device.

    Raises:
        NonFinite: a training diverged.
        WhenceError: a subset that keeps fewer than two records (without `orders`, of those that the round trained on)
            or is of another round, or more memory needed than allowed; or see `whence.rounds.replay`.
    """
    round, weights = _weighed(policy, recording, kept, dtype, anew=orders is not None)
    with preserve_rng_state(), eval_mode(list(round.view.module.modules())), torch.no_grad():
        drawn = 0 if orders is None else sum(own.nbytes for own in orders)
        return _in_parts(round, weights, orders, _at_once(round, weights, orders, memory, drawn))


def check_memory(policy: object, recording: RoundRecording, kept: Bool[Tensor, "m n"], memory: int) -> None:
    """Refuse trainings of a round that will not fit, along the recorded minibatches or reshuffled; nothing is trained.

    Args:
        policy: see `retrain`.
        recording: see `retrain`.
        kept: which records each training keeps, as many of them each.
        memory: bytes that training may hold at a time.

    Raises:
        WhenceError: see `retrain`.
    """
    round, weights = _weighed(policy, recording, kept, None, anew=False)
    # One epoch of one subset has the largest minibatch of any.
    orders = reshuffle(kept[:1], read_batch_size(recording), 1, torch.Generator())
    drawn = sum(own.nbytes for own in orders) * recording.update.n_epochs * len(kept)
    with preserve_rng_state(), eval_mode(list(round.view.module.modules())), torch.no_grad():
        for along, held in ((None, 0), (orders, drawn)):
            _at_once(round, weights, along, memory, held)


def _weighed(
    policy: object, recording: RoundRecording, kept: Tensor, dtype: torch.dtype | None, *, anew: bool
) -> tuple[SteppedRound, Float[Tensor, "m n"]]:
    round = open_round(policy, recording, dtype=dtype)
    n = len(round.records)
    if kept.ndim != 2 or kept.shape[1] != n or len(kept) == 0:
        raise WhenceError(f"kept has shape {tuple(kept.shape)}; (m, {n}) is needed, a row for each training.")
    return round, check_weights(kept, round, anew=anew)


def _in_parts(
    round: SteppedRound, weights: Float[Tensor, "m n"], orders: Orders | None, at_once: int
) -> dict[str, Tensor]:
    trained = round.start.params.new_empty(len(weights), len(round.start.params))
    for first in range(0, len(weights), at_once):
        chosen = slice(first, first + at_once)
        own = None if orders is None else [order[chosen] for order in orders]
        with raise_on_divergence(round):
            trained[chosen] = _side_by_side(round, weights[chosen], own)
    check_finite(trained, round)
    return {name: own.contiguous() for name, own in round.named(trained).items()}


def _at_once(round: SteppedRound, weights: Float[Tensor, "m n"], orders: Orders | None, memory: int, drawn: int) -> int:
    """Return how many trainings fit into `memory` bytes side by side, beside orders of `drawn` bytes.

    Raises:
        WhenceError: not even one does.
    """
    count = len(weights)
    if len(round if orders is None else orders) == 0:
        return count
    alone = round.of_one_step() if orders is None else round
    largest = None if orders is None else max(orders, key=lambda positions: positions.shape[1])

    def cost(side_by_side: int) -> int:
        own = None if largest is None else [largest[:1].expand(side_by_side, -1)]
        held = measure_bytes(lambda: _side_by_side(alone, weights[:1].expand(side_by_side, -1), own))
        return MARGIN * (max(held) + side_by_side * round.start.nbytes)  # where the step begins is there as well

    results = drawn + weights.nbytes + 2 * round.start.params.nbytes * count
    one = cost(1)
    if results + one > memory:
        raise WhenceError(
            f"memory is {memory:,} bytes, but training round {round.recording.number} {count} times takes about "
            f"{results + one:,} bytes even one by one: {one:,} for a step of one training, and {results:,} for the "
            "weights, orders and final parameters of all. Allow more, or ask for fewer trainings at a time."
        )
    if count == 1:
        return 1
    each = max(1, cost(2) - one)
    return min(count, 1 + (memory - results - one) // each)


def _side_by_side(round: SteppedRound, weights: Float[Tensor, "m n"], orders: Orders | None) -> Float[Tensor, "m p"]:
    point = round.start.spread(len(weights))

    if orders is not None:  # nobody weighs nothing
        weights = torch.cat([weights, weights.new_zeros(len(weights), 1)], dim=1)

    def one(point: Point, positions: Int[Tensor, " b"], weights: Float[Tensor, " weighed"]) -> Point:
        return step(round, point, round.at(positions), weights[positions])

    stepped = torch.vmap(one, in_dims=(0, None if orders is None else 0, 0))
    for positions in round.recording.steps if orders is None else orders:
        point = stepped(point, positions.to(weights.device), weights)
    return point.params
