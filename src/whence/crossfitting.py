"""Cross-fitted scores: no record contributes to the target that it is scored by."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from whence.attribution import attribute
from whence.errors import WhenceError
from whence.folds import PartialTarget, check_batch_target
from whence.influence import Influence
from whence.objectives import Objective
from whence.records import RecordBatch, check_records
from whence.targets import Return, Target, target_name


def assign_folds(records: RecordBatch, folds: int) -> Int[Tensor, " n"]:
    """Assign the episodes of a rollout to folds in turn, and return the fold of each record, from 0.

    Episodes stay whole, since their records share returns. If there are fewer episodes than folds, every environment's
    records are cut into `folds` stretches instead.

    Args:
        records: a rollout's records, with episode ids.
        folds: the number of folds, at least 2.

    Raises:
        WhenceError: there are fewer than two folds, fewer records than folds, or no episode ids.
    """
    if folds < 2 or folds > len(records):
        raise WhenceError(f"folds is {folds}; from 2 to the number of records, {len(records)}, are needed.")
    if records.episode_ids is None:
        raise WhenceError(
            "These records have no episode_ids, so episodes cannot be told apart. Pass episode_ids to RecordBatch."
        )
    environments = records.env_index if records.env_index is not None else torch.zeros_like(records.episode_ids)
    _, episode = torch.unique(torch.stack([environments, records.episode_ids]), dim=1, return_inverse=True)
    if int(episode.max()) + 1 >= folds:
        fold: Tensor = episode % folds
        return fold
    _, environment, counts = torch.unique(environments, return_inverse=True, return_counts=True)
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])
    place = torch.empty_like(environment)
    place[environment.argsort(stable=True)] = torch.arange(len(records), device=place.device)
    stretch: Tensor = (place - first[environment]) * folds // counts[environment]
    return stretch


def attribute_crossfit(
    policy: object,
    records: RecordBatch,
    *,
    target: Target | None = None,
    folds: int = 2,
    objective: Objective | None = None,
    engine: str = "auto",
    memory: int = 2**31,
) -> Influence:
    """Score every record by a target of the other folds' records (the snapshot score, cross-fitted).

    If the training buffer also serves as validation set, a record's score contains its product with itself, which is
    never negative, and products with its own episode. Here episodes are assigned to folds, and each fold's records are
    scored by the gradient of the target on the other folds' records.

    Args:
        policy: see `attribute`.
        records: see `attribute`; with episode ids.
        target: a target that reads the scored records; None: `Return()`.
        folds: the number of folds of episodes.
        objective: see `attribute`; advantages are normalised over all records.
        engine: see `attribute`.
        memory: see `attribute`.

    Raises:
        WhenceError: the target reads no records; see also `assign_folds` and `attribute`.
    """
    check_records(records)
    target = Return() if target is None else target
    fold, targets = split_target(target, records, folds)
    by_name = {str(number): part for number, part in enumerate(targets)}
    influences = attribute(policy, records, target=by_name, objective=objective, engine=engine, memory=memory)
    scores = torch.stack([influences[name].scores for name in by_name])
    first = influences["0"]
    return replace(
        first,
        scores=scores[fold.cpu(), torch.arange(len(records))],
        provenance=replace(
            first.provenance, target=f"{target_name(target)} of {folds} folds, each scored by the others"
        ),
    )


def split_target(target: Target, records: RecordBatch, folds: int) -> tuple[Int[Tensor, " n"], Sequence[Target]]:
    """Return the fold of each record, and for each fold the target on the other folds' records.

    Raises:
        WhenceError: the target reads no records; see also `assign_folds`.
    """
    target = check_batch_target(target)
    fold = assign_folds(records, folds)
    return fold, [PartialTarget(target, (fold != number).nonzero().flatten()) for number in range(folds)]
