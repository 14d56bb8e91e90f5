"""Folds of a rollout's episodes, targets on one fold's records, and the errors of scores that these give."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from whence.errors import WhenceError
from whence.policies import Outputs
from whence.records import RecordBatch
from whence.targets import BatchTarget, Target, target_name

if TYPE_CHECKING:
    from whence.policies import Params, PolicyView

LEAST = 3
"""Folds that errors need at least: with a record's own fold left out, two are left to differ."""


@dataclass(frozen=True, eq=False)
class PartialTarget:
    """A target on some of the records.

    Attributes:
        target: the target.
        index: (m,) the positions of its records.
    """

    target: BatchTarget
    index: Int[Tensor, " m"]

    @property
    def reads(self) -> frozenset[str]:
        """The outputs that the target reads."""
        return frozenset(getattr(self.target, "reads", Outputs._fields))

    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, ""]:
        """Return the target from the outputs of all records."""
        index = self.index.to(outputs.log_prob.device)
        part = Outputs(*(None if column is None else column[index] for column in outputs))  # type: ignore[arg-type]
        return self.target.from_outputs(part, records.take(index))

    def __call__(self, view: "PolicyView", params: "Params", records: RecordBatch) -> Float[Tensor, ""]:
        """Return the target after running the policy."""
        return self.target(view, params, records.take(self.index))


def check_batch_target(target: Target) -> BatchTarget:
    """Return a target that reads the scored records, so that some of them can be left out of it.

    Raises:
        WhenceError: it does not.
    """
    if not isinstance(target, BatchTarget):
        raise WhenceError(
            f"The target {target_name(target)} has no from_outputs, so it does not read the scored records, and none "
            "can be left out of it. Pass Return(), or a target with from_outputs(outputs, records); or use attribute "
            "without folds."
        )
    return target


def check_folds(folds: int | None) -> int | None:
    """Return a number of folds that errors can be computed over, or None.

    Raises:
        WhenceError: it is below 3.
    """
    if folds is not None and folds < LEAST:
        raise WhenceError(f"folds is {folds}; errors of scores need at least {LEAST}. Pass 8, or None for no errors.")
    return folds


def count_episodes(records: RecordBatch) -> int:
    """Return the number of episodes that records are of; 0 if it is unknown."""
    if records.episode_ids is None:
        return 0
    return int(torch.stack([_read_environments(records), records.episode_ids]).unique(dim=1).shape[1])


def _read_environments(records: RecordBatch) -> Int[Tensor, " n"]:
    assert records.episode_ids is not None
    return records.env_index if records.env_index is not None else torch.zeros_like(records.episode_ids)


def balance_folds(records: RecordBatch, folds: int) -> Int[Tensor, " n"]:
    """Assign whole episodes to folds of about equal records: the longest first, each to the smallest fold.

    Args:
        records: n records with episode ids.
        folds: the number of folds; with fewer episodes, each episode is a fold.

    Returns:
        The fold of each record, from 0.

    Raises:
        WhenceError: there are no episode ids, or fewer than three folds or episodes.
    """
    if records.episode_ids is None:
        raise WhenceError(
            "These records have no episode_ids, so episodes cannot be told apart, and scores have no errors. Pass "
            "episode_ids to RecordBatch, or folds=None."
        )
    _, episode, lengths = torch.unique(
        torch.stack([_read_environments(records), records.episode_ids]), dim=1, return_inverse=True, return_counts=True
    )
    if min(folds, len(lengths)) < LEAST:
        raise WhenceError(
            f"folds is {folds}, and the records are of {len(lengths)} episodes; errors of scores need at least {LEAST} "
            "of each. Score longer rollouts, or pass folds=None."
        )
    sizes = torch.zeros(min(folds, len(lengths)), dtype=torch.int64)
    fold_of = torch.empty(len(lengths), dtype=torch.int64)
    for each in lengths.cpu().argsort(descending=True, stable=True).tolist():
        smallest = int(sizes.argmin())
        fold_of[each] = smallest
        sizes[smallest] += int(lengths[each])
    fold: Tensor = fold_of[episode.cpu()]
    return fold


def standard_errors(
    scores: Float[Tensor, " n"], by_fold: Float[Tensor, "folds n"], fold: Int[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """Return the standard error of each score over folds of the target's episodes.

    The fold of the record's own episode is left out of its error, since its own voice is no sample of the target. What
    the error does not cover: the record's own advantage is taken as given.

    Args:
        scores: (n,) the scores by the whole target.
        by_fold: (folds, n) the scores by the mean of each fold.
        fold: (n,) the fold of each record.

    Returns:
        (n,) `sqrt(sum_k w_k^2 (by_fold_k - scores)^2 K / (K - 1))` over the K other folds, whose shares of the records
        are w_k.
    """
    counts = torch.bincount(fold, minlength=len(by_fold)).to(scores.dtype)
    counted = torch.arange(len(by_fold))[:, None] != fold[None, :]
    weights = counted * counts[:, None]
    weights = weights / weights.sum(dim=0)
    others = len(by_fold) - 1
    squares = (weights * (by_fold - scores)) ** 2
    return (squares.sum(dim=0) * others / (others - 1)).sqrt()
