"""Folds of a rollout's episodes, targets on one fold's records, and the errors of scores that these give."""

from dataclasses import dataclass, field
from heapq import heapreplace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whence.core import (
    BatchTarget,
    Outputs,
    Params,
    PolicyView,
    RecordBatch,
    Target,
    WhenceError,
    WrappedTarget,
    is_mean,
    label_units,
    reads_scored_records,
    target_name,
)
from whence.scores.influence import widen_errors

FOLDS = 8
"""Folds of episodes that errors are computed over where nobody says otherwise."""

LEAST = 3
"""Folds that errors need at least: with a record's own fold left out, two are left to differ."""


class NoMean(WhenceError):
    """The target is no mean over the records, so folds of them say nothing about its error."""


@dataclass(frozen=True, eq=False)
class PartialTarget(WrappedTarget):
    """A target on some of the records: those at the positions `index`, (m,)."""

    index: Int[Tensor, " m"] = field(repr=False)  # to print a tensor takes a millisecond

    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, ""]:
        """Return the target from the outputs of all records."""
        index = self.index.to(outputs.log_prob.device)
        part = Outputs(*(None if column is None else column[index] for column in outputs))  # type: ignore[arg-type]
        return self.target.from_outputs(part, records.take(index))

    def __call__(self, view: PolicyView, params: Params, records: RecordBatch) -> Float[Tensor, ""]:
        """Return the target after running the policy."""
        return self.target(view, params, records.take(self.index))


def split_target(target: BatchTarget, fold: Int[Tensor, " n"]) -> dict[int, PartialTarget]:
    """Return a target on each fold of the records, by its number; `fold` is each record's."""
    return {part: PartialTarget(target, (fold == part).nonzero().flatten()) for part in range(int(fold.max()) + 1)}


def check_batch_target(target: Target) -> BatchTarget:
    """Return a target that reads the scored records, so that some can be left out; refuse another one."""
    if not reads_scored_records(target):
        raise WhenceError(
            f"The target {target_name(target)} has no from_outputs, so it does not read the scored records, and none "
            "can be left out of it. Pass Return(), or a target with from_outputs(outputs, records); or use attribute "
            "without folds."
        )
    return target


def check_mean_target(target: Target) -> None:
    """Refuse a target that is no mean over the scored records, so that no unit can be left out of it."""
    if not is_mean(target):
        raise WhenceError(
            f"leave_one_out needs a target that is a mean over the scored records, and {target_name(target)} is none: "
            "pass Return(), MeanObjective() or, for language models, SequenceReturn() or TokenReturn() without rows of "
            "their own; or leave out leave_one_out."
        )


def check_folds(folds: int | None) -> int | None:
    """Return a number of folds that errors can be computed over, or None; refuse one below 3."""
    if folds is not None and folds < LEAST:
        raise WhenceError(f"folds is {folds}; errors of scores need at least {LEAST}. Pass 8, or None for no errors.")
    return folds


def usable_folds(target: Target, records: RecordBatch, folds: int | None = FOLDS) -> int | None:
    """Return the folds for the errors of a target's scores; None if there can be no errors, or are to be none."""
    if folds is None or not reads_scored_records(target) or records.episode_ids is None:
        return None
    return folds if int(label_units(records, "episode").max()) + 1 >= LEAST else None


