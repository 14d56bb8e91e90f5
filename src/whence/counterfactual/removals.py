"""What leaving out the records that score highest or lowest does to a round, beside leaving out others at random."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from whence.counterfactual.measures import check_scores
from whence.counterfactual.outcomes import Evaluate, Outcomes, measure_outcomes
from whence.counterfactual.retrain import Orders, check_memory, read_batch_size, reshuffle, retrain
from whence.errors import WhenceError
from whence.rounds import RoundRecording
from whence.rounds.replay import check_target, open_round
from whence.targets import Target

SHARES = (0.01, 0.05, 0.1, 0.25, 0.5)
"""Of the records that are left out, where nothing else is asked for."""

DRAWS = 8
"""Random removals of each share."""

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
    """What a training leaves out: `removed` records from a side of a score, or at random."""

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
    """Train a round without the records that a score holds for the best or the worst, more and more of them.

    The two truths and the outcomes are those of `study`. A score that tells which records help makes the target fall
    where its highest are left out, and rise where its lowest are, by more than leaving out as many at random does.

    Args:
        policy: the policy that was trained, or one built like it; it is left as it is.
        recording: of the round.
        scores: (n,) by name, in the order of the records; a positive one says that its record raised the target.
        target: what is measured, beside the surrogate.
        shares: of the records that the round trained on, to leave out; each rounded down to whole records.
        draws: random removals of each share.
        orders: in which "reshuffled" trains each removal.
        evaluate: measures trained parameters; None: nothing is. The recorded truth is its repetition 0, the orders are
            the repetitions from 1.
        seed: of random removals and orders.
        memory: bytes that training may hold at a time; see `retrain`. That it fits is known before anything is trained.
        on_stage: called with the name of each stage as it begins.

    Returns:
        A row for each truth, outcome, score, side and number removed: `score` (null at random), `side` ("top": the
        highest were left out; "bottom": the lowest; "random"; of equal scores the record that comes first), `removed`
        (records), `truth`, `outcome`, `change` (the outcome less that of training on everything, under "reshuffled" in
        the same order) and `spread` (the standard error of the change: at random over draws, else over orders; null
        where there is one).

    Raises:
        NonFinite: a training diverged, or an outcome is no number.
        WhenceError: a share that leaves out no record or keeps fewer than two, scores of another shape or not finite,
            no draw or order, a round that was not trained on, or a target that reads what the recording lacks; or see
            `retrain`.
    """
    n, trained_on = len(recording.records), recording.trained
    if draws < 1 or orders < 1:
        raise WhenceError(f"draws is {draws} and orders {orders}; at least 1 of each is needed.")
    size = read_batch_size(recording)
    counts = _counts(shares, len(trained_on))
    target = check_target(target, open_round(policy, recording))
    generator = torch.Generator().manual_seed(seed)
    checked = {name: check_scores(name, own, n) for name, own in scores.items()}
    check_removals(policy, recording, len(checked), shares=shares, draws=draws, memory=memory)
    everything = _everything(recording)
    removals = _removals(checked, everything, counts, draws, generator)
    shuffles = torch.randint(2**62, (orders,), generator=generator).tolist()

    kept = torch.stack([everything, *(one.kept for one in removals)])

    def trained(minibatches: Orders | None, repetition: int) -> Outcomes:
        params = retrain(policy, recording, kept, orders=minibatches, memory=memory)
        return measure_outcomes(policy, recording, params, target, evaluate, repetition)

    on_stage(f"leaving out: training {len(removals) + 1} times, recorded")
    together = trained(None, 0)
    changes = {"recorded": {name: values[None, 1:] - values[0] for name, values in together.items()}}
    by_order: list[dict[str, NDArray[np.float64]]] = []
    for number, shuffle in enumerate(shuffles, start=1):
        on_stage(f"leaving out: training {len(removals) + 1} times, reshuffled, order {number} of {orders}")
        # One training's permutations are another's, so that a change is not one of order.
        drawn = torch.Generator().manual_seed(shuffle)
        own = trained(reshuffle(kept, size, recording.update.n_epochs, drawn), number)
        by_order.append({name: values[1:] - values[0] for name, values in own.items()})
    changes["reshuffled"] = {name: np.stack([own[name] for own in by_order]) for name in by_order[0]}
    rows = [
        {**row, "truth": truth, "outcome": outcome}
        for truth, found in changes.items()
        for outcome, values in found.items()
        for row in _curves(removals, values)
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
    """Refuse what `leave_out` of so many scores will not have the memory for; nothing is trained.

    Raises:
        WhenceError: see `retrain`.
    """
    trainings = 1 + len(shares) * (2 * scores + draws)
    check_memory(policy, recording, _everything(recording).expand(trainings, -1), memory)


def _everything(recording: RoundRecording) -> Bool[Tensor, " n"]:
    kept = torch.zeros(len(recording.records), dtype=torch.bool)
    kept[recording.trained] = True
    return kept


def _counts(shares: Sequence[float], n: int) -> list[int]:
    if len(shares) == 0:
        raise WhenceError("shares is empty; name at least one share of the records to leave out, such as 0.1.")
    for share in shares:
        count = int(share * n) if 0 < share < 1 else 0
        if count < 1 or n - count < 2:
            raise WhenceError(
                f"A share of {share} of {n} records was to be left out; it has to be above 0 and below 1, come to at "
                f"least one record and leave at least two: from 1/{n} to {n - 2}/{n}."
            )
    return sorted({int(share * n) for share in shares})


def _removals(
    scores: Mapping[str, NDArray[np.float64]],
    everything: Bool[Tensor, " n"],
    counts: Sequence[int],
    draws: int,
    generator: torch.Generator,
) -> list[_Removal]:
    """Return every removal from `everything`."""
    positions = everything.nonzero()[:, 0]
    # Stable, so that of equal scores the record that comes first is left out first.
    ranked = {
        (name, side): positions[np.argsort(sign * own[positions.numpy()], kind="stable")]
        for name, own in scores.items()
        for side, sign in (("top", -1), ("bottom", 1))
    }

    def without(dropped: Tensor) -> Bool[Tensor, " n"]:
        kept = everything.clone()
        kept[dropped] = False
        return kept

    found = []
    for count in counts:
        for (name, side), order in ranked.items():
            found.append(_Removal(name, side, count, without(order[:count])))
        for _ in range(draws):
            drawn = positions[torch.randperm(len(positions), generator=generator)[:count]]
            found.append(_Removal(None, "random", count, without(drawn)))
    return found


def _curves(
    removals: Sequence[_Removal], changes: Float[NDArray[np.float64], "orders m"]
) -> Iterator[Mapping[str, object]]:
    """Yield a row for each score, side and number removed; those of one curve together."""
    places: dict[tuple[str | None, str, int], list[int]] = {}
    for place, one in enumerate(removals):
        places.setdefault((one.score, one.side, one.removed), []).append(place)
    curves = list(dict.fromkeys((score, side) for score, side, _ in places))
    for (score, side, count), own in sorted(places.items(), key=lambda entry: curves.index(entry[0][:2])):
        values = changes[:, own]
        repeated = values.mean(axis=0) if side == "random" else values[:, 0]
        error = float(np.std(repeated, ddof=1) / np.sqrt(len(repeated))) if len(repeated) > 1 else None
        yield {"score": score, "side": side, "removed": count, "change": float(values.mean()), "spread": error}
