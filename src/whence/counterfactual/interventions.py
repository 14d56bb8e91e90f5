"""A recorded round trained again without the records that score below 0 (LDA §4.3, C.3)."""

from collections.abc import Callable, Mapping, Sequence

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from whence.counterfactual.lds import check_scores
from whence.counterfactual.outcomes import Evaluate, seed_outcomes
from whence.counterfactual.retrain import read_batch_size, reshuffle, retrain
from whence.errors import WhenceError
from whence.influence import Influence
from whence.intervals import t_interval
from whence.rounds import RoundRecording
from whence.selection import read_scores

VARIANTS = ("full", "filtered", "random")
"""What each training keeps: all records, those that do not score below 0, and as many drawn at random."""


def intervene(
    policy: object,
    recording: RoundRecording,
    scores: Influence,
    evaluate: Evaluate,
    *,
    orders: int = 1,
    seed: int = 0,
    memory: int = 2**31,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> pl.DataFrame:
    """Train a recorded round on all its records, without those that score below 0, and without as many at random.

    Each training begins with the round's initial parameters and optimiser state, and shuffles the records it keeps into
    full minibatches in every epoch. In one order all three share the permutations; each order draws its own
    permutations and its own random drop. All `n_epochs` are trained, even if `target_kl` ended the round early.

    Args:
        policy: the policy that was trained, or one built like it; it is left as it is.
        recording: the recorded round.
        scores: the scores of exactly the round's records.
        evaluate: measures trained parameters, for example their test return; the order is the repetition.
        orders: the number of trainings of each variant.
        seed: the seed of permutations and random drops.
        memory: bytes that training may hold at a time; see `retrain`.
        on_stage: called with the name of each training and measurement as it begins.

    Returns:
        A row for each order and variant: `order` (from 1), `variant` ("full", "filtered", "random"), `kept` (the number
        of records), `outcome` (the number that `evaluate` returned) and `change` (the outcome minus that of "full" in
        the same order). Outcome and change are null if fewer than two records are kept, which cannot be trained on.

    Raises:
        InvalidInfluence: the scores are of other records.
        WhenceError: `orders` is below 1, a score is not finite, or the round was not trained on; or see `retrain`.
    """
    if orders < 1:
        raise WhenceError(f"orders is {orders}; at least 1 is needed.")
    size = read_batch_size(recording)
    values = read_scores(recording.records, scores)
    check_scores(scores.provenance.engine, values.double().cpu().numpy(), len(values))

    generator = torch.Generator().manual_seed(seed)
    rows = []
    for order in range(1, orders + 1):
        suffix = f", order {order} of {orders}" if orders > 1 else ""
        masks = _draw_masks(values, generator)
        shuffle_seed = int(torch.randint(2**62, (1,), generator=generator))
        trainable = [variant for variant, mask in masks.items() if int(mask.sum()) >= 2]
        kept = torch.stack([masks[variant] for variant in trainable])
        on_stage(f"training{suffix}")
        permutations = torch.Generator().manual_seed(shuffle_seed)
        minibatches = reshuffle(kept, size, recording.update.n_epochs, permutations)
        params = retrain(policy, recording, kept, orders=minibatches, memory=memory)
        outcomes: dict[str, float] = {}
        for row, variant in enumerate(trainable):
            on_stage(f"measuring {variant}{suffix}")
            with seed_outcomes(order):
                outcomes[variant] = float(evaluate({name: tensor[row] for name, tensor in params.items()}, order))
        rows += [
            {"order": order, "variant": variant, "kept": int(mask.sum()), "outcome": outcomes.get(variant)}
            for variant, mask in masks.items()
        ]
    schema = {"order": pl.Int64, "variant": pl.String, "kept": pl.Int64, "outcome": pl.Float64}
    return _add_changes(pl.DataFrame(rows, schema=schema))


def _draw_masks(scores: Float[Tensor, " n"], generator: torch.Generator) -> Mapping[str, Bool[Tensor, " n"]]:
    """Return the records that each variant keeps. The permutation drawn does not depend on the scores."""
    filtered = scores >= 0
    dropped = torch.randperm(len(scores), generator=generator)[: int((~filtered).sum())]
    random = torch.ones_like(filtered)
    random[dropped] = False
    return dict(zip(VARIANTS, (torch.ones_like(filtered), filtered, random), strict=True))


def _add_changes(table: pl.DataFrame) -> pl.DataFrame:
    full = pl.col("outcome").filter(pl.col("variant") == "full").first().over("order")
    return table.with_columns(change=pl.col("outcome") - full)


def mean_change(changes: Sequence[float]) -> Mapping[str, float | int | None]:
    """Return the mean of the changes of several rounds.

    Args:
        changes: one change for each round.

    Returns:
        "mean", and "low" and "high" of its 95% t interval over rounds; "rounds", the number of rounds; and "improved",
        the number of those whose change is above 0. The mean of no round is None, as is the interval of fewer than two.
    """
    return {**t_interval(changes), "rounds": len(changes), "improved": sum(change > 0 for change in changes)}
