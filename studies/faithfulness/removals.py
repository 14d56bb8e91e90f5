"""Removals: the effect of leaving out the records with the highest or lowest scores, next to random records."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np
import polars as pl
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from studies.faithfulness.outcomes import Outcomes, check_scores, measure_outcomes, read_batch_size
from whence.core import Target, WhenceError
from whence.lab.rounds import Orders, check_target, open_round, reshuffle, retrain
from whence.rounds import RoundRecording
from whence.stored.agents import Evaluate

SHARES = (0.01, 0.05, 0.1, 0.25, 0.5)
"""The shares of the records that are left out, by default."""

DRAWS = 8
"""The number of random removals of each share."""

SCHEMA = {
    **dict.fromkeys(("score", "side"), pl.String),
    "removed": pl.Int64,
    **dict.fromkeys(("truth", "outcome"), pl.String),
    **dict.fromkeys(("change", "spread"), pl.Float64),
}


def leave_out(
    policy: object,
    recording: RoundRecording,
    scores: Mapping[str, NDArray[np.floating]],
    *,
    target: Target,
    shares: Sequence[float] = SHARES,
    draws: int = DRAWS,
    orders: int = 4,
    evaluate: Evaluate | None = None,
    seed: int = 0,
    memory: int = 2**31,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> pl.DataFrame:
    """Train a round without growing shares of the records that a score ranks highest or lowest.

    The two truths and the outcomes are those of `study`. If a score shows which records help, leaving out its highest
    lowers the target, and leaving out its lowest raises it, by more than leaving out as many at random does.

    The other arguments are those of `study`.

    Args:
        scores: (n,) scores by name, in the order of the records; a positive one says that its record raised the target.
        shares: the shares to leave out of the records that the round trained on; rounded down to whole records.
        draws: the number of random removals of each share.

    Returns:
        A row for each truth, outcome, score, side and number removed: `score` (null at random), `side` ("top": the
        highest were left out; "bottom": the lowest; "random"; ties are broken by position), `removed` (the number of
        records), `truth`, `outcome`, `change` (the outcome minus that of training on everything, under "reshuffled" in
        the same order) and `spread` (the standard error of the change: over draws for "random", otherwise over orders;
        null if there is only one).

    Raises:
        NonFinite: a training diverged, or an outcome is not finite.
        WhenceError: a share leaves out no record or keeps fewer than two; or see `study`.
    """
    n, size = len(recording.records), read_batch_size(recording)
    target = check_target(target, open_round(policy, recording))
    generator = torch.Generator().manual_seed(seed)
    checked = {name: check_scores(name, values, n) for name, values in scores.items()}
    removals = _draw_removals(checked, recording.trained, shares, draws, generator)
    shuffle_seeds = torch.randint(2**62, (orders,), generator=generator).tolist()
    kept = torch.zeros(1 + sum(map(len, removals.values())), n, dtype=torch.bool)
    kept[:, recording.trained] = True
    for mask, dropped in zip(kept[1:], chain.from_iterable(removals.values()), strict=True):
        mask[dropped] = False

    def measure_changes(minibatches: Orders | None, repetition: int) -> Outcomes:
        params = retrain(policy, recording, kept, orders=minibatches, memory=memory)
        outcomes = measure_outcomes(policy, recording, params, target, evaluate, repetition)
        return {name: values[1:] - values[0] for name, values in outcomes.items()}

    on_stage(f"leaving out: training {len(kept)} times, recorded")
    changes = {"recorded": [measure_changes(None, 0)], "reshuffled": []}
    for number, shuffle_seed in enumerate(shuffle_seeds, start=1):
        on_stage(f"leaving out: training {len(kept)} times, reshuffled, order {number} of {orders}")
        # All trainings of an order share its permutations, so that a change is not one of order.
        permutations = torch.Generator().manual_seed(shuffle_seed)
        minibatches = reshuffle(kept, size, recording.update.n_epochs, permutations)
        changes["reshuffled"].append(measure_changes(minibatches, number))
    rows = []
    bounds = np.cumsum([len(group) for group in removals.values()])[:-1]
    for truth, by_order in changes.items():
        for outcome in by_order[0]:
            groups = np.split(np.stack([order[outcome] for order in by_order]), bounds, axis=1)
            for (score, side, count), values in zip(removals, groups, strict=True):
                repeated = values.mean(axis=0) if side == "random" else values[:, 0]
                error = float(np.std(repeated, ddof=1) / np.sqrt(len(repeated))) if len(repeated) > 1 else None
                row = {"score": score, "side": side, "removed": count, "truth": truth, "outcome": outcome}
                rows.append({**row, "change": float(values.mean()), "spread": error})
    return pl.DataFrame(rows, schema=SCHEMA)


def _draw_removals(
    scores: Mapping[str, NDArray[np.float64]],
    positions: Int[Tensor, " k"],
    shares: Sequence[float],
    draws: int,
    generator: torch.Generator,
) -> dict[tuple[str | None, str, int], list[Int[Tensor, " removed"]]]:
    """Return the positions to leave out by score, side and their number: one removal of each, and several at random."""
    n = len(positions)
    for share in shares:
        count = int(share * n) if 0 < share < 1 else 0
        if count < 1 or n - count < 2:
            raise WhenceError(
                f"A share of {share} of {n} records cannot be left out; a share has to remove at least one record and "
                f"leave at least two: from 1/{n} to {n - 2}/{n}."
            )
    counts = sorted({int(share * n) for share in shares})
    removals: dict[tuple[str | None, str, int], list[Tensor]] = {}
    for name, values in scores.items():
        for side, sign in (("top", -1), ("bottom", 1)):
            # The sort is stable, so that of equal scores the first record is left out first.
            ranked = positions[np.argsort(sign * values[positions.numpy()], kind="stable")]
            removals |= {(name, side, count): [ranked[:count]] for count in counts}
    for count in counts:
        removals[None, "random", count] = [
            positions[torch.randperm(n, generator=generator)[:count]] for _ in range(draws)
        ]
    return removals
