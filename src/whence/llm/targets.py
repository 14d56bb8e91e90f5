"""What rows are scored by: their own return, that of held-out rows, or trusted demonstrations; all to be raised."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from whence.errors import InvalidRecords, WhenceError
from whence.llm.demonstrations import encoded
from whence.llm.rows import make_rows
from whence.policies import Outputs, Params, PolicyView, compute_outputs
from whence.records import RecordBatch
from whence.targets import Target


@dataclass(frozen=True, eq=False, repr=False)
class _Mean:
    """A mean over rows or their tokens: over the scored ones, or over others, which run through the policy in parts."""

    rows: RecordBatch | None = None
    batch_size: int = 16
    from_outputs: Callable[[Outputs, RecordBatch], Tensor] = field(init=False)

    reads: ClassVar[frozenset[str]] = frozenset(["log_prob"])

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise WhenceError(f"batch_size is {self.batch_size}; at least one row has to fit into a pass.")
        if self.rows is None:
            # Only then may engines take it from the scored rows' outputs; a `BatchTarget` is what has this attribute.
            object.__setattr__(self, "from_outputs", self._from_outputs)

    def _total(self, outputs: Outputs, rows: RecordBatch) -> Float[Tensor, ""]:
        """Return the sum that the mean is made of."""
        raise NotImplementedError

    def _count(self, rows: RecordBatch) -> int:
        """Return what the sum is divided by: the number of response tokens."""
        return int(rows.observations["response_mask"].sum())

    def _from_outputs(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, ""]:
        return self._total(outputs, records) / max(self._count(records), 1)

    def parts(self) -> Iterator[Target]:
        """Return targets that sum to this one, each of `batch_size` of its own rows; itself where it has none."""
        if self.rows is None:
            yield self
            return
        count = max(self._count(self.rows), 1)
        for first in range(0, len(self.rows), self.batch_size):
            yield partial(self._part, self.rows.take(slice(first, first + self.batch_size)), count)

    def _part(
        self, rows: RecordBatch, count: int, view: PolicyView, params: Params, records: RecordBatch
    ) -> Float[Tensor, ""]:
        outputs = _log_probs(view, params, rows)
        return self._total(outputs, rows.to(outputs.log_prob.device)) / count

    def __call__(self, view: PolicyView, params: Params, records: RecordBatch) -> Float[Tensor, ""]:
        """Return the target, a scalar."""
        if self.rows is None:
            return self._from_outputs(_log_probs(view, params, records), records)
        return torch.stack([part(view, params, records) for part in self.parts()]).sum()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.rows is None else _short(self.rows)})"


def share(target: Target, rows: RecordBatch, rank: int, number: int) -> Target:
    """Return one process's part of a target; the parts of all processes sum to it.

    Args:
        target: what is to be raised.
        rows: the scored rows of all processes.
        rank: of the process, from 0.
        number: of processes, each of which scores a part of the rows.
    """
    if isinstance(target, _Mean):
        return _OfOwnRows(target, max(target._count(rows), 1)) if target.rows is None else _Parts(target, rank, number)
    # What a user's function makes of rows is unknown, so each process evaluates the whole of it.
    return _Whole(target, rows, number)


@dataclass(frozen=True, eq=False)
class _OfOwnRows:
    """What a process's rows give to a mean over those of all."""

    mean: _Mean
    count: int

    @property
    def reads(self) -> frozenset[str]:
        return self.mean.reads

    def from_outputs(self, outputs: Outputs, records: RecordBatch) -> Float[Tensor, ""]:
        return self.mean._total(outputs, records) / self.count

    def __call__(self, view: PolicyView, params: Params, records: RecordBatch) -> Float[Tensor, ""]:
        return self.from_outputs(_log_probs(view, params, records), records)


@dataclass(frozen=True, eq=False)
class _Parts:
    """Every so many-th part of a mean over rows of its own."""

    mean: _Mean
    rank: int
    number: int

    def parts(self) -> Iterator[Target]:
        return islice(self.mean.parts(), self.rank, None, self.number)

    def __call__(self, view: PolicyView, params: Params, records: RecordBatch) -> Float[Tensor, ""]:
        return torch.stack([part(view, params, records) for part in self.parts()]).sum()


