"""Records judged by others: no record has a voice in the target that it is scored by."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.attribution import attribute
from whence.errors import WhenceError
from whence.influence import Influence
from whence.objectives import Objective
from whence.policies import Outputs
from whence.records import RecordBatch
from whence.targets import BatchTarget, Return, Target, target_name

if TYPE_CHECKING:
    from whence.policies import Params, PolicyView


def assign_folds(records: RecordBatch, folds: int) -> Int[Tensor, " n"]:
    """Deal the episodes of a rollout into folds in turn, and return the fold of each record, from 0.

    Episodes stay whole, since their records share returns. Of a rollout with fewer episodes than folds, every
    environment's records are cut into as many stretches instead.

    Args:
        records: with episode ids.
        folds: at least 2.

    Raises:
        WhenceError: fewer than two folds, fewer records than folds, or records without episode ids.
    """
    if folds < 2 or folds > len(records):
        raise WhenceError(f"folds is {folds}; from 2 to the number of records, {len(records)}, are needed.")
    if records.episode_ids is None:
        raise WhenceError(
            "These records have no episode_ids, so episodes cannot be kept whole. Pass episode_ids to RecordBatch."
        )
    environments = records.env_index if records.env_index is not None else torch.zeros_like(records.episode_ids)
    _, episode = torch.unique(torch.stack([environments, records.episode_ids]), dim=1, return_inverse=True)
    if int(episode.max()) + 1 >= folds:
        dealt: Tensor = episode % folds
        return dealt
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
    """Score every record by a target that is made of the other folds' records (the snapshot score, cross-fitted).

    Where the training buffer serves as validation set, a record's score holds its product with itself, which is never
    negative, and products with its own episode. Here episodes are dealt into folds, and the records of a fold are
    scored by the gradient of the target on the others.

    Args:
        policy: see `attribute`.
        records: see `attribute`; with episode ids.
        target: one that reads the scored records, such as `Return()`, which None stands for.
        folds: into which episodes are dealt.
        objective: see `attribute`; advantages are normalised over all records.
        engine: see `attribute`.
        memory: see `attribute`.

    Raises:
        WhenceError: a target that reads no records; see also `assign_folds` and `attribute`.
    """
    target = Return() if target is None else target
    fold, judges = score_fold(target, records, folds)
    named = {str(number): judge for number, judge in enumerate(judges)}
    found = attribute(policy, records, target=named, objective=objective, engine=engine, memory=memory)
    scores = torch.stack([found[name].scores for name in named])
    one = found["0"]
    return replace(
        one,
        scores=scores[fold.cpu(), torch.arange(len(records))],
        provenance=replace(one.provenance, target=f"{target_name(target)} of {folds} folds, each scored by the others"),
    )


def score_fold(target: Target, records: RecordBatch, folds: int) -> tuple[Int[Tensor, " n"], Sequence[Target]]:
    """Return the fold of each record, and for each fold the target made of the other folds' records.

    Raises:
        WhenceError: a target that reads no records; see also `assign_folds`.
    """
    if not isinstance(target, BatchTarget):
        raise WhenceError(
            f"The target {target_name(target)} does not say that it is made of the scored records, so there is nothing "
            "to leave out of it. Pass Return(), or a target with from_outputs(outputs, records); else use attribute."
        )
    fold = assign_folds(records, folds)
    return fold, [_Part(target, (fold != number).nonzero().flatten()) for number in range(folds)]


@dataclass(frozen=True, eq=False)
class _Part:
    """A target made of some of the records only."""

    target: BatchTarget
    index: Int[Tensor, " m"]

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(getattr(self.target, "reads", Outputs._fields))

    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, ""]:
        index = self.index.to(outputs.log_prob.device)
        own = Outputs(*(None if column is None else column[index] for column in outputs))  # type: ignore[arg-type]
        return self.target.from_outputs(own, records.take(index))

    def __call__(self, view: "PolicyView", params: "Params", records: RecordBatch) -> Float[Tensor, ""]:
        return self.target(view, params, records.take(self.index))
