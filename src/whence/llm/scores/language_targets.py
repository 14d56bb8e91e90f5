"""Targets for language models: the rows' own return, that of held-out rows, or trusted demonstrations."""

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whence.core import (
    InvalidRecords,
    MeanObjective,
    MeanTarget,
    Objective,
    Outputs,
    Params,
    PolicyView,
    RecordBatch,
    SummedTarget,
    Target,
    WhenceError,
    target_name,
)
from whence.llm.base import Processes, make_rows, pad_rows
from whence.llm.text import Tokens, check_tokenizer, encode_pair

log = logging.getLogger("whence")


@dataclass(frozen=True, eq=False, repr=False)
class _MeanOverRows(MeanTarget, SummedTarget):
    """A mean over rows or their tokens: the scored rows, or other rows, which run through the policy in parts."""

    rows: RecordBatch | None = None
    batch_size: int = 16
    total: float | None = None  # the denominator of a share of a mean: of a process's rows, or of those with a gradient

    reads: ClassVar[frozenset[str]] = frozenset(["log_prob"])
    linear: ClassVar[bool] = True

    @abstractmethod
    def _terms(self, outputs: Outputs, rows: RecordBatch) -> Float[Tensor, " n"]:
        """Return each row's part of the mean's numerator."""

    def weights(self, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return each row's weight in the mean: the number of its response tokens."""
        mask: Tensor = records.observations["response_mask"]
        return mask.sum(dim=1).to(records.advantages)

    def values(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return each row's value, the mean of its tokens'."""
        return self._terms(outputs, records) / self.weights(records).clamp(min=1)

    def _count(self, rows: RecordBatch) -> int:
        """Return the denominator of the mean, at least 1."""
        return max(1, int(self.weights(rows).double().sum()))

    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, ""]:
        """Return the mean from the outputs of the scored rows."""
        return self._terms(outputs, records).sum() / (self.total or self._count(records))

    def parts(self) -> Iterator[Target]:
        """Yield targets that sum to this one, each over `batch_size` of its `rows`; only itself if `rows` is None."""
        if self.rows is None:
            yield self
            return
        count = self._count(self.rows)
        for first in range(0, len(self.rows), self.batch_size):
            yield partial(self._evaluate_part, self.rows.take(slice(first, first + self.batch_size)), count)

    def _evaluate_part(
        self, rows: RecordBatch, count: int, view: PolicyView, params: Params, records: RecordBatch
    ) -> Float[Tensor, ""]:
        outputs = view.only({"log_prob"}, params, view.prepare(rows))
        return self._terms(outputs, rows.to(outputs.log_prob.device)).sum() / count

    def __call__(self, view: PolicyView, params: Params, records: RecordBatch) -> Float[Tensor, ""]:
        """Return the target, a scalar."""
        base = MeanTarget if self.rows is None else SummedTarget
        return base.__call__(self, view, params, records)

    def describe(self) -> dict[str, Any]:
        """Return what tells the target from another of its kind, for a run's configuration."""
        return {} if self.rows is None else {"rows": len(self.rows), "digest": _digest_rows(self.rows)}

    def __repr__(self) -> str:
        about = "" if self.rows is None else f"{len(self.rows)} rows {_digest_rows(self.rows)}"
        return f"{type(self).__name__}({about})"


def split_mean(target: Target, rows: RecordBatch) -> tuple[RecordBatch, Objective]:
    """Return the rows that a target is a mean over, and the objective that gives each row's term; the terms sum to it.

    These are the scored `rows` if the target has no rows of its own. A target that is no mean is a `WhenceError`.
    """
    if not isinstance(target, _MeanOverRows):
        raise WhenceError(
            f"The target {target_name(target)} is no mean over rows, so it cannot be split into their terms. "
            "SequenceReturn, SequenceReward, TokenReturn and ValidationLoss can."
        )
    mean_rows = rows if target.rows is None else target.rows
    return mean_rows, _Terms(target, target._count(mean_rows))


@dataclass(frozen=True)
class _Terms:
    """Each row's term of a mean over `count` rows or tokens."""

    mean: _MeanOverRows
    count: int
    reads: ClassVar[frozenset[str]] = _MeanOverRows.reads

    def prepare(self, records: RecordBatch) -> RecordBatch:
        return records

    def __call__(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, " n"]:
        return self.mean._terms(outputs, records) / self.count


def target_share(target: Target, rows: RecordBatch, rank: int, number: int) -> Target:
    """Return the share of process `rank` of `number` in a target over all processes' rows; shares sum to the target."""
    if isinstance(target, MeanObjective):
        return replace(target, total=target.total or float(target.weights(rows).sum()))
    if not isinstance(target, _MeanOverRows):
        # A user's function may combine rows in any way, so each process evaluates it over all of them.
        return lambda view, params, records: target(view, params, rows) / number
    if target.rows is None:
        return replace(target, total=target.total or target._count(rows))
    return _ShareOfParts(target, rank, number)


@dataclass(frozen=True, eq=False)
class _ShareOfParts(SummedTarget):
    """Every `number`-th part of a mean over other rows, beginning with part `rank`."""

    mean: _MeanOverRows
    rank: int
    number: int

    def parts(self) -> Iterator[Target]:
        return islice(self.mean.parts(), self.rank, None, self.number)

    def spare_part(self) -> Target:
        # Of a process that has fewer parts than others, or none.
        return next(iter(self.mean.parts()))


def _mask_log_probs(outputs: Outputs, rows: RecordBatch) -> Float[Tensor, "n R"]:
    # Log-probs are 0 elsewhere. Without a weight there, engines detect that target and objective weigh tokens alike.
    return torch.where(rows.observations["response_mask"], outputs.log_prob, 0.0)


def _digest_rows(rows: RecordBatch) -> str:
    """Return a digest that identifies rows."""
    digest = hashlib.sha256()
    tokens = (rows.actions, rows.observations["input_ids"], rows.observations["response_mask"])
    for column in (*tokens, rows.advantages, *([] if rows.rewards is None else [rows.rewards])):
        digest.update(column.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:8]


class SequenceReturn(_MeanOverRows):
    """`mean(log pi(y|x) A_last)` over rows: log-probs summed over a response, advantage of its last token (LDA §5.3).

    LDA finds it much better than `TokenReturn` for language models. Advantages are not normalised again.

    Attributes:
        rows: the rows of the mean, such as responses to held-out prompts; None: the scored rows.
        batch_size: the most of these rows in one pass.
    """

    def _terms(self, outputs: Outputs, rows: RecordBatch) -> Float[Tensor, " n"]:
        return _mask_log_probs(outputs, rows).sum(dim=1) * rows.advantages

    def weights(self, records: RecordBatch) -> Float[Tensor, " n"]:
        """Return ones."""
        return torch.ones_like(records.advantages)


class SequenceReward(SequenceReturn):
    """`mean(log pi(y|x) r)` over rows: log-probs summed over a response, times its reward (LDA's code for RLHF).

    The reward is as the reward function gives it: without a penalty for the divergence, and without a baseline. So
    where all rewards are above 0, every response speaks for itself. Attributes are those of `SequenceReturn`.
    """

    def _terms(self, outputs: Outputs, rows: RecordBatch) -> Float[Tensor, " n"]:
        if rows.rewards is None:
            raise InvalidRecords("SequenceReward reads the rows' rewards, which they lack: pass rewards to make_rows.")
        return _mask_log_probs(outputs, rows).sum(dim=1) * rows.rewards.to(outputs.log_prob)


class TokenReturn(_MeanOverRows):
    """`mean(log pi(token) A)` over the response tokens of all rows, each with its own advantage (LDA §5.3).

    Attributes:
        rows: the rows of the mean, such as responses to held-out prompts; None: the scored rows.
        batch_size: the most of these rows in one pass.
    """

    def _terms(self, outputs: Outputs, rows: RecordBatch) -> Float[Tensor, " n"]:
        advantages: Tensor = rows.observations["advantages"]
        return (outputs.log_prob * advantages).sum(dim=1)


class ValidationLoss(_MeanOverRows):
    """Minus the mean negative log-likelihood of the response tokens of trusted demonstrations (I-PPO).

    The mean is over all tokens of all demonstrations, as in supervised training, at the view's temperature.

    Args:
        input_ids: (m, P + R) prompts, padded on either side, then responses, padded on the right.
        attention_mask: (m, P + R) 1 at tokens, 0 at padding.
        response_mask: (m, R) True at the response tokens that count.
        batch_size: the most demonstrations in one pass.

    Raises:
        InvalidRecords: shapes that do not fit together, or not a single response token.
    """

    def __init__(
        self,
        input_ids: Int[Tensor, "m L"],
        attention_mask: Int[Tensor, "m L"],
        response_mask: Bool[Tensor, "m R"],
        *,
        batch_size: int = 16,
    ) -> None:
        mask = torch.as_tensor(response_mask).bool()
        if not mask.any():
            raise InvalidRecords(
                f"response_mask is False at all tokens of the {len(mask)} demonstrations, so that no likelihood can be "
                "measured. It has to be True at the tokens of a response: check how prompts and responses are "
                "separated, and whether prompts are cut before their responses."
            )
        rows = make_rows(input_ids=input_ids, attention_mask=attention_mask, response_mask=mask)
        super().__init__(rows, batch_size)

    @classmethod
    def of(
        cls,
        dataset: Any,
        tokenizer: Any,
        *,
        max_length: int | None = None,
        batch_size: int = 16,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return the target for demonstrations in the form of TRL's data sets.

        Args:
            dataset: rows with "prompt" and "completion", texts or messages of a chat; completions that are texts get an
                end-of-text token, if they do not end in one.
            tokenizer: the model's tokenizer.
            max_length: the most tokens of a demonstration; longer ones are cut at the end. None: no limit.
            batch_size: the most demonstrations in one pass.
            chat_template_kwargs: further arguments of the chat template, as TRL's setting of that name.

        Raises:
            WhenceError: there are no rows, or other columns; or the chat template does not put the completion after
                the prompt.
            InvalidRecords: not a single response token.
        """
        check_tokenizer(tokenizer)
        pairs = [encode_pair(number, row, tokenizer, chat_template_kwargs) for number, row in enumerate(dataset)]
        if not pairs:
            raise WhenceError("There are no demonstrations; give at least one.")
        if max_length is not None:
            ends = [(each, max(0, max_length - len(each.prompt))) for each in pairs]
            pairs = [Tokens(each.prompt[:max_length], each.response[:end], each.mask[:end]) for each, end in ends]
        prompts, responses, masks = zip(*pairs, strict=True)
        if empty := sum(not any(mask) for mask in masks):
            log.warning("%d of %d demonstrations have no response token that counts.", empty, len(pairs))
        return cls(*pad_rows(prompts, responses, tokenizer.pad_token_id, None, masks), batch_size=batch_size)

    def _terms(self, outputs: Outputs, rows: RecordBatch) -> Float[Tensor, " n"]:
        return _mask_log_probs(outputs, rows).sum(dim=1)


def check_held_out(target: Target, count: int, processes: Processes) -> None:
    """Raise WhenceError for `count` held-out prompts that a target cannot use, or too few for the processes."""
    if not isinstance(target, SequenceReturn | TokenReturn) or target.rows is not None:
        raise WhenceError(
            f"held_out gives prompts for a target over drawn responses, and {target_name(target)} reads none of "
            "them: use SequenceReturn(), SequenceReward() or TokenReturn(), without rows."
        )
    if count < processes.number:
        raise WhenceError(f"There are {count} held-out prompts; give one for each process at least.")


RESPONSE_TARGETS: dict[str, Callable[..., Target]] = {
    "sequence": SequenceReturn,
    "token": TokenReturn,
    "reward": SequenceReward,
}
"""The means over drawn responses, by the command's names."""
