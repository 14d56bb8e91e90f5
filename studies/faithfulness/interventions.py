"""A recorded round trained again without the records that score below 0 (LDA §4.3, C.3; v2 B.3)."""

from collections.abc import Mapping

import polars as pl
import torch
from jaxtyping import Bool
from torch import Tensor

from studies.faithfulness.outcomes import check_scores, read_batch_size, seed_outcomes
from whence.lab.rounds import reshuffle, retrain
from whence.rounds import RoundRecording
from whence.scores.influence import Influence
from whence.selection import read_scores
from whence.stored.agents import Evaluate

VARIANTS = ("full", "filtered", "random")
"""What each training keeps: all records, all but those in question, and all but as many drawn at random."""


def intervene(
    policy: object, recording: RoundRecording, scored: Influence, *, evaluate: Evaluate, seed: int = 0
) -> pl.DataFrame:
    """Train a recorded round on all its records, without those below 0, and without as many drawn at random.

    Each training begins with the round's initial parameters and optimiser state, and shuffles the records it keeps into
    full minibatches in every epoch; all three share the permutations. All `n_epochs` are trained, even if `target_kl`
    ended the round early.

    Returns:
        A row for each variant: `order` (1), `variant` ("full", "filtered", "random"), `kept` (the number of records),
        `value` and `change` (the value minus that of "full"). Both are null if fewer than two records are kept, which
        cannot be trained on.
    """
    values = read_scores(recording.records, scored)
    check_scores(scored.provenance.engine, values.double().cpu().numpy(), len(values))
    size, generator = read_batch_size(recording), torch.Generator().manual_seed(seed)
    masks = _draw_masks(values < 0, generator)
    permutations = torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
    trainable = [variant for variant, mask in masks.items() if int(mask.sum()) >= 2]
    kept = torch.stack([masks[variant] for variant in trainable])
    params = retrain(policy, recording, kept, orders=reshuffle(kept, size, recording.update.n_epochs, permutations))
    outcomes: dict[str, float] = {}
    for row, variant in enumerate(trainable):
        with seed_outcomes(1):
            outcomes[variant] = float(evaluate({name: tensor[row] for name, tensor in params.items()}, 1))
    rows = [
        {"order": 1, "variant": variant, "kept": int(mask.sum()), "value": outcomes.get(variant)}
        for variant, mask in masks.items()
    ]
    table = pl.DataFrame(rows, schema_overrides={"value": pl.Float64})
    return table.with_columns(change=pl.col("value") - pl.lit(outcomes.get("full")))


def _draw_masks(dropped: Bool[Tensor, " n"], generator: torch.Generator) -> Mapping[str, Bool[Tensor, " n"]]:
    """Return the records that each variant keeps. The permutation drawn does not depend on what is dropped."""
    at_random = torch.randperm(len(dropped), generator=generator)[: int(dropped.sum())]
    random = torch.ones_like(dropped)
    random[at_random] = False
    return dict(zip(VARIANTS, (torch.ones_like(dropped), ~dropped, random), strict=True))
