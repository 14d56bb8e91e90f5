"""Removals: the effect of leaving out the records with the highest or lowest scores, next to random records."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from whence.counterfactual.outcomes import Evaluate, Outcomes, check_scores, measure_outcomes
from whence.counterfactual.retrain import Orders, check_memory, read_batch_size, reshuffle, retrain
from whence.errors import WhenceError
from whence.rounds import RoundRecording
from whence.rounds.replay import check_target, open_round
from whence.targets import Target

SHARES = (0.01, 0.05, 0.1, 0.25, 0.5)
"""The shares of the records that are left out, by default."""

DRAWS = 8
"""The number of random removals of each share."""

SCHEMA = {
    "score": pl.String,
    "side": pl.String,
    "removed": pl.Int64,
    "truth": pl.String,
    "outcome": pl.String,
    "change": pl.Float64,
    "spread": pl.Float64,
}


class _Removal(NamedTuple):
    """The `removed` records that a training leaves out, from one side of a score or at random."""

    score: str | None
    side: str
    removed: int
    kept: Bool[Tensor, " n"]


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

    Args:
        policy: see `study`, as for `evaluate` and `memory`.
        recording: the recorded round.
        scores: (n,) scores by name, in the order of the records; a positive one says that its record raised the target.
        target: the target to measure, besides the surrogate.
        shares: the shares to leave out of the records that the round trained on; rounded down to whole records.
        draws: the number of random removals of each share.
        orders: the number of orders in which "reshuffled" trains each removal.
        evaluate: measures trained parameters; None: "evaluated" is left out.
        seed: the seed of random removals and orders.
        memory: bytes that training may hold at a time; it is checked before anything is trained.
        on_stage: called with the name of each stage as it begins.

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
    counts = _count_removed(shares, len(recording.trained))
    target = check_target(target, open_round(policy, recording))
    generator = torch.Generator().manual_seed(seed)
    checked = {name: check_scores(name, values, n) for name, values in scores.items()}
    check_removals(policy, recording, len(checked), shares=shares, draws=draws, memory=memory)
    everything = _mask_trained(recording)
    removals = _draw_removals(checked, everything, counts, draws, generator)
    shuffle_seeds = torch.randint(2**62, (orders,), generator=generator).tolist()

    kept = torch.stack([everything, *(removal.kept for removal in removals)])

    def train_and_measure(minibatches: Orders | None, repetition: int) -> Outcomes:
        params = retrain(policy, recording, kept, orders=minibatches, memory=memory)
        return measure_outcomes(policy, recording, params, target, evaluate, repetition)

    on_stage(f"leaving out: training {len(removals) + 1} times, recorded")
    recorded = train_and_measure(None, 0)
    changes = {"recorded": {name: values[None, 1:] - values[0] for name, values in recorded.items()}}
    by_order: list[Outcomes] = []
    for number, shuffle_seed in enumerate(shuffle_seeds, start=1):
        on_stage(f"leaving out: training {len(removals) + 1} times, reshuffled, order {number} of {orders}")
        # All trainings of an order share its permutations, so that a change is not one of order.
        permutations = torch.Generator().manual_seed(shuffle_seed)
        minibatches = reshuffle(kept, size, recording.update.n_epochs, permutations)
        outcomes = train_and_measure(minibatches, number)
        by_order.append({name: values[1:] - values[0] for name, values in outcomes.items()})
    changes["reshuffled"] = {name: np.stack([order[name] for order in by_order]) for name in by_order[0]}
    rows = [
        {**row, "truth": truth, "outcome": outcome}
        for truth, by_outcome in changes.items()
        for outcome, values in by_outcome.items()
        for row in _curve_rows(removals, values)
    ]
    return pl.DataFrame(rows, schema=SCHEMA)


def check_removals(
    policy: object,
    recording: RoundRecording,
    scores: int,
    *,
    shares: Sequence[float] = SHARES,
    draws: int = DRAWS,
    memory: int = 2**31,
) -> None:
    """Refuse removals by a number of scores that do not fit into memory, before `leave_out`; nothing is trained.

    Raises:
        WhenceError: see `retrain`.
    """
    trainings = 1 + len(shares) * (2 * scores + draws)
    check_memory(policy, recording, _mask_trained(recording).expand(trainings, -1), memory)


def _mask_trained(recording: RoundRecording) -> Bool[Tensor, " n"]:
    mask = torch.zeros(len(recording.records), dtype=torch.bool)
    mask[recording.trained] = True
    return mask


def _count_removed(shares: Sequence[float], n: int) -> list[int]:
    for share in shares:
        count = int(share * n) if 0 < share < 1 else 0
        if count < 1 or n - count < 2:
            raise WhenceError(
                f"A share of {share} of {n} records cannot be left out; a share has to remove at least one record and "
                f"leave at least two: from 1/{n} to {n - 2}/{n}."
            )
    return sorted({int(share * n) for share in shares})


def _draw_removals(
    scores: Mapping[str, NDArray[np.float64]],
    everything: Bool[Tensor, " n"],
    counts: Sequence[int],
    draws: int,
    generator: torch.Generator,
) -> list[_Removal]:
    """Return every removal from the records in `everything`."""
    positions = everything.nonzero()[:, 0]
    # The sort is stable, so that of equal scores the first record is left out first.
    ranked = {
        (name, side): positions[np.argsort(sign * values[positions.numpy()], kind="stable")]
        for name, values in scores.items()
        for side, sign in (("top", -1), ("bottom", 1))
    }

    def keep_all_but(dropped: Tensor) -> Bool[Tensor, " n"]:
        kept = everything.clone()
        kept[dropped] = False
        return kept

    removals = []
    for count in counts:
        for (name, side), order in ranked.items():
            removals.append(_Removal(name, side, count, keep_all_but(order[:count])))
        for _ in range(draws):
            dropped = positions[torch.randperm(len(positions), generator=generator)[:count]]
            removals.append(_Removal(None, "random", count, keep_all_but(dropped)))
    return removals


def _curve_rows(removals: Sequence[_Removal], changes: Float[np.ndarray, "orders m"]) -> Iterator[Mapping[str, object]]:
    """Yield a row for each score, side and number removed, curve by curve."""
    places: dict[tuple[str | None, str, int], list[int]] = {}
    for place, removal in enumerate(removals):
        places.setdefault((removal.score, removal.side, removal.removed), []).append(place)
    curves = list(dict.fromkeys((score, side) for score, side, _ in places))
    for (score, side, count), columns in sorted(places.items(), key=lambda entry: curves.index(entry[0][:2])):
        values = changes[:, columns]
        repeated = values.mean(axis=0) if side == "random" else values[:, 0]
        error = float(np.std(repeated, ddof=1) / np.sqrt(len(repeated))) if len(repeated) > 1 else None
        yield {"score": score, "side": side, "removed": count, "change": float(values.mean()), "spread": error}
