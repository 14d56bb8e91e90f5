"""Many trainings of one recorded round at once, each without some of its records."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whence.errors import WhenceError
from whence.guards import eval_mode, kept_generators
from whence.records import take
from whence.rounds.recording import RoundRecording
from whence.rounds.replay import Minibatch, Point, Round, opened, step

Orders: TypeAlias = Sequence[Int[Tensor, "m b"]]
"""For each step, the positions of each training's minibatch."""


def subsets(n: int, share: float, count: int, generator: torch.Generator) -> Bool[Tensor, "count n"]:
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


def reshuffled(kept: Bool[Tensor, "m n"], batch_size: int, n_epochs: int, generator: torch.Generator) -> Orders:
    """Draw each subset's minibatches as selection does: every epoch a permutation of all records, filtered and cut.

    A trailing minibatch of one record joins its predecessor. The subsets are of one size.

    Args:
        kept: which records each subset keeps.
        batch_size: records in a minibatch.
        n_epochs: passes over the records.
        generator: of the permutations; all subsets share them.

    Raises:
        WhenceError: subsets of different sizes.
    """
    sizes = kept.sum(dim=1)
    if int(sizes.min()) != int(sizes.max()):
        raise WhenceError(
            f"The subsets keep {int(sizes.min())} to {int(sizes.max())} records; side by side, all have to keep as "
            "many. Draw them with whence.counterfactual.subsets."
        )
    size = int(sizes[0])
    cuts = [batch_size] * (size // batch_size) + ([size % batch_size] if size % batch_size else [])
    if len(cuts) > 1 and cuts[-1] == 1:
        cuts[-2:] = [batch_size + 1]
    orders: list[Tensor] = []
    for _ in range(n_epochs):
        permutation = torch.randperm(kept.shape[1], generator=generator)
        filtered = torch.stack([permutation[mask[permutation]] for mask in kept])
        orders += filtered.split(cuts, dim=1)
    return orders


def retrain(
    policy: object,
    recording: RoundRecording,
    kept: Tensor,
    *,
    orders: Orders | None = None,
    at_once: int = 100,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Train a recorded round once for each subset of its records, side by side, and return the parameters.

    Without `orders`, every training follows the recorded minibatches and leaves the others' records out of them: what
    a record did, all else equal (a minibatch of which nothing is kept is no step). With `orders` of `reshuffled`, kept
    records are shuffled into full minibatches anew, which is what a selection rule does.

    Args:
        policy: the policy that was trained, or one built like it; it is left as it is.
        recording: of the round.
        kept: (m, n) which records each training keeps, or what each weighs.
        orders: minibatches of each training; None: the recorded ones.
        at_once: the most trainings side by side; memory grows with it.
        dtype: to compute in; None: the recorded one.

    Returns:
        The trained parameters by name, each (m, ...), on the policy's device.

    Raises:
        WhenceError: a subset that keeps fewer than two records or is of another round; or see `whence.rounds.replay`.
    """
    round = opened(policy, recording, dtype=dtype)
    n = len(round.records)
    if kept.ndim != 2 or kept.shape[1] != n or len(kept) == 0:
        raise WhenceError(f"kept has shape {tuple(kept.shape)}; (m, {n}) is needed, a row for each training.")
    if int((kept > 0).sum(dim=1).min()) < 2:
        raise WhenceError(
            "A subset keeps fewer than two records, and one has no advantage to be normalised by another."
        )
    weights = kept.to(round.records.log_probs)
    modules = list(round.view.module.modules())
    with kept_generators(), eval_mode(modules), torch.no_grad():
        parts = []
        for first in range(0, len(kept), at_once):
            chosen = slice(first, first + at_once)
            own = None if orders is None else [order[chosen] for order in orders]
            parts.append(_side_by_side(round, weights[chosen], own))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _side_by_side(round: Round, weights: Float[Tensor, "m n"], orders: Orders | None) -> dict[str, Tensor]:
    count = len(weights)
    point = Point(
        {name: p.expand(count, *p.shape) for name, p in round.start.params.items()},
        {name: {k: t.expand(count, *t.shape) for k, t in own.items()} for name, own in round.start.state.items()},
    )
    device = weights.device
    shared = [positions.to(device) for positions in round.recording.steps]
    steps = shared if orders is None else [positions.to(device) for positions in orders]

    def one(point: Point, positions: Int[Tensor, " b"], weights: Float[Tensor, " n"]) -> Point:
        records = round.records.with_columns(take(round.records.columns, positions))
        minibatch = Minibatch(positions, records, take(round.inputs, positions))
        return step(round, point, minibatch, weights[positions])

    stepped = torch.vmap(one, in_dims=(0, None if orders is None else 0, 0))
    for positions in steps:
        point = stepped(point, positions, weights)
    return point.params