@dataclass(frozen=True, eq=False)
class _Whole:
    target: Target
    rows: RecordBatch
    number: int

    def __call__(self, view: PolicyView, params: Params, records: RecordBatch) -> Float[Tensor, ""]:
        return self.target(view, params, self.rows) / self.number


def _log_probs(view: PolicyView, params: Params, rows: RecordBatch) -> Outputs:
    return compute_outputs(view, {"log_prob"}, params, view.prepare(rows))


def _of_responses(outputs: Outputs, rows: RecordBatch) -> Float[Tensor, "n R"]:
    # Log-probs are 0 elsewhere; without a weight there, engines see that target and objective weigh tokens alike.
    return torch.where(rows.observations["response_mask"], outputs.log_prob, 0.0)


def _short(rows: RecordBatch) -> str:
    """Say how many rows there are, and a digest that tells them from others."""
    digest = hashlib.sha256()
    for column in (rows.actions, rows.observations["input_ids"], rows.observations["response_mask"], rows.advantages):
        digest.update(column.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return f"{len(rows)} rows {digest.hexdigest()[:8]}"


class SequenceReturn(_Mean):
    """`mean(log pi(y|x) A_last)` over rows: log-probs summed over a response, advantage of its last token (LDA §5.3).

    LDA finds it much better than `TokenReturn` for language models. Advantages are taken as they are in the rows.

    Attributes:
        rows: rows to take it over, such as responses to held-out prompts; None: the scored rows themselves.
        batch_size: the most of `rows` in one pass.
    """

    def _total(self, outputs: Outputs, rows: RecordBatch) -> Float[Tensor, ""]:
        return (_of_responses(outputs, rows).sum(dim=1) * rows.advantages).sum()

    def _count(self, rows: RecordBatch) -> int:
        return len(rows)


class TokenReturn(_Mean):
    """`mean(log pi(token) A)` over the response tokens of all rows, each with its own advantage (LDA §5.3).

    Attributes:
        rows: rows to take it over, such as responses to held-out prompts; None: the scored rows themselves.
        batch_size: the most of `rows` in one pass.
    """

    def _total(self, outputs: Outputs, rows: RecordBatch) -> Float[Tensor, ""]:
        advantages: Tensor = rows.observations["advantages"]
        return (outputs.log_prob * advantages).sum()


class ValidationLoss(_Mean):
    """Minus the mean negative log-likelihood of the response tokens of trusted demonstrations (I-PPO).

    The mean is over all tokens of all demonstrations, as supervised training takes it, at the view's temperature.

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
                f"response_mask is False at all tokens of the {len(mask)} demonstrations, so there is nothing whose "
                "likelihood could be measured. It is True at the tokens of a response: look at how prompts and "
                "responses were told apart, and whether prompts were cut before their responses."
            )
        zeros = torch.zeros(mask.shape)
        columns = {"input_ids": input_ids, "attention_mask": attention_mask, "response_mask": mask}
        super().__init__(make_rows(**columns, log_probs=zeros, advantages=zeros), batch_size)

    @classmethod
    def of(cls, dataset: Any, tokenizer: Any, *, max_length: int | None = None, batch_size: int = 16) -> Self:
        """Return the target of demonstrations as TRL's data sets hold them.

        Args:
            dataset: rows with "prompt" and "completion", texts or messages of a chat.
            tokenizer: of the model.
            max_length: tokens of a demonstration; longer ones lose their ends. None: without limit.
            batch_size: the most demonstrations in one pass.

        Raises:
            WhenceError: another data set.
            InvalidRecords: not a single response token.
        """
        return cls(*encoded(dataset, tokenizer, max_length), batch_size=batch_size)

    def prompts(self) -> list[list[int]]:
        """Return the token ids of the demonstrations' prompts."""
        assert self.rows is not None
        held = self.rows.observations
        width = held["input_ids"].shape[1] - held["response_mask"].shape[1]
        pairs = zip(held["input_ids"][:, :width], held["attention_mask"][:, :width].bool(), strict=True)
        return [ids[mask].tolist() for ids, mask in pairs]

    def _total(self, outputs: Outputs, rows: RecordBatch) -> Float[Tensor, ""]:
        return _of_responses(outputs, rows).sum()