def balance_folds(records: RecordBatch, folds: int) -> Int[Tensor, " n"]:
    """Assign episodes to folds of about equal records, (n,) from 0: the longest first, each to the smallest fold.

    Episodes stay whole, but for those longer than a fold, which are cut into stretches of equal lengths.

    Raises:
        WhenceError: it is not known where episodes begin, or there are fewer than three folds or episodes.
    """
    episode = label_units(records, "episode")
    lengths = episode.bincount()
    if min(folds, len(lengths)) < LEAST:
        raise WhenceError(
            f"folds is {folds}, and the records are of {len(lengths)} episodes; errors of scores need at least {LEAST} "
            "of each. Score longer rollouts, or pass folds=None."
        )
    order = records.ids.cpu().argsort()  # time order within an episode
    order = order[episode[order].argsort(stable=True)]
    parts = (lengths * folds + len(records) - 1) // len(records)  # stretches of each episode
    share = (lengths // parts).repeat_interleave(parts)
    first = (parts.cumsum(0) - parts).repeat_interleave(parts)
    stretches = share + (torch.arange(len(share)) - first < (lengths % parts).repeat_interleave(parts))
    sizes = [(0, number) for number in range(folds)]  # a heap: the smallest fold first
    chosen = torch.empty_like(stretches)
    by_length = stretches.argsort(descending=True, stable=True)
    for stretch, length in zip(by_length.tolist(), stretches[by_length].tolist(), strict=True):
        size, number = sizes[0]
        chosen[stretch] = number
        heapreplace(sizes, (size + length, number))
    fold = torch.empty_like(episode)
    fold[order] = chosen.repeat_interleave(stretches)
    numbers: Tensor = fold.unique(return_inverse=True)[1]  # without folds that nothing was left for
    return numbers


def count_folds(fold: Int[Tensor, " n"], episode: Int[Tensor, " n"]) -> Bool[Tensor, "folds n"]:
    """Return (folds, n) whether a fold counts in a record's error: it holds no record of the record's episode.

    A record whose episode leaves fewer than two such folds is left out with its own fold only.
    """
    shares = torch.zeros(int(fold.max()) + 1, int(episode.max()) + 1, dtype=torch.bool)
    shares[fold, episode] = True
    others = ~shares[:, episode]
    is_own_fold = torch.arange(len(shares))[:, None] == fold[None, :]
    return torch.where(others.sum(dim=0) >= LEAST - 1, others, ~is_own_fold)


def check_mean(
    name: str, scores: Float[Tensor, " n"], by_fold: Float[Tensor, "folds n"], sizes: Int[Tensor, " folds"]
) -> None:
    """Refuse, as `NoMean`, a target that is no mean over the records: a fold's part of it is on another scale."""
    means = (by_fold * (sizes / sizes.sum()).to(by_fold.dtype)[:, None]).sum(dim=0)
    scale = float(by_fold.abs().max()) or 1.0
    if not torch.allclose(means, scores, rtol=1e-2, atol=1e-3 * scale):
        raise NoMean(
            f"The parts of the target {name} do not add up to it, so they do not tell its error. Causes: a target that "
            "is no mean over the records (divide it by their number); a layer of the policy, such as a features "
            "extractor, that keeps a state and computes other numbers at each call. Or leave out folds."
        )


def standard_errors(
    scores: Float[Tensor, " n"],
    by_fold: Float[Tensor, "folds n"],
    sizes: Int[Tensor, " folds"],
    counted: Bool[Tensor, "folds n"],
) -> Float[Tensor, " n"]:
    """Return the standard error of each score over folds of the target's episodes, by `widen_errors`.

    The record's own episode is left out of its error, since its own voice is no sample of the target. What the error
    does not cover: the record's own advantage is taken as given.

    Args:
        scores: (n,) the scores by the whole target.
        by_fold: (folds, n) the scores by the mean of each fold.
        sizes: (folds,) the number of records of each fold.
        counted: (folds, n) whether a fold counts in a record's error; see `count_folds`.

    Returns:
        (n,) `sqrt(sum_k w_k^2 (by_fold_k - scores)^2 K / (K - 1))` over the K folds that count, whose shares of the
        records are w_k; widened for K - 1 degrees of freedom.
    """
    weights = counted * sizes.to(scores.dtype)[:, None]
    weights = weights / weights.sum(dim=0)
    count = counted.sum(dim=0)
    squares = (weights * (by_fold - scores)) ** 2
    by_degrees = torch.from_numpy(widen_errors(np.arange(len(sizes), dtype=np.float64))).to(squares.dtype)
    return (squares.sum(dim=0) * count / (count - 1)).sqrt() * by_degrees[count - 1]
